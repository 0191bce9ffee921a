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


MODELS = ["SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct"]
LOSES_MORE = pytest.mark.xfail(strict=True, reason="AWQ and GPTQ lose more perplexity than rounding on this model")


def rows_of(model: str) -> dict[str, dict[str, float]]:
    return {row["method"]: row for row in KEPT["models"][model]["rows"]}


@pytest.mark.parametrize("model", MODELS)
def test_sizes_and_what_eight_bits_lose(model: str) -> None:
    rows = rows_of(model)
    assert KEPT["models"][model]["tokens"] >= 10_000
    assert all(rows[name]["smaller"] >= 3.6 for name in ("rtn", "awq", "gptq"))
    most = {"bf16": 0.005, "int8": 0.01, "fp8": 0.03, "fp8-kv": 0.04}
    assert all(rows[name]["loss"] < loss for name, loss in most.items() if name in rows)


@pytest.mark.parametrize("model", [MODELS[0], pytest.param(MODELS[1], marks=LOSES_MORE)])
def test_calibrated_methods_lose_less_than_rounding(model: str) -> None:
    rows = rows_of(model)
    assert all(rows[name]["perplexity"] < rows["rtn"]["perplexity"] for name in ("awq", "gptq"))


@pytest.mark.slow
def test_float32_perplexity_of_smollm2(smollm2_gguf: Path) -> None:
    kept = KEPT["models"]["SmolLM2-135M-Instruct"]
    llm = LLM(str(smollm2_gguf), dtype="float32", max_model_len=KEPT["context"] + 1)
    found = evaluate(llm, TEXT.read_text(encoding="utf-8"), KEPT["context"], KEPT["context"], kept["windows"])
    assert found.perplexity == pytest.approx(kept["rows"][0]["perplexity"], rel=1e-3)
