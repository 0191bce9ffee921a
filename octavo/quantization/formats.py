"""How quantised weights lie in published checkpoints, and the way from there to `Packed`.

One function a format. Each takes the arrays of one module as stored and returns the canonical layout; that shapes
fit each other was checked before (`octavo.weights.quantized`). Where the layouts allow it the codes are views of the
file, otherwise they are transposed once.

Sources: AutoAWQ's "gemm" kernels (words hold columns 0, 2, 4, 6, 1, 3, 5, 7), AutoGPTQ and GPTQModel (words hold
consecutive rows; zeros are stored less one in the first version of the format), the documents of compressed-tensors
(words hold consecutive columns; signed codes are stored plus half their range).

Shape letters: I inputs, O outputs, G groups of inputs, W words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelError
from octavo.quantization.packed import Array, Kind, Packed, pack_nibbles, unpack_nibbles

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""which of eight columns lies in each half byte of a word, the lowest first"""


def awq(words_IW: Array, zero_words_GW: Array, scales_GO: Array) -> Packed:
    """AWQ "gemm": int32 words along the outputs, 4 bits, a zero for each group."""
    inputs, outputs = words_IW.shape[0], scales_GO.shape[1]
    words = np.ascontiguousarray(words_IW).view(np.uint32)
    codes = np.empty((outputs, inputs // 2), np.uint8)
    for place, column in enumerate(AWQ_COLUMNS):
        values_IW = (words >> np.uint32(4 * place)).astype(np.uint8) & 15
        codes[column::8] = (values_IW[::2] | values_IW[1::2] << 4).T
    zeros_GO = np.empty(scales_GO.shape, np.uint8)
    for place, column in enumerate(AWQ_COLUMNS):
        zeros_GO[:, column::8] = np.ascontiguousarray(zero_words_GW).view(np.uint32) >> np.uint32(4 * place) & 15
    group = inputs // len(scales_GO)
    return Packed("int4", (outputs, inputs), codes, _scales(scales_GO.T), group, zeros_RG=_plain(zeros_GO.T, "int4"))


def gptq(
    words_WO: Array, zero_words_GW: Array, scales_GO: Array, group_I: Array | None, bits: int, zero_offset: int
) -> Packed:
    """GPTQ: int32 words along the inputs, 4 or 8 bits. `zero_offset`: 1 where zeros are stored less one.

    `group_I` is the group of each input; None or ascending: the inputs lie in order. ModelError when groups are not
    of one size.
    """
    outputs = words_WO.shape[1]
    per_word = 32 // bits
    inputs = words_WO.shape[0] * per_word
    parts = np.ascontiguousarray(words_WO).view(np.uint8).reshape(-1, outputs, 4)
    codes = np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(outputs, -1)  # low half bytes are even inputs
    # The offset is added to whole words, as it was subtracted from them: a zero of 0 borrows from its neighbour.
    step = np.uint32((0x11111111 if bits == 4 else 0x01010101) * zero_offset)
    zero_words = np.ascontiguousarray(zero_words_GW).view(np.uint32) + step
    zeros_GO = zero_words.view(np.uint8)
    if bits == 4:
        zeros_GO = unpack_nibbles(zeros_GO)
    kind: Kind = "int4" if bits == 4 else "int8"
    if bits == 8:
        codes, zeros_GO = (codes ^ 128).view(np.int8), (zeros_GO ^ 128).view(np.int8)
    groups = len(scales_GO)
    order_I, codes = _ordered(codes, kind, group_I, groups, inputs)
    zeros_RG = _plain(zeros_GO[:, :outputs].T, kind)
    return Packed(
        kind, (outputs, inputs), codes, _scales(scales_GO.T), inputs // groups, zeros_RG=zeros_RG, order_I=order_I
    )


def pack_quantized(
    words_OW: Array, zero_words_WG: Array | None, scales_OG: Array, group_I: Array | None, inputs: int
) -> Packed:
    """compressed-tensors "pack-quantized": int32 words along the inputs, 4 or 8 bits by the number of words."""
    outputs = len(words_OW)
    bits = 32 * words_OW.shape[1] // inputs
    kind: Kind = "int4" if bits == 4 else "int8"
    codes = np.ascontiguousarray(words_OW).view(np.uint8)
    zeros_OG = None
    if zero_words_WG is not None:
        packed = np.ascontiguousarray(zero_words_WG.T).view(np.uint8)
        zeros_OG = (unpack_nibbles(packed) if bits == 4 else packed)[:, :outputs].T
    if bits == 8:
        codes = (codes ^ 128).view(np.int8)
        zeros_OG = None if zeros_OG is None else (zeros_OG ^ 128).view(np.int8)
    scales_OG = np.broadcast_to(scales_OG, (outputs, scales_OG.shape[1]))
    order_I, codes = _ordered(codes, kind, group_I, scales_OG.shape[1], inputs)
    zeros = None if zeros_OG is None else _plain(zeros_OG, kind)
    group = inputs // scales_OG.shape[1]
    return Packed(kind, (outputs, inputs), codes, _scales(scales_OG), group, zeros_RG=zeros, order_I=order_I)


def int8(codes_OI: Array, scales: Array) -> Packed:
    """compressed-tensors "int-quantized": int8 codes, one scale a row or one in all."""
    outputs, inputs = codes_OI.shape
    scales_OG = np.broadcast_to(scales.reshape(-1, 1), (outputs, 1))
    return Packed("int8", (outputs, inputs), codes_OI, _scales(scales_OG), inputs)


def fp8(codes_OI: Array, scales: Array, input_scale: float | None) -> Packed:
    """FP8: e4m3 codes, and scales of the tensor, of its rows, or of blocks of 128 x 128 (by their shape)."""
    outputs, inputs = codes_OI.shape
    blocks = (-(-outputs // 128), -(-inputs // 128))
    wide = np.ascontiguousarray(scales, np.float32)
    if scales.ndim == 2 and scales.shape == blocks and scales.shape != (outputs, 1) and scales.size > 1:
        return Packed("fp8", (outputs, inputs), codes_OI, wide, 128, rows=128, input_scale=input_scale)
    scales_OG = np.ascontiguousarray(np.broadcast_to(wide.reshape(-1, 1), (outputs, 1)))
    return Packed("fp8", (outputs, inputs), codes_OI, scales_OG, inputs, input_scale=input_scale)


def _ordered(
    codes: Array, kind: Kind, group_I: Array | None, groups: int, inputs: int
) -> tuple[npt.NDArray[np.int32] | None, Array]:
    """The order that makes the groups of the inputs contiguous (None: they are), and the codes in it."""
    size = inputs // groups
    if group_I is None or np.array_equal(group_I, np.arange(inputs) // size):
        return None, codes
    order_I = np.argsort(group_I, kind="stable").astype(np.int32)
    if not np.array_equal(group_I[order_I], np.arange(inputs) // size):
        raise ModelError(f"its {groups} groups of inputs (g_idx) are not of {size} inputs each")
    if kind == "int4":
        return order_I, pack_nibbles(unpack_nibbles(codes)[:, order_I])
    return order_I, codes[:, order_I]


def _plain(zeros_OG: Array, kind: Kind) -> Array | None:
    """Zeros as they are; None when all are the implied one."""
    implied = 8 if kind == "int4" else 0
    return None if (zeros_OG == implied).all() else np.ascontiguousarray(zeros_OG)


def _scales(scales_OG: Array) -> Array:
    """Scales as kept: float16 stays, whatever float16 holds exactly becomes it, the rest is float32."""
    if scales_OG.dtype == np.float16:
        return np.ascontiguousarray(scales_OG)
    wide = np.ascontiguousarray(scales_OG, np.float32)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float16)
    return narrow if np.array_equal(narrow.astype(np.float32), wide) else wide
