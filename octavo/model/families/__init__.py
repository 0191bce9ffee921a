"""The model families, each a function from a Hugging Face config to a `ModelSpec`.

The registry is closed: an architecture that is not in it is refused, and nothing that a model folder says
(`auto_map` and the like) can name code to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.model.families import llama, qwen3
from octavo.model.spec import ModelSpec

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "LlamaForCausalLM": llama.spec,
    "Qwen3ForCausalLM": qwen3.spec,
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of the architecture that config.json names. Raises ModelError."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json names no architecture ({names!r}).", "Is this a model folder?")
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ModelError(
            f"The architecture {names[0]!r} is not supported.", f"Supported: {', '.join(sorted(FAMILIES))}."
        )
    return family(config)
