"""Programmatic dependent launch: a kernel is brought onto the device while the one before it still runs.

Where the device can do that (compute capability 9 and later), kernels are launched with `launch_pdl` and wait in
their first line for the memory of the kernel before them; only then may the next one be brought in. So the work of
two kernels never overlaps, only the end of one with the start of the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ALLOWED = [True]  # a list, so that a measurement can switch it off


@triton.jit
def in_turn(EARLY: tl.constexpr):
    """The first line of a kernel that may have been launched early."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early(x: Tensor) -> bool:
    """Whether kernels on the device of `x` are launched early."""
    return ALLOWED[0] and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
