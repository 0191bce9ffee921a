"""Llama 2 and 3.x, and everything with the same layers under the same name (SmolLM2, TinyLlama ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.model.families.common import llama_like, refuse, silu_only
from octavo.model.spec import ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `LlamaForCausalLM`."""
    silu_only(config)
    refuse(config.get("use_sliding_window"), "a sliding attention window")
    return llama_like(config, "llama")
