"""Runs the Triton kernels on the CPU: `cases/` in a process whose Triton is an interpreter from its first import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"


@pytest.mark.parametrize("case", sorted(path.name for path in CASES.glob("check_*.py")))
def test_kernels(case: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-o", "python_files=check_*.py", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(CASES / case)], env=environment, cwd=CASES.parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
