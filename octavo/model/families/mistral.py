"""Mistral and Ministral: Llama's layers, some or all of them with a sliding attention window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.model.families.common import llama_like, mistral_windows, silu_only
from octavo.model.spec import ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `MistralForCausalLM` or `MinistralForCausalLM`. No `sliding_window`: full attention."""
    silu_only(config)
    return llama_like(config, "mistral", windows=mistral_windows(config))
