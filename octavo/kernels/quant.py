"""Quantised weights as kernels see them: one canonical layout, and its oracle.

`octavo.quantization` brings every checkpoint format (AWQ, GPTQ, compressed-tensors, FP8) into a `QuantWeight`, once,
while loading. A kernel of a device takes a `QuantWeight` and may repack it as it likes; where there is no kernel,
`linear` here works on every device: dequantise, then multiply. It is also what faster kernels are tested against.

Shape letters: T tokens, I inputs, O outputs, R groups of rows, G groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "fp8"]

FP8_MAX = 448.0
"""the largest number of e4m3"""
IMPLIED_ZERO = {"int4": 8, "int8": 0, "fp8": 0}
"""the zero of weights that have no `zeros_RG`"""


@dataclass(frozen=True, eq=False)
class QuantWeight:
    """A matrix [O, I] of which w[o, i] = (code[o, i] - zero[o // rows, i // columns]) * scale[the same].

    kind "int4": `codes` is uint8 [O, I / 2]; the low half of a byte is the even column; codes are 0 to 15 and zeros
    uint8, 8 if there are none. "int8": `codes` is int8 [O, I], zeros are int8, 0 if there are none. "fp8": `codes` is
    float8_e4m3fn [O, I], without zeros.

    Integer kinds have rows = 1 and I a multiple of `columns` (one scale a row: columns = I); their scales are
    float16, bfloat16 or float32, as stored. FP8 has float32 scales: one a row (rows 1, columns I) or one a block
    (128 x 128, ragged at the edges); one of the whole tensor is repeated for every row.

    order_I: where the checkpoint has its columns in the order of their importance (GPTQ's desc_act), column j of
    `codes` belongs to the input order_I[j] (int32); groups of columns are contiguous in `codes`. None: as they lie.
    input_scale: of FP8 with a static scale of activations, float32 []; a kernel may multiply in FP8 with x / it, and
    without it with scales of its own for each token, or leave x alone.
    """

    kind: Kind
    shape: tuple[int, int]
    codes: Tensor
    scales_RG: Tensor
    columns: int
    rows: int = 1
    zeros_RG: Tensor | None = None
    order_I: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of everything it holds."""
        held = (self.codes, self.scales_RG, self.zeros_RG, self.order_I, self.input_scale)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """weight_OI, columns in the order of the inputs; computed in float32, float64 for float64."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values_OI = unpack_int4(self.codes) if self.kind == "int4" else self.codes
        values_OI = values_OI.to(wide)
        if self.zeros_RG is not None:
            values_OI -= self._spread(self.zeros_RG.to(wide))
        elif IMPLIED_ZERO[self.kind]:
            values_OI -= IMPLIED_ZERO[self.kind]
        weight_OI = (values_OI * self._spread(self.scales_RG.to(wide))).to(dtype)
        if self.order_I is None:
            return weight_OI
        ordered_OI = torch.empty_like(weight_OI)
        ordered_OI[:, self.order_I.long()] = weight_OI
        return ordered_OI

    def _spread(self, per_group_RG: Tensor) -> Tensor:
        """One value for each element, from one for each group; not copied where a group is a whole row."""
        outputs, inputs = self.shape
        if self.rows > 1:
            per_group_RG = per_group_RG.repeat_interleave(self.rows, 0)[:outputs]
        if per_group_RG.shape[1] == 1:
            return per_group_RG
        return per_group_RG.repeat_interleave(self.columns, 1)[:, :inputs]


@dataclass(frozen=True, eq=False)
class JoinedWeight:
    """Matrices over the same inputs whose rows come one after the other, but which cannot be stored as one: some are
    quantised and others not, or their columns lie in different orders."""

    parts: tuple[Tensor | QuantWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """[O, I] of the whole."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


Weight = Tensor | QuantWeight | JoinedWeight


def kind_of(weight: Weight) -> tuple[object, ...]:
    """Everything about a weight but its values and its device: equal for two that the same kernels serve."""
    if isinstance(weight, Tensor):
        return (weight.dtype, weight.shape)
    if isinstance(weight, JoinedWeight):
        return tuple(map(kind_of, weight.parts))
    parts = (weight.codes, weight.scales_RG, weight.zeros_RG, weight.order_I, weight.input_scale)
    return (weight.kind, weight.shape, weight.columns, weight.rows, *(p if p is None else kind_of(p) for p in parts))


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """weight_OI of any kind of weight; a plain one as it is."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, QuantWeight):
        return weight.dequantize(dtype)
    return torch.cat([dense(part, dtype) for part in weight.parts])


def unpack_int4(codes: Tensor) -> Tensor:
    """uint8 [O, I / 2] -> uint8 [O, I], values 0 to 15."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).reshape(codes.shape[0], -1)


def linear(x_TI: Tensor, weight: QuantWeight, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b in x's dtype, by dequantising the whole weight first: the oracle, and the way without a kernel."""
    return torch.nn.functional.linear(x_TI, weight.dequantize(x_TI.dtype), bias_O)
