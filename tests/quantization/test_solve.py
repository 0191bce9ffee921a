"""AWQ and GPTQ on matrices with correlated inputs and outliers; folding scales; the tensors that are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError, ModelError
from octavo.kernels.quant import dense
from octavo.model.decoder import Decoder
from octavo.quantization import formats, solve
from octavo.quantization.export import to_awq, to_gptq
from octavo.runner.build import load_params
from octavo.runner.calibrated import METHODS, Seen, Tap, _fold, quantise
from tests.model.driver import Sequences
from tests.quantization.test_checkpoints import CPU, PROMPTS, opened
from tests.quantization.writers import awq, write_pair


def matrix_and_inputs(outputs: int = 96, inputs: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    weight_OI = torch.randn(outputs, inputs, generator=g) * 0.1
    mix_II = torch.randn(inputs, inputs, generator=g) * inputs**-0.5 + torch.eye(inputs)
    x_TI = torch.randn(600, inputs, generator=g) @ mix_II
    x_TI[:, ::17] *= 12
    return weight_OI, x_TI


def lost(weight_OI: torch.Tensor, other_OI: torch.Tensor, x_TI: torch.Tensor) -> float:
    return float((x_TI @ (weight_OI - other_OI).T).square().mean() / (x_TI @ weight_OI.T).square().mean())


def test_each_method_loses_less_than_rounding() -> None:
    weight_OI, x_TI = matrix_and_inputs()
    moments_II, mean_I = x_TI.T @ x_TI, x_TI.abs().mean(0)
    nearest = lost(weight_OI, solve.nearest(weight_OI, 32).dequantize(), x_TI)
    clipped = lost(weight_OI, solve.clipped(weight_OI, solve.group_moments(x_TI, 32)).dequantize(), x_TI)
    scale_I = solve.awq_scales(weight_OI, x_TI, mean_I, 32)
    scaled = lost(weight_OI, solve.nearest(weight_OI * scale_I, 32).dequantize() / scale_I, x_TI)
    gptq = lost(weight_OI, solve.gptq(weight_OI, moments_II, 32, len(x_TI)).dequantize(), x_TI)
    assert gptq < 0.5 * nearest and scaled < 0.7 * nearest and clipped < nearest


def test_gptq_with_few_tokens_and_unused_inputs() -> None:
    weight_OI, x_TI = matrix_and_inputs()
    x_TI = x_TI[:40]
    x_TI[:, 3] = 0
    found = solve.gptq(weight_OI, x_TI.T @ x_TI, 64, 40).dequantize()
    assert torch.isfinite(found).all() and lost(weight_OI, found, x_TI) < 0.01
    with pytest.raises(ModelError):
        solve.gptq(weight_OI, torch.full((128, 128), float("nan")), 64, 40)


def test_gptq_on_tokens_that_it_has_not_seen() -> None:
    weight_OI, x_TI = matrix_and_inputs()
    for tokens in (40, 100, 300):
        seen_TI, other_TI = x_TI[:tokens], x_TI[300:]
        found = solve.gptq(weight_OI, seen_TI.T @ seen_TI, 64, tokens).dequantize()
        nearest = lost(weight_OI, solve.nearest(weight_OI, 64).dequantize(), other_TI)
        assert lost(weight_OI, found, other_TI) < 0.8 * nearest


def test_moments_in_blocks() -> None:
    x_TI = torch.randn(50, 1600, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(solve.second_moments(x_TI), x_TI.T @ x_TI)
    torch.testing.assert_close(solve.group_moments(x_TI, 32)[3], x_TI[:, 96:128].T @ x_TI[:, 96:128])


def test_clipping_knows_that_inputs_go_together() -> None:
    weight_OI, x_TI = matrix_and_inputs()
    weight_OI, x_TI = weight_OI.abs(), x_TI + 2  # what is cut off all points the same way, and so do the inputs
    moments_GSS = solve.group_moments(x_TI[:300], 32)
    alone_GSS = torch.diag_embed(moments_GSS.diagonal(dim1=1, dim2=2))
    clipped = [solve.clipped(weight_OI, moments_GSS) for moments_GSS in (moments_GSS, alone_GSS)]
    found, alone, nearest = (
        lost(weight_OI, made.dequantize(), x_TI[300:]) for made in (*clipped, solve.nearest(weight_OI, 32))
    )
    assert found < 0.9 * alone and found < nearest


def test_shared_scales() -> None:
    weight_OI, x_TI = matrix_and_inputs()
    scale_I = solve.awq_scales(weight_OI, x_TI, x_TI.abs().mean(0), 32, (2, 4, 16))
    assert len(scale_I.unique()) > 1
    first_I, *others = scale_I.view(2, 4, 16).unbind(1)
    assert all(torch.equal(first_I, other) for other in others)


def test_a_visitor_sees_inputs_in_parts_of_the_stream() -> None:
    g = torch.Generator().manual_seed(4)
    weight_OI, x_TI, stream_TO = (torch.randn(shape, generator=g) for shape in ((8, 16), (3, 16), (3, 8)))
    stream_TO[0] *= 1000
    found: list[torch.Tensor] = []
    tap = Tap(lambda weight, x: found.append(x))
    torch.testing.assert_close(
        tap.ops().linear_add(weight_OI, None)(x_TI, stream_TO), x_TI @ weight_OI.T + stream_TO, atol=0.1, rtol=0.01
    )
    torch.testing.assert_close(found[0] * stream_TO.square().mean(-1, keepdim=True).sqrt(), x_TI)
    tap.ops().linear(weight_OI, None, None)(x_TI)
    assert torch.equal(found[1], x_TI)


def test_what_is_written_is_read_back() -> None:
    weight_OI, _ = matrix_and_inputs()
    weight_OI[:8] = weight_OI[:8].abs()  # zeros of 0, which GPTQ's first version cannot hold
    rounded = solve.nearest(weight_OI, 32)
    parts = rounded.codes.numpy(), rounded.scales_OG.numpy(), rounded.zeros_OG.numpy()
    assert not parts[2][:8].any()
    made = to_awq(*parts)
    read = formats.awq(made["qweight"], made["qzeros"], made["scales"])
    np.testing.assert_array_equal(read.dequantize(), rounded.dequantize().numpy())
    made = to_gptq(*parts, 32)
    assert ((made["qzeros"].view(np.uint32) & 15) != 15).all()
    read = formats.gptq(made["qweight"], made["qzeros"], made["scales"], made["g_idx"], 4, 1)
    np.testing.assert_array_equal(read.dequantize()[8:], rounded.dequantize().numpy()[8:])
    np.testing.assert_allclose(read.dequantize()[:8], rounded.dequantize().numpy()[:8], atol=0.03)
    with pytest.raises(ConfigError):
        to_awq(parts[0][:7], parts[1][:7], parts[2][:7])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("plain"), awq(32), {"quant_method": "awq"}, skip=("proj",))[1]


def logits(params: dict[str, object], model: object) -> list[torch.Tensor]:
    decoder = Decoder(model.spec, dict(params))  # type: ignore[attr-defined, arg-type]
    return Sequences(decoder, len(PROMPTS)).prefill(PROMPTS, 7)


def test_folding_scales_changes_nothing(plain: Path) -> None:
    model = opened(plain)
    params = load_params(model.needs, model.checkpoint, torch.float32, CPU)
    before = logits(params, model)
    g = torch.Generator().manual_seed(1)
    for layer in range(2):
        weights = {name.rpartition(".")[2]: x for name, x in params.items() if name.startswith(f"layers.{layer}.")}
        seen = {}
        for name in ("qkv", "o", "gate_up", "down"):
            size = weights[name].shape[1]
            x_TI = torch.randn(300, size, generator=g) * torch.rand(size, generator=g) ** 3
            seen[name] = Seen.of(x_TI, 32)
        copies = {name: x.clone() for name, x in weights.items() if isinstance(x, torch.Tensor)}
        _fold(model.spec, weights, seen, 32)  # type: ignore[arg-type]
        assert sum(not torch.equal(x, copies[name]) for name, x in weights.items()) >= 4
    after = logits(params, model)
    assert max(float((x - y).abs().max()) for x, y in zip(before, after, strict=True)) < 2e-4


@pytest.mark.parametrize("method", METHODS)
def test_a_whole_model(method: str, plain: Path) -> None:
    model = opened(plain)
    params = load_params(model.needs, model.checkpoint, torch.float32, CPU)
    before = logits(params, model)
    texts = [[(5 * i + j * j) % 97 for i in range(64)] for j in range(4)]
    found = quantise(model.spec, params, texts, method, 32)
    assert set(found) == {f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "o", "gate_up", "down")}
    for name, rounded in found.items():
        if method != "rtn":
            torch.testing.assert_close(dense(params[name], torch.float32), rounded.dequantize())
        params[name] = rounded.dequantize()
    after = logits(params, model)
    # The text is noise, so nothing is gained here; but no layer may be lost.
    assert 0.01 < max(float((x - y).abs().mean()) for x, y in zip(before, after, strict=True)) < 1.0


def test_refusals(plain: Path) -> None:
    model = opened(plain)
    params = load_params(model.needs, model.checkpoint, torch.float32, CPU)
    for method, group in (("best", 32), ("gptq", 128), ("awq", 48)):
        with pytest.raises(ConfigError):
            quantise(model.spec, params, [[1, 2, 3]], method, group)
