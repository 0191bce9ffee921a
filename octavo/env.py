"""The only place that reads the process environment.

Octavo is configured by options, not by variables. At most five `OCTAVO_*` variables exist for debugging; the ones in
use are in `DEBUG_VARIABLES`. Keys may come in `KEY_VARIABLES`, so that no command line shows them. Variables of other
projects that change how fast Octavo runs are listed in `FOREIGN_VARIABLES`, so that `octavo doctor` can show them.
"""

from __future__ import annotations

import os

DEBUG_VARIABLES = {
    "OCTAVO_LOG_LEVEL": "debug, info, warning or error: what is written to stderr (default: warning)",
}

KEY_VARIABLES = {
    "OCTAVO_API_KEY": "API key of the server, several separated by commas",
    "OCTAVO_ADMIN_KEY": "admin key of the server",
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


def key(name: str) -> str | None:
    """The value of one of `KEY_VARIABLES`, None when it is unset or empty."""
    return os.environ.get(name) or None if name in KEY_VARIABLES else None


def engine_environment() -> dict[str, str]:
    """The environment of an engine process: this one's, less the keys, which it has no use for."""
    return {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
