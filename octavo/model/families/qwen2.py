"""Qwen 2 and 2.5 dense models: Llama's layers with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.model.families.common import llama_like, qwen_windows, silu_only
from octavo.model.spec import LayerSpec, ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `Qwen2ForCausalLM`."""
    silu_only(config)
    return llama_like(config, "qwen2", windows=qwen_windows(config), layer=LayerSpec(0, qkv_bias=True))
