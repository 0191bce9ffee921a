"""A `Packed` weight as GGUF blocks, which is what the native engine reads.

A group of 32 k inputs becomes k blocks of 32 with the same scale and minimum; codes stay as they are. What blocks
cannot hold is given as float32 for the engine to quantise to 8 bits: that is close to exact for 4-bit codes whose
columns are out of order, and finer than FP8 itself.

Shape letters: I inputs, O outputs, B blocks of 32 inputs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.quantization.packed import Array, Packed, unpack_nibbles

BLOCK = 32


def as_ggml(packed: Packed) -> tuple[Array, str]:
    """(rows as stored, GGUF type): "Q4_0", "Q4_1" or "Q8_0" as uint8 [O, row bytes], or "F32" as float32 [O, I]."""
    fits = packed.order_I is None and packed.columns % BLOCK == 0 and packed.rows == 1
    if packed.kind == "int4" and fits:
        return _four_bits(packed)
    if packed.kind == "int8" and fits and packed.zeros_RG is None:
        codes_OBI = packed.codes.reshape(packed.shape[0], -1, BLOCK)
        blocks = np.empty((*codes_OBI.shape[:2], 34), np.uint8)
        blocks[..., :2] = _halves(_per_block(packed, packed.scales_RG))
        blocks[..., 2:] = codes_OBI.view(np.uint8)
        return blocks.reshape(packed.shape[0], -1), "Q8_0"
    return packed.dequantize(), "F32"


def _four_bits(packed: Packed) -> tuple[Array, str]:
    codes_OBI = unpack_nibbles(packed.codes).reshape(packed.shape[0], -1, BLOCK)
    scales_OB = _per_block(packed, packed.scales_RG)
    head = 2 if packed.zeros_RG is None else 4
    blocks = np.empty((*codes_OBI.shape[:2], head + BLOCK // 2), np.uint8)
    blocks[..., :2] = _halves(scales_OB)
    if packed.zeros_RG is not None:
        zeros_OB = _per_block(packed, packed.zeros_RG)
        blocks[..., 2:4] = _halves(-zeros_OB.astype(np.float32) * scales_OB.astype(np.float32))
    blocks[..., head:] = codes_OBI[..., :16] | codes_OBI[..., 16:] << 4
    return blocks.reshape(packed.shape[0], -1), "Q4_0" if packed.zeros_RG is None else "Q4_1"


def _per_block(packed: Packed, per_group_OG: Array) -> Array:
    return np.repeat(per_group_OG, packed.columns // BLOCK, axis=1)


def _halves(values_OB: Array) -> npt.NDArray[np.uint8]:
    """float16 values as two bytes each, in a last axis of their own."""
    halves: npt.NDArray[np.uint8] = np.ascontiguousarray(values_OB, np.float16)[..., None].view(np.uint8)
    return halves
