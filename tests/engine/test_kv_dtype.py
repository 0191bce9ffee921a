"""KV caches of 8 bits through `LLM`: what they hold, what stays on with them, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.engine.llm import LLM
from octavo.errors import ConfigError, ModelError
from octavo.runner import kv_scales
from octavo.runner.torch_runner import TorchRunner
from octavo.types import SamplingParams
from tests.quantization.writers import byte_model

PROMPT = "The river rises in the hills north of the town and runs for forty miles, past meadows, to the sea."
PARAMS = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0)
FP8 = {"kv_cache_dtype": "fp8", "device": "torch-cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("bytes"))


def make(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), max_model_len=256, kv_cache_memory_bytes=1 << 20, **options)


def logprobs(llm: LLM) -> list[float]:
    entries = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].prompt_logprobs or []
    return [next(iter(entry.values())).logprob for entry in entries if entry is not None]


def scales_of(llm: LLM) -> torch.Tensor:
    runner = llm.engine.loop.runner
    assert isinstance(runner, TorchRunner) and runner.pool.scales_L2K is not None
    return runner.pool.scales_L2K


def test_fp8_holds_twice_the_tokens_of_two_bytes(folder: Path) -> None:
    plain = make(folder, device="torch-cpu", dtype="bfloat16")
    half = make(folder, dtype="bfloat16", **FP8)
    assert half.engine.facts.blocks == 2 * plain.engine.facts.blocks
    assert np.abs(np.subtract(logprobs(half), logprobs(plain))).mean() < 0.15


def test_fp8_is_near_and_prefix_caching_stays_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = make(folder, kv_check=True, **FP8)
    assert "mean divergence" in caplog.text
    plain = make(folder, device="torch-cpu")
    first = logprobs(llm)
    assert 0 < np.abs(np.subtract(first, logprobs(plain))).mean() < 0.15
    text = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)[0].outputs[0].text
    again = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)[0].outputs[0].text
    assert text == again and llm.engine.facts.prefix_cache and llm.stats.prefix_hit_tokens > 0
    scales = scales_of(llm)
    assert len(scales.unique()) == scales.numel() and (scales > 0).all()


def test_a_check_that_fails_refuses_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_scales, "MOST_DIVERGENCE", 1e-9)
    with pytest.raises(ConfigError, match="changes this model"):
        make(folder, kv_check=True, **FP8)


def test_scales_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for part, letter in enumerate("kv"):
            scale = torch.tensor(0.02 + 0.01 * layer + 0.005 * part)
            tensors[f"model.layers.{layer}.self_attn.{letter}_scale"] = scale
    save_file(tensors, tmp_path / "model.safetensors")
    scales = scales_of(make(tmp_path, **FP8))
    assert torch.allclose(scales[:, :, 0], torch.tensor([[0.02, 0.025], [0.03, 0.035]]))
    tensors.pop("model.layers.1.self_attn.v_scale")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="3 scales"):
        make(tmp_path, **FP8)


def test_int8_on_the_native_engine(folder: Path) -> None:
    pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")
    plain, half = make(folder, device="cpu"), make(folder, device="cpu", kv_cache_dtype="int8")
    assert half.engine.facts.blocks > plain.engine.facts.blocks
    assert np.abs(np.subtract(logprobs(half), logprobs(plain))).mean() < 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8", "device": "cpu"},
        {"kv_cache_dtype": "int8", "device": "torch-cpu"},
        {"kv_cache_dtype": "int3"},
        {"kv_check": True, "device": "torch-cpu"},
        {"quantization": "fp8", "device": "cpu"},
    ],
    ids=str,
)
def test_refusals(folder: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")
    with pytest.raises(ConfigError):
        make(folder, **options)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantising_while_loading_on_the_native_engine(folder: Path, kind: str) -> None:
    pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")
    plain, packed = make(folder, device="cpu", dtype="bfloat16"), make(folder, device="cpu", quantization=kind)
    assert np.abs(np.subtract(logprobs(packed), logprobs(plain))).mean() < (0.2 if kind == "int8" else 0.6)
