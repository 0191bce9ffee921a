"""GGUF block types: the table of all of them, and numpy dequantisation of those that Octavo reads.

A block type stores `block` consecutive elements of a row in `nbytes` bytes; rows are whole blocks. Layouts are
those of the ggml project's `block_*` structs; results equal its reference in float32, bit for bit. To add a
type, write its `_name` function (from uint8 [n, nbytes] into float32 [n, block]) and name it in the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.errors import ModelError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Rows are widened so many bytes at a time: source and result stay in the cache.
_CHUNK_BYTES = 64 << 10


def _half(block_bytes: Bytes) -> Floats:
    """Two bytes per block, [n, 2], read as float16 and widened: [n, 1]."""
    return np.ascontiguousarray(block_bytes).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, out: Floats) -> None:
    """Low nibbles of [n, b] bytes become elements 0 to b-1, high nibbles b to 2b-1."""
    half = packed.shape[1]
    np.bitwise_and(packed, 15, out=out[:, :half], casting="unsafe")
    np.right_shift(packed, 4, out=out[:, half:], casting="unsafe")


def _fifth_bits(packed: Bytes) -> Bytes:
    """Four bytes of [n, 4] as 32 bits, element order, each worth 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    """scale f16, 16 bytes of nibbles that stand for -8 to 7."""
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks[:, :2])


def _q4_1(blocks: Bytes, out: Floats) -> None:
    """scale f16, minimum f16, 16 bytes of nibbles."""
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks[:, :2])
    out += _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes, out: Floats) -> None:
    """scale f16, 4 bytes of fifth bits, 16 bytes of nibbles; together they stand for -16 to 15."""
    _nibbles(blocks[:, 6:], out)
    out += _fifth_bits(blocks[:, 2:6])
    out -= 16
    out *= _half(blocks[:, :2])


def _q5_1(blocks: Bytes, out: Floats) -> None:
    """scale f16, minimum f16, 4 bytes of fifth bits, 16 bytes of nibbles."""
    _nibbles(blocks[:, 8:], out)
    out += _fifth_bits(blocks[:, 4:8])
    out *= _half(blocks[:, :2])
    out += _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes, out: Floats) -> None:
    """scale f16, 32 signed bytes."""
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks[:, :2]), out=out)


def _q2_k(blocks: Bytes, out: Floats) -> None:
    """16 bytes of scale and minimum nibbles, one for each 16 elements; 64 bytes of 2-bit numbers; f16 for each.

    Two halves of 128 elements; in each, 32 bytes hold four runs of 32, lowest bits first.
    """
    count = len(blocks)
    scales = _half(blocks[:, 80:82]) * (blocks[:, :16] & 15)
    minima = _half(blocks[:, 82:84]) * (blocks[:, :16] >> 4)
    parts = out.reshape(count, 2, 4, 32)
    for run in range(4):
        parts[:, :, run] = blocks[:, 16:80].reshape(count, 2, 32) >> (2 * run) & 3
    groups = out.reshape(count, 16, 16)
    groups *= scales[:, :, None]
    groups -= minima[:, :, None]


def _q3_k(blocks: Bytes, out: Floats) -> None:
    """32 bytes of third bits (clear means minus 4), 64 bytes of 2-bit numbers, 12 of 6-bit scales, f16.

    2-bit numbers as in Q2_K; bit b of the 32 bytes belongs to the b-th run of 32 elements.
    """
    count = len(blocks)
    parts = out.reshape(count, 2, 4, 32)
    for run in range(4):
        parts[:, :, run] = blocks[:, 32:96].reshape(count, 2, 32) >> (2 * run) & 3
    runs = out.reshape(count, 8, 32)
    for bit in range(8):
        runs[:, bit] -= 4 - ((blocks[:, :32] >> bit & 1) << 2)
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    nibbles = np.concatenate((low & 15, low >> 4), axis=1)
    pairs = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (nibbles | pairs << 4).astype(np.float32) - 32
    out.reshape(count, 16, 16)[:] *= (_half(blocks[:, 108:110]) * scales)[:, :, None]


def _scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 scales and 8 minima of 6 bits in 12 bytes: [n, 8] each.

    Bytes 0-3 and 4-7 hold the first four of each and, in their top bits, the upper bits of the last four, whose
    lower nibbles are in bytes 8-11.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return scales, minima


def _scaled_runs(blocks: Bytes, out: Floats) -> None:
    """The common end of Q4_K and Q5_K: runs of 32 elements times their scale less their minimum."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    runs = out.reshape(len(blocks), 8, 32)
    runs *= (_half(blocks[:, :2]) * scales)[:, :, None]
    runs -= (_half(blocks[:, 2:4]) * minima)[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    """f16 of the scales, f16 of the minima, 12 bytes of both, 128 bytes: each 32 bytes hold two runs of nibbles."""
    packed = blocks[:, 16:].reshape(-1, 32)
    _nibbles(packed, out.reshape(-1, 64))
    _scaled_runs(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    """As Q4_K with 32 bytes of fifth bits before the nibbles: bit b belongs to the b-th run of 32 elements."""
    packed = blocks[:, 48:].reshape(-1, 32)
    _nibbles(packed, out.reshape(-1, 64))
    runs = out.reshape(len(blocks), 8, 32)
    for bit in range(8):
        runs[:, bit] += (blocks[:, 16:48] >> bit & 1) << 4
    _scaled_runs(blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    """128 bytes of low nibbles, 64 of upper bit pairs, 16 signed scales (one for 16 elements), f16.

    Two halves of 128 elements: 64 bytes of nibbles hold two pairs of runs, 32 bytes of pairs four runs.
    """
    count = len(blocks)
    low = blocks[:, :128].reshape(count, 2, 2, 32)
    high = blocks[:, 128:192].reshape(count, 2, 32)
    runs = out.reshape(count, 2, 4, 32)
    for run in range(4):
        nibble = low[:, :, run % 2] >> (run // 2 * 4) & 15
        runs[:, :, run] = nibble | (high >> (2 * run) & 3) << 4
    out -= 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    out.reshape(count, 16, 16)[:] *= scales[:, :, None]


class GgmlType(msgspec.Struct, frozen=True):
    """One storage type: its number in files, elements and bytes per block, and how to widen it.

    `dequantize` is None for a type that Octavo cannot read yet, and for the plain types (block 1).
    """

    code: int
    name: str
    block: int
    nbytes: int
    dequantize: Callable[[Bytes, Floats], None] | None = None


# Plain types have the same names as in `weights.checkpoint.PLAIN_DTYPES`.
_TABLE = (
    GgmlType(0, "F32", 1, 4),
    GgmlType(1, "F16", 1, 2),
    GgmlType(2, "Q4_0", 32, 18, _q4_0),
    GgmlType(3, "Q4_1", 32, 20, _q4_1),
    GgmlType(6, "Q5_0", 32, 22, _q5_0),
    GgmlType(7, "Q5_1", 32, 24, _q5_1),
    GgmlType(8, "Q8_0", 32, 34, _q8_0),
    GgmlType(9, "Q8_1", 32, 36),
    GgmlType(10, "Q2_K", 256, 84, _q2_k),
    GgmlType(11, "Q3_K", 256, 110, _q3_k),
    GgmlType(12, "Q4_K", 256, 144, _q4_k),
    GgmlType(13, "Q5_K", 256, 176, _q5_k),
    GgmlType(14, "Q6_K", 256, 210, _q6_k),
    GgmlType(15, "Q8_K", 256, 292),
    GgmlType(16, "IQ2_XXS", 256, 66),
    GgmlType(17, "IQ2_XS", 256, 74),
    GgmlType(18, "IQ3_XXS", 256, 98),
    GgmlType(19, "IQ1_S", 256, 50),
    GgmlType(20, "IQ4_NL", 32, 18),
    GgmlType(21, "IQ3_S", 256, 110),
    GgmlType(22, "IQ2_S", 256, 82),
    GgmlType(23, "IQ4_XS", 256, 136),
    GgmlType(24, "I8", 1, 1),
    GgmlType(25, "I16", 1, 2),
    GgmlType(26, "I32", 1, 4),
    GgmlType(27, "I64", 1, 8),
    GgmlType(28, "F64", 1, 8),
    GgmlType(29, "IQ1_M", 256, 56),
    GgmlType(30, "BF16", 1, 2),
    GgmlType(34, "TQ1_0", 256, 54),
    GgmlType(35, "TQ2_0", 256, 66),
    GgmlType(39, "MXFP4", 32, 17),
    GgmlType(40, "NVFP4", 64, 36),
    GgmlType(41, "Q1_0", 128, 18),
)
BY_CODE = {kind.code: kind for kind in _TABLE}
BY_NAME = {kind.name: kind for kind in _TABLE}
READABLE = tuple(kind.name for kind in _TABLE if kind.block == 1 or kind.dequantize)


def dequantize(packed: npt.NDArray[Any], name: str) -> Floats:
    """Widen whole blocks: uint8 [..., row bytes] of type `name` -> float32 [..., row elements].

    Little more than the result is allocated. ModelError when the type is not supported.
    """
    kind = BY_NAME.get(name)
    if kind is None or kind.dequantize is None:
        raise ModelError(f"GGUF type {name} is not supported.", f"Use a file of {', '.join(READABLE)}.")
    lead, row_bytes = packed.shape[:-1], packed.shape[-1]
    if row_bytes % kind.nbytes:
        raise ModelError(f"a row of {row_bytes} bytes is not a whole number of {name} blocks ({kind.nbytes} B).")
    elements = row_bytes // kind.nbytes * kind.block
    rows = packed.reshape(math.prod(lead), row_bytes)
    result = np.empty((rows.shape[0], elements), dtype=np.float32)
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        out = result[start : start + step].reshape(-1, kind.block)
        kind.dequantize(part.reshape(-1, kind.nbytes), out)
    return result.reshape(*lead, elements)
