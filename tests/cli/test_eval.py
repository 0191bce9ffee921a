"""`octavo eval perplexity`: the figure itself, windows, refusals."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch

from octavo.cli.eval import windows
from octavo.cli.main import main
from tests.engine.smollm2 import smollm2_decoder
from tests.model.driver import Sequences

TEXT = "The river rises in the hills north of the town. It runs for forty miles, past meadows, to the sea. " * 2
SMALL = ["--dtype", "float32", "--num-gpu-blocks-override", "40"]


@pytest.mark.parametrize(
    ("tokens", "context", "stride", "expected"),
    [
        (10, 4, 4, [(0, 4, 1), (4, 8, 5), (8, 10, 9)]),
        (9, 4, 4, [(0, 4, 1), (4, 8, 5)]),
        (8, 4, 2, [(0, 4, 1), (2, 6, 4), (4, 8, 6)]),
        (7, 4, 2, [(0, 4, 1), (2, 6, 4), (4, 7, 6)]),
        (3, 8, 8, [(0, 3, 1)]),
        (1, 8, 8, []),
        (0, 8, 8, []),
    ],
)
def test_windows(tokens: int, context: int, stride: int, expected: list[tuple[int, int, int]]) -> None:
    assert windows(tokens, context, stride) == expected


def test_equals_the_sum_over_logits(smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    arguments = ["eval", "perplexity", str(path), "--context", "24", "--stride", "16", "--json", *SMALL]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    from octavo.text.tokenizer import Tokenizer
    from octavo.weights.gguf import GgufCheckpoint

    ids = Tokenizer.from_gguf(GgufCheckpoint(smollm2_gguf).metadata).encode(TEXT)
    decoder, total, counted = smollm2_decoder(smollm2_gguf), 0.0, 0
    for start, end, first in windows(len(ids), 24, 16):
        logits = Sequences(decoder, 1, max_len=32).prefill([ids[start:end]], 32)[0]
        logprobs = torch.log_softmax(logits, dim=-1)
        total += sum(float(logprobs[i - start - 1, ids[i]]) for i in range(first, end))
        counted += end - first
    assert result["tokens"] == counted == len(ids) - 1
    assert result["perplexity"] == pytest.approx(math.exp(-total / counted), rel=5e-3)  # weights are not rounded here
    assert 0.3 < result["bits_per_byte"] < 2 and result["weight_bytes"] > 80e6


def test_standard_input_and_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert main(["eval", "perplexity", "-", "--context", "32", "--max-windows", "1", *SMALL]) == 0
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/file"], "cannot be read"),
        (["-", "--context", "1"], "context is 1"),
        (["-", "--context", "8", "--stride", "9"], "stride 9"),
        (["-", "--max-windows", "0"], "max_windows is 0"),
        (["-", "--context", "64", "--max-model-len", "64"], "does not fit"),
    ],
)
def test_refusals(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert main(["eval", "perplexity", *arguments, *SMALL]) == 2
    assert words in capsys.readouterr().err
