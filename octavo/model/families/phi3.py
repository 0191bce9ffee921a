"""Phi-3 and Phi-3.5 mini: Llama's layers with the matrices of q, k, v, and of gate and up, joined in the files.

Models that were stretched to 128k ("longrope") scale their rotary frequencies by one list of factors up to the
original context length and by another beyond it. Keys in the cache cannot change over from one to the other, so
Octavo uses the first list and stops at the original length, where it is exact.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.files import field
from octavo.model.families.common import MAX_POSITIONS, llama_like, mistral_windows, number, refuse, silu_only, size
from octavo.model.spec import LayerSpec, ModelSpec, RopeSpec

_log = logging.getLogger(__name__)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `Phi3ForCausalLM`."""
    silu_only(config)
    refuse(config.get("partial_rotary_factor", 1.0) != 1.0, "heads that are rotated in part")
    seen = mistral_windows(config)
    scaling = field(config, "rope_parameters", dict, None) or field(config, "rope_scaling", dict, None) or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return llama_like(config, "phi3", windows=seen, layer=LayerSpec(0))
    refuse(kind not in ("longrope", "su", "yarn"), f"rope type {kind!r}")
    plain = {"rope_theta": scaling["rope_theta"]} if "rope_theta" in scaling else {}
    base = llama_like(
        {**config, "rope_scaling": None, "rope_parameters": plain}, "phi3", windows=seen, layer=LayerSpec(0)
    )
    return _stretched(base, config, scaling)


def _stretched(base: ModelSpec, config: Mapping[str, Any], scaling: Mapping[str, Any]) -> ModelSpec:
    holder = config if "original_max_position_embeddings" in config else scaling
    original = size(holder, "original_max_position_embeddings", most=MAX_POSITIONS)
    factors = field(scaling, "short_factor", list)
    sound = all(isinstance(factor, (int, float)) and 0 < factor < math.inf for factor in factors)
    refuse(
        not sound or len(factors) != base.head_dim // 2,
        f"a short_factor of {len(factors)} entries for heads of {base.head_dim}",
    )
    ratio = base.max_positions / original
    magnitude = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    magnitude = number(scaling, "attention_factor", magnitude)
    if ratio > 1:
        _log.warning("Phi-3 longrope: sequences of up to %d tokens, of the model's %d.", original, base.max_positions)
    rope = RopeSpec(base.rope.theta, "factors", factors=tuple(map(float, factors)), magnitude=magnitude)
    return replace(base, rope=rope, max_positions=min(original, base.max_positions))
