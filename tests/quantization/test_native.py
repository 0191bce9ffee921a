"""Quantised checkpoints on the native engine: the codes are kept, and logits stay near the dequantised model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")

from octavo.quantization import ggml
from octavo.quantization.as_ggml import as_ggml
from octavo.quantization.packed import Packed
from octavo.runner.native import NativeRunner, build_native
from octavo.weights.quantized import QuantizedCheckpoint
from tests.quantization.test_checkpoints import CASES, opened
from tests.quantization.writers import write_pair
from tests.runner.native import log_probabilities

IDS = [(7 * i + 3 * i * i + 5) % 97 for i in range(48)]
SIZES = {"hidden_size": 256, "intermediate_size": 512}


def runner(path: Path, dtype: str) -> NativeRunner:
    model = opened(path)
    return build_native(
        model.spec, model.needs, model.checkpoint, blocks=9, block_size=16, rows=64, max_len=64, dtype=dtype
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "fp8 tensor static"])
def test_near_the_dequantised_model(name: str, tmp_path: Path) -> None:
    quantised, plain = write_pair(tmp_path, *CASES[name], SIZES)
    exact = log_probabilities(runner(plain, "float32"), IDS)[:, :97]
    packed = runner(quantised, "bfloat16")
    got = log_probabilities(packed, IDS)[:, :97]
    # 8-bit activations and bfloat16 in the KV cache cost 0.05, 8 bits where blocks cannot hold the codes 0.015 more.
    assert np.abs(got - exact).mean() < 0.09
    whole = runner(quantised, "float32")
    assert np.abs(log_probabilities(whole, IDS)[:, :97] - exact).max() < 2e-3
    assert packed.engine.weight_bytes < whole.engine.weight_bytes / 2.5


@pytest.mark.parametrize(
    "name", ["awq 32", "gptq 32", "gptq 64 asym v2", "gptq 8", "packed 32 asym", "packed 8 channel"]
)
def test_blocks_hold_the_same_codes(name: str, tmp_path: Path) -> None:
    model = opened(write_pair(tmp_path, *CASES[name])[0])
    assert isinstance(model.checkpoint, QuantizedCheckpoint)
    packed = model.checkpoint.packed("model.layers.0.mlp.up_proj.weight")
    blocks, kind = as_ggml(packed)
    assert kind in ("Q4_0", "Q4_1", "Q8_0")
    # The minimum is rounded to half precision once more.
    np.testing.assert_allclose(ggml.dequantize(blocks, kind), packed.dequantize(), atol=1e-3, rtol=0)


def test_what_blocks_cannot_hold_comes_as_numbers(tmp_path: Path) -> None:
    for name in ("gptq desc_act", "gptq 8 asym", "fp8 channel"):
        model = opened(write_pair(tmp_path / name, *CASES[name])[0])
        assert isinstance(model.checkpoint, QuantizedCheckpoint)
        packed = model.checkpoint.packed("model.layers.0.mlp.up_proj.weight")
        assert isinstance(packed, Packed)
        values, kind = as_ggml(packed)
        assert kind == "F32" and np.array_equal(values, packed.dequantize())
