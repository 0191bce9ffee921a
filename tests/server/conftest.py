"""Servers that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import Running


@pytest.fixture(scope="session")
def fake() -> Iterator[Running]:
    """A server without a model: fast, and the same prompt gives the same answer."""
    with Running("--num-gpu-blocks-override", "4000", "--max-model-len", "2048") as server:
        yield server
        assert server.process.poll() is None, server.text
