"""`octavo plan`: numbers of public shapes by hand, quantised ones, what does not fit; the engine agrees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.shapes import SHAPES, write_shape
from octavo.cli.main import main
from octavo.config import engine_config
from octavo.engine.build import open_model
from octavo.runner.memory import weight_bytes


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_bytes_of_public_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, str(write_shape("llama3.1-8b", tmp_path)))
    assert found["weight_bytes"] == {"bfloat16": 2 * 8_030_261_248}
    assert (found["kv_bytes_per_token"], found["kv_bytes_per_block"]) == (131_072, 2 << 20)
    assert found["fits"] and found["max_model_len"] == 131_072
    found = plan(capsys, str(write_shape("llama2-13b", tmp_path)))
    assert found["kv_bytes_per_block"] == int(12.5 * (1 << 20))


def test_quantisation_and_fp8_kv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_shape("llama3.1-8b", tmp_path)
    plain, fp8 = plan(capsys, str(path)), plan(capsys, str(path), "--quantization", "fp8", "--kv-cache-dtype", "fp8")
    assert fp8["kv_bytes_per_token"] == 65_536 and plain["kv_bytes_per_token"] == 131_072
    weights = fp8["weight_bytes"]
    assert isinstance(weights, dict) and weights["fp8"] == pytest.approx(6_979_321_856, rel=0.001)
    config = SHAPES["llama3.1-8b"] | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    (path / "config.json").write_text(json.dumps(config))
    found = plan(capsys, str(path))["weight_bytes"]
    assert isinstance(found, dict) and found["int4"] == 6_979_321_856 * (4 + 24 / 128) / 8
    assert found["bfloat16"] == 2 * (2 * 128_256 * 4096 + 65 * 4096)


def test_what_does_not_fit_says_what_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_shape("llama3.1-8b", tmp_path))
    found = plan(capsys, path, "--gpu", "16GiB")
    assert not found["fits"] and "14.96 GiB of weights" in str(found["problem"])
    assert "4-bit" in str(found["fix"]) and "--quantization fp8" in str(found["fix"])
    found = plan(capsys, path, "--gpu", "l4", "--max-model-len", "65536")
    assert not found["fits"] and "KV" in str(found["problem"])
    assert main(["plan", path, "--gpu", "16GiB"]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert main(["plan", path, "--gpu", "abacus"]) == 2


@pytest.mark.parametrize("name", SHAPES)
def test_words(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_shape(name, tmp_path)
    assert main(["plan", str(path), "--gpu", "h100"]) == 0
    out = capsys.readouterr().out
    assert "sequences" in out and "KV cache" in out
    config, _ = engine_config(model=str(path), load_format="dummy")
    opened = open_model(config)
    bytes_of_all = sum(weight_bytes(opened.needs, "bfloat16").values())
    assert bytes_of_all == 2 * opened.spec.parameters


@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-0.6b"])
def test_blocks_as_an_engine_on_an_h200_had(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded runs: weights and KV cache by the same code, steps by estimate here and measured there."""
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    recorded = json.loads((results / f"h200-{name}.json").read_text())
    length, step = (recorded["options"][key] for key in ("max_model_len", "max_num_batched_tokens"))
    options = ["--gpu", "h200", "--max-model-len", length, "--max-num-batched-tokens", step]
    found = plan(capsys, str(write_shape(name, tmp_path)), *options)
    facts = recorded["facts"]
    assert found["kv_bytes_per_block"] == facts["kv_bytes_per_block"]
    assert found["blocks"] == pytest.approx(facts["blocks"], rel=0.005)


@pytest.mark.parametrize("case", ["llama3.1-8b", "llama3.1-8b, FP8 KV", "llama3.1-8b, int4"])
def test_plan_beside_what_engines_took(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 2 % of the recorded bytes of weights, KV cache and card."""
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    recorded = json.loads((results / "h200-plan.json").read_text())["cases"][case]
    flags = [word for name, value in recorded["options"].items() for word in (f"--{name.replace('_', '-')}", value)]
    found = plan(capsys, str(write_shape("llama3.1-8b", tmp_path)), "--max-model-len", "8192", *flags)
    measured = {name: row["measured"] for name, row in recorded["rows"].items()}
    assert isinstance(found["weight_bytes"], dict)
    weights = sum(found["weight_bytes"].values())
    assert weights == pytest.approx(measured["weights"], rel=0.02)
    assert found["kv_bytes_per_block"] == measured["KV bytes a block"]
    assert found["blocks"] == pytest.approx(measured["blocks"], rel=0.02)
    assert isinstance(found["step_bytes"], int) and isinstance(found["kv_cache_bytes"], int)
    whole = weights + found["step_bytes"] + found["kv_cache_bytes"]
    assert whole == pytest.approx(measured["card, without graphs"], rel=0.02)
