"""Kernels compiled for a card that is not there: run by `test_together.py` in a process of its own.

Triton is given a driver that names the card and can do nothing else, so kernels are compiled but never loaded.
"""

from __future__ import annotations

import contextlib

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from octavo.kernels.gpu import norm, together


class NoCard:
    """The active driver as far as compiling asks it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def work() -> None:
    """Three different kernels, one of them twice."""
    x, weight = torch.zeros(4, 256, dtype=torch.bfloat16), torch.ones(256)
    norm.rms_norm(x, weight, 1e-5)
    norm.rms_norm(x, weight, 1e-5)
    norm.rms_norm(x, weight.bfloat16(), 1e-5)
    norm.silu_and_mul(x)


def main() -> None:
    """Rehearse, then launch: nothing may be left to compile."""
    driver.set_active(NoCard())
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[misc, assignment]
    CompiledKernel.run = property(lambda kernel: None)
    print(together.ready_together(work, torch.device("cpu")), "ready")
    late: list[str] = []
    together.knobs.runtime.jit_cache_hook = lambda *, repr, **_: late.append(repr)
    launch = JITFunction.run
    JITFunction.run = lambda self, *args, warmup, **more: launch(self, *args, warmup=True, **more)
    work()
    print(len(late), "late")


if __name__ == "__main__":
    main()
