"""The native CPU engine: C++ kernels and a whole decoder step in one call, without torch.

`octavo.runner.native` drives it; see `src/engine.h` for the contract of `Engine`. The extension module is built with
the package; where that was not possible `missing()` says so and everything else runs without it.
"""

from __future__ import annotations

import importlib.util

SETS = ("avx512bf16", "avx512", "avx2", "portable")  # of kernels, the fastest first


def missing() -> str:
    """Why the native engine cannot be used; "" when it can."""
    if importlib.util.find_spec("octavo.kernels.native._native") is None:
        return "this build has no native module; it is built by pip where a C++ compiler is installed"
    return ""


def kernel_sets() -> list[str]:
    """Those of SETS that this build and this processor have, the fastest first. Only when nothing is missing."""
    from octavo.kernels.native import _native

    return _native.kernel_sets()
