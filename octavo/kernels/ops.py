"""Which implementation of each kernel runs on a device. The only place that knows what is installed.

`ops_for(device)` is asked once, when the model is built; layers keep the `Ops` they were given.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels import cpu, reference
from octavo.kernels.cpu import AddFn, LinearFn, Norm
from octavo.kernels.quant import QuantWeight


@dataclass(frozen=True)
class Ops:
    """The kernels of one device; each field has the contract of the function of that name in `reference`,
    the products those of `octavo.kernels.cpu`. Products take plain and quantised weights."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    linear: Callable[[Tensor | QuantWeight, Tensor | None, Norm | None], LinearFn]
    gated_linear: Callable[[Tensor | QuantWeight, Tensor | None, Norm | None], LinearFn]
    linear_add: Callable[[Tensor | QuantWeight, Tensor | None], AddFn]


_TORCH = Ops("torch", reference.rms_norm, cpu.rotate, cpu.linear, cpu.gated_linear, cpu.linear_add)


def ops_for(device: torch.device) -> Ops:
    """The fastest installed kernels for `device`: Triton's on CUDA, else torch, which runs on every device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from octavo.kernels.gpu.ops import CudaOps, rms_norm

        ops = CudaOps(device)
        return Ops("triton", rms_norm, reference.rotate, ops.linear, ops.gated_linear, ops.linear_add)
    return _TORCH
