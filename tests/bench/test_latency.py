"""`octavo bench latency`: the numbers add up, and nothing comes from the cache."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from octavo import LLM
from octavo.bench.latency import Latency, measure, summary
from octavo.cli.main import main

SIZES = ["--input-len", "20", "--output-len", "4", "--batch-size", "3", "--num-iters-warmup", "1"]


def test_one_batch(smollm2_gguf: Path) -> None:
    llm = LLM(max_model_len=64, num_gpu_blocks_override=40, skip_tokenizer_init=True)
    for _ in range(2):
        found = measure(llm, random.Random(1), 3, 20, 4)
        assert len(found.steps) == 3 and found.first + sum(found.steps) == pytest.approx(found.total, rel=0.2)
    assert llm.stats.generated_tokens == 24
    assert not llm.engine.scheduler.has_work()


def test_summary() -> None:
    found = [Latency(1.0, [0.1, 0.3], 2.0), Latency(3.0, [0.2], 4.0)]
    report = summary(found, 2, 10)
    assert report["total"] == {"mean": 3.0, "p50": 4.0, "p90": 4.0, "p99": 4.0}
    assert report["output_rate"] == pytest.approx(20 / 3)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out" / "latency.json"
    assert main(["bench", "latency", *SIZES, "--num-iters", "2", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "3 x (20 in, 4 out)" in out and "tokens/s" in out
    assert len(json.loads(path.read_text())["iterations"]) == 2
    assert main(["bench", "latency", "--batch-size", "0"]) == 2
