"""The model families, each a function from a Hugging Face config to a `ModelSpec`.

The registry is closed: an architecture that is not in it is refused, and nothing that a model folder says
(`auto_map` and the like) can name code to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from octavo.errors import ModelError
from octavo.model.families import gemma, granite, llama, mistral, phi3, qwen2, qwen3
from octavo.model.families.common import token_ids
from octavo.model.spec import ModelSpec

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "Gemma2ForCausalLM": gemma.gemma2_spec,
    "Gemma3ForCausalLM": gemma.gemma3_spec,
    "Gemma3ForConditionalGeneration": gemma.gemma3_text_spec,
    "GraniteForCausalLM": granite.spec,
    "LlamaForCausalLM": llama.spec,
    "MinistralForCausalLM": mistral.spec,
    "MistralForCausalLM": mistral.spec,
    "Phi3ForCausalLM": phi3.spec,
    "Qwen2ForCausalLM": qwen2.spec,
    "Qwen3ForCausalLM": qwen3.spec,
    "Qwen3MoeForCausalLM": qwen3.moe_spec,
}


def spec_from_config(config: Mapping[str, Any], ends: Any = None) -> ModelSpec:
    """The spec of the architecture that config.json names. Raises ModelError.

    `ends`: the `eos_token_id` of generation_config.json, one id or a list; they come after those of config.json.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json names no architecture ({names!r}).", "Is this a model folder?")
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ModelError(
            f"The architecture {names[0]!r} is not supported.", f"Supported: {', '.join(sorted(FAMILIES))}."
        )
    spec = family(config)
    further = token_ids({"eos_token_id": ends, "vocab_size": spec.vocab_size}, "eos_token_id")
    return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *further))))
