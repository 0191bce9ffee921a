"""The only place that reads the process environment.

Octavo is configured by options, not by variables. At most five `OCTAVO_*` variables exist, all for
debugging; the ones in use are in `DEBUG_VARIABLES`. Variables of other projects that change how fast
Octavo runs are listed in `FOREIGN_VARIABLES`, so that `octavo doctor` can show them.
"""

from __future__ import annotations

import os

DEBUG_VARIABLES = {
    "OCTAVO_LOG_LEVEL": "debug, info, warning or error: what is written to stderr (default: warning)",
}

FOREIGN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_INTERPRET",
)

_LOG_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def log_level() -> int:
    """`OCTAVO_LOG_LEVEL` as a number of the `logging` module; anything unknown counts as "warning"."""
    return _LOG_LEVELS.get(os.environ.get("OCTAVO_LOG_LEVEL", "").lower(), _LOG_LEVELS["warning"])


def variables() -> dict[str, str]:
    """Those of `DEBUG_VARIABLES` and `FOREIGN_VARIABLES` that are set, with their values, for a report."""
    return {name: os.environ[name] for name in (*DEBUG_VARIABLES, *FOREIGN_VARIABLES) if name in os.environ}
