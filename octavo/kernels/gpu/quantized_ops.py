"""Products with quantised weights under the names of `octavo.kernels.ops`.

Few tokens: the packed weight is streamed and widened in registers. Many: FP8 weights are multiplied as they are, the
tokens in FP8 too, where the device can; every other weight is widened once a product, for the vendor's library.

Shape letters: T tokens, I inputs, O outputs of a product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as product

from octavo.kernels import cpu
from octavo.kernels.cpu import AddFn, LinearFn, Norm
from octavo.kernels.gpu import norm as norms
from octavo.kernels.gpu.fp8 import can_multiply, multiply, multiply_then, quantize_tokens
from octavo.kernels.gpu.quantized import Packed, can_pack, pack, widen
from octavo.kernels.gpu.quantized_linear import Parts, quantized_linear
from octavo.kernels.gpu.quantized_tuned import MOST_TOKENS
from octavo.kernels.quant import QuantWeight


class QuantizedOps:
    """Products of one device with a `QuantWeight`, which is packed when the function is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: Parts | None = None

    def linear(self, weight: QuantWeight, bias_O: Tensor | None, norm: Norm | None = None) -> LinearFn:
        """y = norm(x) W^T + b."""
        if not can_pack(weight):
            return cpu.linear(weight, bias_O, norm)
        return self._normed(weight, bias_O, norm, False)

    def gated_linear(self, weight: QuantWeight, bias_O: Tensor | None, norm: Norm | None = None) -> LinearFn:
        """silu(norm(x) G^T) * (norm(x) U^T), where the rows of the weight are G, then U."""
        if not can_pack(weight):
            return cpu.gated_linear(weight, bias_O, norm)
        return self._normed(weight, bias_O, norm, True)

    def _normed(self, weight: QuantWeight, bias_O: Tensor | None, norm: Norm | None, gated: bool) -> LinearFn:
        packed, parts = pack(weight), self._shared_parts()
        many = _many_gated if gated else _many

        def apply(x_TI: Tensor) -> Tensor:
            if x_TI.shape[0] > MOST_TOKENS[packed.kind]:
                return many(packed, x_TI, bias_O, norm)
            return quantized_linear(_prepared(packed, x_TI, norm), packed, bias_O, None, gated, parts)

        return apply

    def linear_add(self, weight: QuantWeight, bias_O: Tensor | None) -> AddFn:
        """residual + x W^T + b, written over the residual."""
        if not can_pack(weight):
            return cpu.linear_add(weight, bias_O)
        packed, parts = pack(weight), self._shared_parts()

        def apply(x_TI: Tensor, residual_TO: Tensor) -> Tensor:
            if x_TI.shape[0] > MOST_TOKENS[packed.kind]:
                return _many_added(packed, x_TI, bias_O, residual_TO)
            return quantized_linear(_prepared(packed, x_TI, None), packed, bias_O, residual_TO, False, parts)

        return apply

    def _shared_parts(self) -> Parts:
        if self._parts is None:
            self._parts = Parts(self._device)
        return self._parts


def _prepared(packed: Packed, x_TI: Tensor, norm: Norm | None) -> Tensor:
    """x, normed, columns as they lie in the codes."""
    if norm is not None:
        x_TI = norms.rms_norm(x_TI, *norm)
    return x_TI if packed.order_I is None else x_TI.index_select(1, packed.order_I)


def _many(packed: Packed, x_TI: Tensor, bias_O: Tensor | None, norm: Norm | None) -> Tensor:
    if can_multiply(packed, x_TI.dtype):
        return multiply(*quantize_tokens(x_TI, packed, norm), packed, bias_O, x_TI.dtype)
    return product(_prepared(packed, x_TI, norm), widen(packed, x_TI.dtype), bias_O)


def _many_gated(packed: Packed, x_TI: Tensor, bias_O: Tensor | None, norm: Norm | None) -> Tensor:
    if can_multiply(packed, x_TI.dtype):
        return multiply_then(*quantize_tokens(x_TI, packed, norm), packed, bias_O, None, True, x_TI.dtype)
    return norms.silu_and_mul(_many(packed, x_TI, bias_O, norm))


def _many_added(packed: Packed, x_TI: Tensor, bias_O: Tensor | None, residual_TO: Tensor) -> Tensor:
    if can_multiply(packed, x_TI.dtype):
        return multiply_then(*quantize_tokens(x_TI, packed), packed, bias_O, residual_TO, False, x_TI.dtype)
    wide_OI = widen(packed, x_TI.dtype)
    if bias_O is not None:
        residual_TO.add_(bias_O)
    return residual_TO.addmm_(_prepared(packed, x_TI, None), wide_OI.t())
