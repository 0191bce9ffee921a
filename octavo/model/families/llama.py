"""Llama 2 and 3.x, and everything with the same layers under the same name (SmolLM2, TinyLlama ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.model.families.common import llama_like
from octavo.model.spec import ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `LlamaForCausalLM`."""
    return llama_like(config, "llama", qk_norm=False)
