"""Granite 3 dense models: Llama's layers with four constant factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.model.families.common import llama_like, number, silu_only
from octavo.model.spec import ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `GraniteForCausalLM`."""
    silu_only(config)
    return replace(
        llama_like(config, "granite"),
        embed_scale=number(config, "embedding_multiplier", 1.0),
        attention_scale=number(config, "attention_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
    )
