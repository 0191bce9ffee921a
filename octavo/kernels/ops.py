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
from octavo.kernels.cpu import LinearFn


@dataclass(frozen=True)
class Ops:
    """The kernels of one device; each field has the contract of the function of that name in `reference`,
    `linear` and `gated_linear` that of `octavo.kernels.cpu`."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Tensor | None], LinearFn]
    gated_linear: Callable[[Tensor, Tensor | None], LinearFn]


_TORCH = Ops("torch", reference.rms_norm, reference.add_rms_norm, cpu.rotate, cpu.linear, cpu.gated_linear)


def ops_for(device: torch.device) -> Ops:
    """The fastest installed kernels for `device`: Triton's on CUDA, else torch, which runs on every device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from octavo.kernels.gpu import ops as gpu

        return Ops("triton", gpu.rms_norm, gpu.add_rms_norm, reference.rotate, gpu.linear, gpu.gated_linear)
    return _TORCH
