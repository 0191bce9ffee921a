"""From a `RopeSpec` to the rotary frequencies: the published scaling rules. F = half the head dim."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.model.spec import RopeSpec

Floats = NDArray[np.float32]


def inverse_frequencies(rope: RopeSpec, head_dim: int, factors_F: Floats | None = None) -> Floats:
    """Radians per position of each pair, float32 [D/2].

    default: theta^(-2i/D) (Su et al. 2021). linear: divided by `factor` (position interpolation, Chen et al.
    2023). llama3: wavelengths beyond original / low_freq_factor are divided by `factor`, those below
    original / high_freq_factor stay, and between the two the division is blended in linearly (Llama 3.1).
    yarn: pairs that turn often stay, those that turn rarely are divided by `factor`, with a ramp over the pair
    index between (Peng et al. 2023). factors: divided by the spec's own factors, else by the given tensor.
    """
    return _scaled(rope, head_dim, factors_F).astype(np.float32)


def _scaled(rope: RopeSpec, head_dim: int, factors_F: Floats | None) -> NDArray[np.floating[Any]]:
    exponents_F = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    plain_F: Floats = np.reciprocal(np.power(np.float32(rope.theta), exponents_F))
    if rope.kind == "default":
        return plain_F
    if rope.kind == "linear":
        return plain_F / rope.factor
    if rope.kind == "factors" and rope.factors:
        own_F: Floats = np.array(rope.factors, dtype=np.float32)
        return plain_F / own_F
    if rope.kind == "factors":
        if factors_F is None:
            raise ModelError("This model scales its rotary frequencies by a tensor, which was not loaded.")
        return plain_F / factors_F
    if rope.kind == "yarn":
        blend_F = _yarn_blend(rope, head_dim)
        return (plain_F / np.float32(rope.factor) * (1 - blend_F) + plain_F * blend_F).astype(np.float32)
    wavelengths_F = 2 * math.pi / plain_F
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend_F = ((rope.original_positions / wavelengths_F - low) / (high - low)).clip(0.0, 1.0)
    return (1 - blend_F) * plain_F / rope.factor + blend_F * plain_F


def _yarn_blend(rope: RopeSpec, head_dim: int) -> Floats:
    """How much of each pair's own frequency is kept."""

    def pair(turns: float) -> float:
        ratio = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = max(math.floor(pair(rope.beta_fast)), 0), min(math.ceil(pair(rope.beta_slow)), head_dim - 1)
    ramp_F = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    blend_F: Floats = 1 - ramp_F.clip(0.0, 1.0)
    return blend_F
