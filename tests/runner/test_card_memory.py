"""A model that does not fit on the card is refused with what it needs, what there is, and ways out, best first."""

from __future__ import annotations

import pytest

from octavo.bench.shapes import SHAPES
from octavo.config import GIB, EngineConfig, ModelConfig, ModelFacts
from octavo.errors import ConfigError
from octavo.model.families import spec_from_config
from octavo.runner.memory import CardMemory, model_facts


def test_refusal_names_need_have_and_ranked_fixes() -> None:
    model = ModelFacts(131072, 131072, "bfloat16", 8_000_000_000)  # 16 GiB for the longest sequence
    memory = CardMemory(EngineConfig(ModelConfig(max_model_len=131072)), 24 * GIB, 21 * GIB, 15 * GIB)
    with pytest.raises(ConfigError) as caught:
        memory.resolve(model, 6 * GIB - (1 << 20), "15.00 GiB of weights")
    have, fixes = caught.value.cause, caught.value.fix
    assert "21.00 GiB of the card's 24.00 GiB" in have and "15.00 GiB of weights leave 6.00 GiB" in have
    effects = [float(part.split(" GiB")[0]) for part in fixes.split("(")[1:]]
    assert len(effects) >= 3 and effects == sorted(effects, reverse=True)
    assert "--quantization fp8" in fixes and "--max-model-len" in fixes


def test_of_experts_only_the_chosen_are_met() -> None:
    """The cost of a token, by hand: of eight experts of each layer it meets two."""
    dense = SHAPES["tiny"] | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    mixed = dense | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | experts
    plain, chosen = spec_from_config(dense, None), spec_from_config(mixed, None)
    assert model_facts(plain, "bfloat16").parameters == plain.parameters
    assert chosen.parameters - model_facts(chosen, "bfloat16").parameters == 2 * (8 - 2) * 3 * 64 * 256
    wide, narrow = (model_facts(plain, "bfloat16", kv).kv_bytes_per_token for kv in ("", "fp8"))
    assert wide == 2 * narrow
