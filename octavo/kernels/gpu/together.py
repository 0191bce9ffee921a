"""All kernels that some work needs, compiled at a time, by threads: Triton lets other threads run while it compiles.

The work is rehearsed first: run while Triton is told to leave out every kernel that is not loaded yet, so that what
has to be compiled is known from the launches themselves. Compiled kernels are kept in Triton's cache on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import ASTSource

from octavo.machine import usable_cores


def ready_together(rehearse: Callable[[], None], device: torch.device) -> int:
    """Call `rehearse` and load every kernel that it would launch on `device`; returns how many there were.

    Kernels that are not loaded yet are not launched in it, so it must not depend on what they write. Errors of the
    compiler come up here.
    """
    found: dict[Any, Future[Any]] = {}
    before = knobs.runtime.jit_cache_hook
    # Each of them has a processor while it is at work and most wait for an assembler meanwhile.
    with ThreadPoolExecutor(max(2, min(16, usable_cores()))) as threads:

        def leave_out(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            function = fn.jit_function
            if (function, key) not in found:
                found[function, key] = threads.submit(_load, function, compile, device)
            return True

        knobs.runtime.jit_cache_hook = leave_out
        try:
            rehearse()
        finally:
            knobs.runtime.jit_cache_hook = before
        for (function, key), kernel in found.items():  # where the next launch looks for it
            function.device_caches[device.index or 0][0][key] = kernel.result()
    return len(found)


def _load(function: Any, how: dict[str, Any], device: torch.device) -> Any:
    """One kernel, compiled or found on disk."""
    with torch.cuda.device(device):
        source = ASTSource(function, how["signature"], how["constants"], how["configs"][0])
        options = json.loads(how["specialization_data"])["options"]
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        kernel = triton.compile(source, target=triton.runtime.driver.active.get_current_target(), options=options)
        _ = kernel.run  # makes its launcher and loads it
        return kernel
