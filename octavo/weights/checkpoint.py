"""What a checkpoint is: names, facts about each tensor, and the bytes as stored.

A `Checkpoint` is opened once, checks its files' structure completely while opening, and reads no weights
before they are touched. It knows nothing of models: `load.py` matches it with what a model needs.

Forms. `read` returns a read-only view, memory-mapped where there is a file, so slicing it (rows for column
parallel layers, columns for row parallel ones) costs nothing and only the touched pages are read:

- plain types: the tensor's shape; numpy has no bfloat16 or float8, so "BF16" comes as uint16 and "F8_*" as
  uint8, and the consumer reinterprets the bits by the dtype tag;
- GGUF block types ("Q4_1", ...): uint8 of shape [..., bytes per row]; `quantization.ggml` has the block sizes;
- matrices quantised in other ways ("INT4", "INT8", "FP8"): float32; `weights.quantized` reads them as they are.

`to_float32` widens either form.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.quantization import float8, ggml

Array = npt.NDArray[Any]

# dtype tag -> numpy dtype of the stored bits
PLAIN_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}

QUANTISED = ("INT4", "INT8", "FP8")
"""dtype tags of matrices in several pieces; see `octavo.weights.quantized`"""


class TensorInfo(msgspec.Struct, frozen=True):
    """Facts about one stored tensor. `shape` is in elements, rows first; `file` names where it lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


class Checkpoint(Protocol):
    """A set of named tensors; see the module docstring for the forms that `read` delivers."""

    def names(self) -> list[str]:
        """All tensor names, in file order."""

    def info(self, name: str) -> TensorInfo:
        """Facts about one tensor; KeyError when there is none of that name."""

    def read(self, name: str) -> Array:
        """A read-only view of the tensor as stored."""


def is_block_type(dtype: str) -> bool:
    """Whether `dtype` is a GGUF block type, that is, stored as bytes rather than as elements."""
    return dtype not in PLAIN_DTYPES and dtype not in QUANTISED


def to_float32(stored: Array, dtype: str) -> npt.NDArray[np.float32]:
    """The values of `stored` (a `read`, or rows of one) as float32; the last axis grows for block types."""
    if dtype in QUANTISED:  # `read` has widened it
        return np.asarray(stored, np.float32)
    if is_block_type(dtype):
        return ggml.dequantize(stored, dtype)
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("F8_"):
        return _FLOAT8_TABLES[dtype][stored]
    return stored.astype(np.float32)


_FLOAT8_TABLES = {"F8_E4M3": float8.E4M3, "F8_E5M2": float8.E5M2}
