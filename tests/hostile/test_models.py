"""Hostile model folders and files: refused in seconds with file and reason, in bounded memory, and no code runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from tests.hostile.corpus import SHAPES, Case, cases, gguf, good_folder, good_gguf, header_of, weights
from tests.weights.files import safetensors_header

SECONDS = 5.0
BYTES = 200 << 20
CASES = cases()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All cases, opened one after the other by one child process."""
    root = tmp_path_factory.mktemp("hostile")
    sound = [good_folder(root / "sound"), gguf(good_gguf())(root / "sound-gguf")]
    paths = [case.make(root / f"case{i}") for i, case in enumerate(CASES)]
    lines = "\n".join(map(str, [*sound, *paths]))
    command = [sys.executable, "-m", "tests.hostile.open_all"]
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(CASES) + 2, done.stderr[-2000:]
    return dict(zip(["sound", "sound-gguf", *(case.name for case in CASES)], results, strict=True))


def test_there_are_many_and_no_two_alike() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 120


@pytest.mark.parametrize("name", ["sound", "sound-gguf"])
def test_the_sound_models_open(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    assert outcomes[name].get("opened") == "length", outcomes[name]


@pytest.mark.parametrize("case", [case for case in CASES if case.words], ids=lambda case: case.name)
def test_refused(outcomes: dict[str, dict[str, Any]], case: Case) -> None:
    found = outcomes[case.name]
    assert "refused" in found, found
    assert found["code"] in (2, 3)
    assert all(word in found["refused"] for word in case.words), found["refused"]
    assert len(found["refused"]) < 4000
    assert found["seconds"] < SECONDS and found["bytes"] < BYTES + (66 << 20), found
    assert found["seen"] == []


@pytest.mark.parametrize("case", [case for case in CASES if not case.words], ids=lambda case: case.name)
def test_inert(outcomes: dict[str, dict[str, Any]], case: Case) -> None:
    """What a model brings along is not run; an evil template fails in its sandbox."""
    found = outcomes[case.name]
    assert found.get("opened") == "length" and found["seen"] == [], found
    assert not list(Path(found["path"]).glob("*.ran"))
    if "template" in case.name:
        assert "template" in found and "<class" not in found["template"]


def test_weights_that_are_not_numbers(tmp_path: Path) -> None:
    """The model opens; what it would compute ends with an error, not with tokens."""
    header, data = header_of(SHAPES)
    nan = np.full(len(data) // 4, np.nan, "<f4").tobytes()
    folder = weights(safetensors_header(header, nan))(tmp_path / "nan")
    llm = LLM(str(folder), max_model_len=32, num_gpu_blocks_override=8)
    (output,) = llm.generate([[3, 4]], SamplingParams(max_tokens=4, logprobs=1), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids == []


@pytest.mark.parametrize("name", ["safetensors cut at 8", "config not UTF-8", "magic", "fifo", "pickle only"])
def test_exit_code_three(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = [case for case in CASES if case.name == name]
    path = case.make(tmp_path / "model")
    assert main(["generate", "--model", str(path), "x"]) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("octavo: error: ")
