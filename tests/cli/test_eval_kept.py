"""The kept text and figures of docs/quantization.md: float32 is reproduced, and the table keeps its promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.eval import evaluate
from octavo.engine.llm import LLM

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "tests" / "data" / "eval.txt"
KEPT = json.loads((ROOT / "benchmarks" / "results" / "quantisation.json").read_text())


@pytest.mark.parametrize(
    "model",
    [
        "SmolLM2-135M-Instruct",
        pytest.param(
            "Qwen2.5-Coder-0.5B-Instruct",
            marks=pytest.mark.xfail(strict=True, reason="GPTQ and AWQ lost more than rounding in the one run"),
        ),
    ],
)
def test_the_kept_table(model: str) -> None:
    rows = {row["method"]: row for row in KEPT["models"][model]["rows"]}
    assert all(rows[name]["smaller"] >= 3.6 for name in ("rtn", "awq", "gptq") if name in rows)
    assert all(rows[name]["perplexity"] < rows["rtn"]["perplexity"] for name in ("awq", "gptq") if name in rows)
    assert rows["int8"]["loss"] < 0.01 and rows["fp8"]["loss"] < 0.03 and rows["fp8-kv"]["loss"] < 0.03


@pytest.mark.slow
def test_float32_perplexity_of_smollm2(smollm2_gguf: Path) -> None:
    kept = KEPT["models"]["SmolLM2-135M-Instruct"]
    llm = LLM(str(smollm2_gguf), dtype="float32", max_model_len=KEPT["context"] + 1)
    found = evaluate(llm, TEXT.read_text(encoding="utf-8"), KEPT["context"], KEPT["context"], kept["windows"])
    assert found.perplexity == pytest.approx(kept["rows"][0]["perplexity"], rel=1e-3)
