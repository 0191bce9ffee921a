"""The kernels of a CUDA device under the names of `octavo.kernels.ops`: Triton, with cuBLAS for large products.

Shape letters: T tokens, I inputs, O outputs of a product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as product

from octavo.kernels import reference
from octavo.kernels.cpu import AddFn, LinearFn, Norm
from octavo.kernels.gpu import norm as norms
from octavo.kernels.gpu.linear import few, multiply
from octavo.kernels.gpu.quantized_ops import QuantizedOps
from octavo.kernels.quant import QuantWeight

IN_TWO = 216, 288  # tokens with which a gated product may be made in two parts
TILE = 128

def rms_norm(x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`; float64 and a weight for each head are left to torch."""
    if x_TI.dtype != torch.float64 and x_TI.dim() == 2 and x_TI.stride(1) == 1:
        return norms.rms_norm(x_TI, weight_I, eps)
    return reference.rms_norm(x_TI, weight_I, eps)


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """`reference.silu_and_mul`; float64 is left to torch."""
    return (reference if gate_up_TI.dtype == torch.float64 else norms).silu_and_mul(gate_up_TI)


def _gated(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """silu(x G^T) * (x U^T).

    The library gives a large product of some 256 tokens tiles of 128 outputs. Where that makes one for each
    multiprocessor and at least half as many more, those more are a product of their own, with tiles that suit it.
    """
    tokens, outputs = x_TI.shape[0], weight_OI.shape[0]
    if IN_TWO[0] <= tokens <= IN_TWO[1] and bias_O is None and x_TI.dtype in (torch.bfloat16, torch.float16):
        first = TILE * torch.cuda.get_device_properties(x_TI.device).multi_processor_count
        if 3 * first <= 2 * outputs <= 4 * first:
            return norms.silu_and_mul_pieces(product(x_TI, weight_OI[:first]), product(x_TI, weight_OI[first:]))
    return silu_and_mul(product(x_TI, weight_OI, bias_O))


class CudaOps:
    """Products of one device; see `octavo.kernels.ops.Ops`. Those of few tokens are not the vendor's."""

    def __init__(self, device: torch.device) -> None:
        self._quantized = QuantizedOps(device)

    def linear(self, weight_OI: Tensor | QuantWeight, bias_O: Tensor | None, norm: Norm | None = None) -> LinearFn:
        """y = norm(x) W^T + b."""
        if isinstance(weight_OI, QuantWeight):
            return self._quantized.linear(weight_OI, bias_O, norm)
        if norm is None:
            return lambda x_TI: product(x_TI, weight_OI, bias_O)

        def apply(x_TI: Tensor) -> Tensor:
            if few(x_TI, weight_OI):
                return multiply(x_TI, weight_OI, bias_O, None, False, norm)
            return product(rms_norm(x_TI, *norm), weight_OI, bias_O)

        return apply

    def gated_linear(
        self, weight_OI: Tensor | QuantWeight, bias_O: Tensor | None, norm: Norm | None = None
    ) -> LinearFn:
        """silu(norm(x) G^T) * (norm(x) U^T), where the rows of the weight are G, then U."""
        if isinstance(weight_OI, QuantWeight):
            return self._quantized.gated_linear(weight_OI, bias_O, norm)

        def apply(x_TI: Tensor) -> Tensor:
            if few(x_TI, weight_OI):
                return multiply(x_TI, weight_OI, bias_O, None, True, norm)
            x_TI = x_TI if norm is None else rms_norm(x_TI, *norm)
            return _gated(x_TI, weight_OI, bias_O)

        return apply

    def linear_add(self, weight_OI: Tensor | QuantWeight, bias_O: Tensor | None) -> AddFn:
        """residual + x W^T + b, written over the residual."""
        if isinstance(weight_OI, QuantWeight):
            return self._quantized.linear_add(weight_OI, bias_O)

        def apply(x_TI: Tensor, residual_TO: Tensor) -> Tensor:
            if few(x_TI, weight_OI):
                return multiply(x_TI, weight_OI, bias_O, residual_TO, False, None)
            if bias_O is not None:
                residual_TO.add_(bias_O)
            return residual_TO.addmm_(x_TI, weight_OI.t())

        return apply
