"""The kernels of CUDA devices under the names of `octavo.kernels.ops`: Triton, with cuBLAS for matrix products.

Shape letters: T tokens, J heads, D head dim, I inputs, O outputs of a product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import LinearFn
from octavo.kernels.gpu import norm


def rms_norm(x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`; float64 and a weight for each head are left to torch."""
    if x_TI.dtype != torch.float64 and x_TI.dim() == 2 and x_TI.stride(1) == 1:
        return norm.rms_norm(x_TI, weight_I, eps)
    return reference.rms_norm(x_TI, weight_I, eps)


def add_rms_norm(x_TI: Tensor, residual_TI: Tensor, weight_I: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`; float64 is left to torch."""
    if x_TI.dtype != torch.float64:
        return norm.add_rms_norm(x_TI, residual_TI, weight_I, eps)
    return reference.add_rms_norm(x_TI, residual_TI, weight_I, eps)


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """`reference.silu_and_mul`; float64 is left to torch."""
    return (reference if gate_up_TI.dtype == torch.float64 else norm).silu_and_mul(gate_up_TI)


def linear(weight_OI: Tensor, bias_O: Tensor | None) -> LinearFn:
    """y = x W^T + b."""
    return lambda x_TI: torch.nn.functional.linear(x_TI, weight_OI, bias_O)


def gated_linear(weight_OI: Tensor, bias_O: Tensor | None) -> LinearFn:
    """silu(x G^T) * (x U^T), where the rows of the weight are G, then U."""
    return lambda x_TI: silu_and_mul(torch.nn.functional.linear(x_TI, weight_OI, bias_O))
