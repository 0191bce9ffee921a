"""Quantised weights on the host: the canonical layout of `octavo.kernels.quant.QuantWeight` as numpy arrays.

Loaders make them from files (`octavo.quantization.formats`), cut and join them, and hand them to a device or to the
native engine. Nothing here imports torch.

Shape letters: I inputs, O outputs, R groups of rows, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelError
from octavo.quantization.float8 import E4M3

Array = npt.NDArray[Any]
Kind = Literal["int4", "int8", "fp8"]

IMPLIED_ZERO = {"int4": 8, "int8": 0, "fp8": 0}
"""the zero of weights that have no `zeros_RG`; the same as in `octavo.kernels.quant`"""


@dataclass(frozen=True, eq=False)
class Packed:
    """A quantised matrix [O, I]; fields and formula as in `octavo.kernels.quant.QuantWeight`.

    FP8 codes are the bits of float8_e4m3fn as uint8, scales float16 or float32 (bfloat16 ones become float16 where
    that is exact, else float32).
    """

    kind: Kind
    shape: tuple[int, int]
    codes: Array
    scales_RG: Array
    columns: int
    rows: int = 1
    zeros_RG: Array | None = None
    order_I: Array | None = None
    input_scale: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.codes, self.scales_RG, self.zeros_RG, self.order_I)
        return sum(array.nbytes for array in arrays if array is not None)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """weight_OI, columns in the order of the inputs."""
        if self.kind == "fp8":
            values_OI = E4M3[self.codes]
        else:
            codes = unpack_nibbles(self.codes) if self.kind == "int4" else self.codes
            values_OI = codes.astype(np.float32)
        if self.zeros_RG is not None:
            values_OI -= self._spread(self.zeros_RG.astype(np.float32))
        elif IMPLIED_ZERO[self.kind]:
            values_OI -= np.float32(IMPLIED_ZERO[self.kind])
        values_OI *= self._spread(self.scales_RG.astype(np.float32))
        if self.order_I is None:
            return values_OI
        ordered_OI = np.empty_like(values_OI)
        ordered_OI[:, self.order_I] = values_OI
        return ordered_OI

    def take_rows(self, start: int, stop: int) -> Packed:
        """Some of the outputs. ModelError where that would cut a block of scales."""
        if self.rows > 1 and start % self.rows:
            raise ModelError(f"Rows {start} to {stop} do not begin at a block of {self.rows} rows of scales.")
        scales = slice(start // self.rows, -(-stop // self.rows))
        return replace(
            self,
            shape=(stop - start, self.shape[1]),
            codes=self.codes[start:stop],
            scales_RG=self.scales_RG[scales],
            zeros_RG=None if self.zeros_RG is None else self.zeros_RG[scales],
        )

    def take_columns(self, start: int, stop: int) -> Packed:
        """Some of the inputs. ModelError where that would cut a group, or columns are out of order."""
        whole = stop == self.shape[1]
        if self.order_I is not None or start % self.columns or (stop % self.columns and not whole):
            raise ModelError(
                f"Columns {start} to {stop} of a weight with groups of {self.columns} columns cannot be taken apart.",
                "Take fewer devices, or a checkpoint without desc_act.",
            )
        if self.columns == self.shape[1]:
            raise ModelError("A weight with one scale for whole rows cannot be cut by columns here.")
        scales = slice(start // self.columns, -(-stop // self.columns))
        per_byte = 2 if self.kind == "int4" else 1
        return replace(
            self,
            shape=(self.shape[0], stop - start),
            codes=self.codes[:, start // per_byte : stop // per_byte],
            scales_RG=self.scales_RG[:, scales],
            zeros_RG=None if self.zeros_RG is None else self.zeros_RG[:, scales],
        )

    def _spread(self, per_group_RG: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        outputs, inputs = self.shape
        if self.rows > 1:
            per_group_RG = np.repeat(per_group_RG, self.rows, 0)[:outputs]
        if per_group_RG.shape[1] == 1:
            return per_group_RG
        return np.repeat(per_group_RG, self.columns, 1)[:, :inputs]


def join(parts: Sequence[Packed]) -> Packed | None:
    """One weight whose rows are those of all parts, one after the other; None when they cannot be stored as one."""
    first = parts[0]
    for part in parts[1:]:
        if (part.kind, part.columns, part.rows, part.shape[1]) != (
            first.kind, first.columns, first.rows, first.shape[1],
        ):  # fmt: skip
            return None
        if (part.order_I is None) != (first.order_I is None):
            return None
        if part.order_I is not None and first.order_I is not None and not np.array_equal(part.order_I, first.order_I):
            return None
        if (part.input_scale is None) != (first.input_scale is None):
            return None
    if first.rows > 1 and any(part.shape[0] % part.rows for part in parts[:-1]):
        return None
    zeros = None
    if any(part.zeros_RG is not None for part in parts):
        zeros = np.concatenate([zeros_of(part) for part in parts])
    scales = [part.input_scale for part in parts if part.input_scale is not None]
    return replace(
        first,
        shape=(sum(part.shape[0] for part in parts), first.shape[1]),
        codes=np.concatenate([part.codes for part in parts]),
        scales_RG=np.concatenate([part.scales_RG for part in parts]),
        zeros_RG=zeros,
        input_scale=max(scales) if scales else None,  # they multiply the same inputs
    )


def zeros_of(part: Packed) -> Array:
    """zeros_RG, also where they are only implied."""
    if part.zeros_RG is not None:
        return part.zeros_RG
    return np.full(part.scales_RG.shape, IMPLIED_ZERO[part.kind], np.uint8 if part.kind == "int4" else np.int8)


def unpack_nibbles(codes: Array) -> npt.NDArray[np.uint8]:
    """uint8 [O, I / 2] -> uint8 [O, I], values 0 to 15."""
    out = np.empty((*codes.shape, 2), np.uint8)
    np.bitwise_and(codes, 15, out=out[..., 0])
    np.right_shift(codes, 4, out=out[..., 1])
    return out.reshape(*codes.shape[:-1], -1)


def pack_nibbles(values: Array) -> npt.NDArray[np.uint8]:
    """uint8 [O, I] of 0 to 15 -> uint8 [O, I / 2]; the low half of a byte is the even column."""
    packed: npt.NDArray[np.uint8] = values[..., ::2] | values[..., 1::2] << np.uint8(4)
    return packed
