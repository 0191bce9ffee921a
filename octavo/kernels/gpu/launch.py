"""Programmatic dependent launch: a kernel is brought onto the device while those before it still run.

Where the device can do that (compute capability 9 and later), kernels are launched with `launch_pdl`. Each lets the
next one in at once and then waits for the memory of the kernel before it, which itself has waited; so the work of two
kernels never overlaps, but a kernel may do before its wait what depends on no kernel of the step: `ask_for` brings
weights, or keys and values of earlier steps, into the L2 cache. Whoever reads what a kernel of this step wrote before
its wait is wrong, unless a kernel that was not launched early (such as one of torch's) lies between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ALLOWED = [True]  # a list, so that a measurement can switch it off
LINE = tl.constexpr(128)  # bytes that one request brings into the cache


@triton.jit
def in_turn(EARLY: tl.constexpr):
    """The first line of a kernel that may have been launched early and has nothing to do before its wait."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def let_in(EARLY: tl.constexpr):
    """Lets the next kernel in; `await_turn` must follow before anything of this step is read or written."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def await_turn(EARLY: tl.constexpr):
    """Waits for the memory of the kernel before this one."""
    if EARLY:
        gdc_wait()


@triton.jit
def ask_for(pointers):
    """Bring the lines at `pointers` into the L2 cache; nothing waits for them. Only for a kernel launched early."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64, bitcast=True)], tl.int32, False, 1
    )


def early(x: Tensor) -> bool:
    """Whether kernels on the device of `x` are launched early."""
    return ALLOWED[0] and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
