"""Every kernel that some work launches is compiled before it is launched; see `without_a_card.py`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_nothing_is_left_to_compile(tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, "-m", "tests.kernels.without_a_card"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["3 ready", "0 late"], done.stdout + done.stderr[-2000:]
