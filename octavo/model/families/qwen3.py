"""Qwen3 dense models: Llama's layers with a norm on each query and key head, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.model.families.common import llama_like
from octavo.model.spec import ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `Qwen3ForCausalLM`."""
    return llama_like(config, "qwen3", qk_norm=True, head_dim=128)
