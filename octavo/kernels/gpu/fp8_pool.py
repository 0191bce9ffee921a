"""Keys and values of an FP8 pool: how they become that, and queries for them."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.quant import FP8_MAX

LARGEST = tl.constexpr(FP8_MAX)


@triton.jit
def in_fp8(x, scale):
    """x / scale in e4m3, clamped to its range; `scale` fits x."""
    return tl.minimum(tl.maximum(x.to(tl.float32) / scale, -LARGEST), LARGEST).to(tl.float8e4nv)


@triton.jit
def scaled_for(q, scale):
    """Queries for keys in FP8 with this scale, in a type that holds both: float16, which e4m3 widens to at once."""
    return (q.to(tl.float32) * scale).to(tl.float32 if q.dtype == tl.float32 else tl.float16)
