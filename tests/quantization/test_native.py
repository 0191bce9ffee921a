"""Quantised checkpoints on the native engine: the codes are kept, and logits stay near the dequantised model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")

from torch import Tensor

from octavo.runner.memory import weight_bytes
from octavo.runner.native import NativeRunner, build_native, held_bytes
from octavo.weights.checkpoint import QUANTISED
from tests.quantization import writers
from tests.quantization.test_checkpoints import CASES, awq, gptq, group, opened
from tests.quantization.writers import write_pair
from tests.runner.native import log_probabilities

IDS = [(7 * i + 3 * i * i + 5) % 97 for i in range(48)]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}


def runner(path: Path, dtype: str) -> NativeRunner:
    model = opened(path)
    return build_native(
        model.spec, model.needs, model.checkpoint, blocks=9, block_size=16, rows=64, max_len=64, dtype=dtype
    )


LARGE = {
    "awq 128": awq(128), "gptq 128": gptq(size=128), "gptq 128 asym": gptq(size=128, symmetric=False),
    "gptq 128 desc_act": gptq(size=128, order=True), "gptq 8 128": gptq(bits=8, size=128),
    "packed 128 asym": (writers.compressed(size=128, symmetric=False), group(symmetric=False, group_size=128)),
    "packed 8 128": (writers.compressed(8, 128), group(num_bits=8, group_size=128)),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES | LARGE if name != "fp8 tensor static"])
def test_near_the_dequantised_model_and_no_larger_than_the_file(name: str, tmp_path: Path) -> None:
    quantised, plain = write_pair(tmp_path, *(CASES | LARGE)[name], SIZES)
    exact = log_probabilities(runner(plain, "float32"), IDS)[:, :97]
    packed = runner(quantised, "bfloat16")
    got = log_probabilities(packed, IDS)[:, :97]
    # 8-bit activations and bfloat16 in the KV cache cost 0.05, FP8 rounded to 8 bits 0.015 more.
    assert np.abs(got - exact).mean() < 0.09
    whole = runner(quantised, "float32")
    assert np.abs(log_probabilities(whole, IDS)[:, :97] - exact).max() < 2e-3
    assert packed.engine.weight_bytes < whole.engine.weight_bytes / 2.5
    model = opened(quantised)
    others = 128 * 256 * 2 + 5 * 256 * 4  # the embedding, whose rows fill panels of 32, and five norms
    resident = packed.engine.weight_bytes - others
    infos = [model.checkpoint.info(source.name) for need in model.needs for source in need.sources]
    assert resident < 1.03 * sum(info.nbytes for info in infos if info.dtype in QUANTISED)
    foretold = held_bytes(model.spec, model.needs, model.checkpoint, "bfloat16", True)
    assert packed.engine.weight_bytes == pytest.approx(foretold, rel=0.03)
    assert model.scheme is not None
    foretold = weight_bytes(model.needs, "bfloat16", stored=model.checkpoint)[model.scheme.kind]
    orders = 4 * 256 * 2 * 3 if model.scheme.ordered else 0  # q, k, v and gate, up have one order here, not five
    assert resident == pytest.approx(foretold - orders, rel=0.03)


def test_columns_out_of_order_read_their_own_inputs(tmp_path: Path) -> None:
    """q, k and v in one order, one and another, and v plain; gate and up in two orders are held in 8 bits."""
    count = 0

    def write(weight: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
        nonlocal count
        count += 1
        codes = writers.round_codes(weight, 4, 32, True, shuffle=1 + count // 2)
        return writers.pack_gptq(codes, 4, 1, True), codes.dense()

    config = CASES["gptq desc_act 64 sym"][1] | {"group_size": 32}
    for skip in ((), ("v_proj",), ("k_proj", "up_proj")):
        quantised, plain = write_pair(tmp_path / f"skip {len(skip)}", write, config, SIZES, skip)
        exact = log_probabilities(runner(plain, "float32"), IDS)[:, :97]
        got = log_probabilities(runner(quantised, "bfloat16"), IDS)[:, :97]
        assert np.abs(got - exact).mean() < 0.09
