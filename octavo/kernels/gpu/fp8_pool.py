"""Keys and values of an FP8 pool: how they become that, and products with them in 16 bits.

The hardware cannot bring bytes into the order of the tensor cores' right operand, but it can so bring pairs of bytes:
two neighbours along the head dim are read as one 16-bit word, and become two tiles, one of the even and one of the
odd places.
"""

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


@triton.constexpr_function
def _byte(odd: bool) -> str:
    """PTX for the even or odd bytes of the four in $1, as two float16."""
    half = "h" if odd else "l"
    return (
        "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, $1, 0x3120; mov.b32 {l, h}, t; "
        "cvt.rn.f16x2.e4m3x2 $0, " + half + "; }"
    )


@triton.jit
def _widened(x, ODD: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        y = tl.inline_asm_elementwise(_byte(ODD), "=r,r", [x], tl.float16, is_pure=True, pack=2)
    else:
        b = x.to(tl.int32)
        if ODD:
            b = b >> 8
        bits = (((b & 0x80) << 8) | ((b & 0x7F) << 7)).to(tl.int16)  # a float16 that is 256 times too small
        y = bits.to(tl.float16, bitcast=True) * 256.0
    return y.to(tl.float16)


@triton.jit
def pairs(x, ASM: tl.constexpr):
    """(even, odd) places of the head dim, in float16, of 16-bit words of a pool."""
    return _widened(x, False, ASM), _widened(x, True, ASM)


@triton.jit
def split_pairs(q):
    """(even, odd) columns."""
    return tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))


@triton.jit
def join_pairs(even, odd):
    """The reverse of `split_pairs`."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1] * 2])


@triton.jit
def as_words(POOL):
    """A pointer to bytes of a pool as one to pairs of them."""
    return POOL.to(tl.pointer_type(tl.int16), bitcast=True)
