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


def _q4_1(blocks: Bytes, out: Floats) -> None:
    """scale f16, minimum f16, 16 bytes: low nibbles are elements 0-15, high nibbles 16-31."""
    np.bitwise_and(blocks[:, 4:], 15, out=out[:, :16], casting="unsafe")
    np.right_shift(blocks[:, 4:], 4, out=out[:, 16:], casting="unsafe")
    out *= _half(blocks[:, :2])
    out += _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes, out: Floats) -> None:
    """scale f16, 32 signed bytes."""
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks[:, :2]), out=out)


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
    GgmlType(2, "Q4_0", 32, 18),
    GgmlType(3, "Q4_1", 32, 20, _q4_1),
    GgmlType(6, "Q5_0", 32, 22),
    GgmlType(7, "Q5_1", 32, 24),
    GgmlType(8, "Q8_0", 32, 34, _q8_0),
    GgmlType(9, "Q8_1", 32, 36),
    GgmlType(10, "Q2_K", 256, 84),
    GgmlType(11, "Q3_K", 256, 110),
    GgmlType(12, "Q4_K", 256, 144),
    GgmlType(13, "Q5_K", 256, 176),
    GgmlType(14, "Q6_K", 256, 210),
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
