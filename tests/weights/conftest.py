"""The `gguf` package's reader of the embedded model: slow to open, so once for all tests here."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest


@pytest.fixture(scope="session")
def oracle(smollm2_gguf: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(smollm2_gguf)
