"""Products with quantised weights against the oracle, for every kind, grouping and epilogue."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.kernels import quant, reference
from octavo.kernels.gpu.fp8 import quantize_tokens, scaled
from octavo.kernels.gpu.quantized import can_pack, pack, widen
from octavo.kernels.gpu.quantized_linear import Parts, quantized_linear
from octavo.kernels.gpu.quantized_ops import QuantizedOps
from octavo.kernels.gpu.quantized_tuned import MOST_TOKENS, Launch
from octavo.kernels.quant import QuantWeight
from tests.kernels_interpret.cases.common import error


def same_codes(got: Tensor, want: Tensor) -> bool:
    """Whether FP8 values are equal; the interpreter loses the carry of what is rounded up to a power of two."""
    return bool(((got == want) | (torch.frexp(want)[0].abs() == 0.5)).all())


FORMS = [
    ("int4", 128, True), ("int4", 128, False), ("int4", 64, True), ("int4", 32, True), ("int4", 0, False),
    ("int4", 0, True), ("int8", 128, True), ("int8", 32, False), ("int8", 0, False), ("fp8", 0, False),
    ("fp8", 128, False),
]  # fmt: skip


def random_weight(
    kind: str, columns: int, zeroed: bool, outputs: int, inputs: int, device: str = "cpu"
) -> QuantWeight:
    """A weight of one form; `columns` 0 is one group a row, of FP8 128 is in 128 x 128 blocks."""
    rows = 128 if kind == "fp8" and columns else 1
    columns = columns or inputs
    shape = (-(-outputs // rows), -(-inputs // columns))
    scales = (torch.rand(shape, device=device) + 0.5) / 64
    zeros: Tensor | None = None
    if kind == "int4":
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
        zeros = torch.randint(0, 16, shape, dtype=torch.uint8, device=device) if zeroed else None
        scales = scales.to(torch.float16)
    elif kind == "int8":
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=device)
        zeros = torch.randint(-128, 128, shape, dtype=torch.int8, device=device) if zeroed else None
        scales = scales.to(torch.bfloat16)
    else:
        codes = (torch.randn(outputs, inputs, device=device) * 20).to(torch.float8_e4m3fn)
    return QuantWeight(kind, (outputs, inputs), codes, scales, columns, rows, zeros)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "columns", "zeroed"), FORMS)
def test_product(kind: str, columns: int, zeroed: bool) -> None:
    """Half of the forms with all of a tile and one program for it, half with ragged edges and two programs."""
    outputs, inputs, split = ((64, 256, 1), (80, 384, 2))[FORMS.index((kind, columns, zeroed)) % 2]
    torch.manual_seed(1)
    weight = random_weight(kind, columns, zeroed, outputs, inputs)
    assert can_pack(weight)
    packed, parts, launch = pack(weight), Parts(torch.device("cpu")), Launch(32, 16, 4, 1, split=split, raw=split > 1)
    x, b, r = torch.randn(3, inputs), torch.randn(outputs), torch.randn(3, outputs)
    plain = quant.linear(x, weight)
    assert error(quantized_linear(x, packed, None, None, False, parts, launch), plain) < 1e-5
    got = quantized_linear(x, packed, b, r.clone(), False, parts, launch)
    assert error(got, plain + b + r) < 1e-5
    got = quantized_linear(x, packed, b, None, True, parts, launch)
    assert error(got, reference.silu_and_mul(plain + b)) < 1e-5
    assert not parts.counters.any()


@pytest.mark.parametrize(("kind", "columns", "zeroed"), FORMS)
def test_product_by_single_warps(kind: str, columns: int, zeroed: bool) -> None:
    """Tiles of 16 and 32 outputs, of 8 and 16 tokens; whole and ragged; zeros off codes and off sums."""
    odd = FORMS.index((kind, columns, zeroed)) % 2
    outputs, inputs, tokens = ((64, 256, 3), (80, 384, 9))[odd]
    torch.manual_seed(6)
    weight = random_weight(kind, columns, zeroed, outputs, inputs)
    launch = Launch(32 if odd else 16, 16, 1, 1, split=1 + odd, raw=not odd)
    packed, parts = pack(weight), Parts(torch.device("cpu"))
    x, b, r = torch.randn(tokens, inputs), torch.randn(outputs), torch.randn(tokens, outputs)
    want = quant.linear(x, weight) + b
    assert error(quantized_linear(x, packed, b, r.clone(), False, parts, launch), want + r) < 2e-5
    assert error(quantized_linear(x, packed, b, None, True, parts, launch), reference.silu_and_mul(want)) < 2e-5
    assert not parts.counters.any()


def test_functions_of_the_device() -> None:
    """All that a model calls: norm, gate, residual, order of columns, few tokens and many; also without a kernel."""
    torch.manual_seed(7)
    ops = QuantizedOps(torch.device("cpu"))
    for kind, columns in (("int4", 64), ("int8", 0), ("fp8", 0), ("int4", 16)):
        weight = random_weight(kind, columns, kind == "int4", 64, 128)
        order = torch.randperm(128)
        shuffled = replace(weight, order_I=order.to(torch.int32)) if kind != "fp8" else weight
        norm, b = (torch.rand(128) + 0.5, 1e-5), torch.randn(64)
        plain, gated = ops.linear(weight, b, norm), ops.gated_linear(weight, b, norm)
        adding = ops.linear_add(shuffled, b)
        for tokens in (1, MOST_TOKENS[weight.kind] + 1):
            x, r = torch.randn(tokens, 128), torch.randn(tokens, 64)
            y = quant.linear(reference.rms_norm(x, *norm), weight) + b
            assert error(plain(x), y) < 2e-5
            assert error(gated(x), reference.silu_and_mul(y)) < 2e-5
            assert error(adding(x, r.clone()), quant.linear(x, shuffled) + b + r) < 2e-5


@pytest.mark.parametrize(("kind", "columns", "zeroed"), FORMS)
def test_widened(kind: str, columns: int, zeroed: bool) -> None:
    torch.manual_seed(2)
    weight = random_weight(kind, columns, zeroed, 80, 384)
    assert error(widen(pack(weight), torch.float32), weight.dequantize(torch.float32)) < 1e-6


def test_more_tokens_than_a_tile() -> None:
    torch.manual_seed(3)
    weight = random_weight("int4", 128, True, 64, 256)
    x = torch.randn(37, 256)
    got = quantized_linear(x, pack(weight), None, None, False, Parts(torch.device("cpu")), Launch(32, 16, 4, 1))
    assert error(got, quant.linear(x, weight)) < 1e-5


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_tokens_in_fp8(normed: bool, static: bool) -> None:
    torch.manual_seed(4)
    weight = random_weight("fp8", 0, False, 32, 320)
    if static:
        weight = replace(weight, input_scale=torch.tensor(0.02))
    packed, x = pack(weight), torch.randn(3, 320)
    norm = (torch.rand(320) + 0.5, 1e-5) if normed else None
    codes, scales = quantize_tokens(x, packed, norm)
    want = x if norm is None else reference.rms_norm(x, *norm)
    fields = codes.float().view(3, -1, 32, 4).transpose(2, 3).reshape(3, -1)  # back into the order of the inputs
    assert not fields[:, 320:].any()
    assert (scales == 0.02).all() if static else error(scales[:, 0], want.abs().amax(1) / 448) < 1e-6
    assert same_codes(fields[:, :320], (want / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("gated", [False, True])
def test_what_follows_a_product_in_fp8(gated: bool) -> None:
    torch.manual_seed(5)
    packed = pack(random_weight("fp8", 0, False, 96, 128))
    y, tokens, b = torch.randn(3, 96), torch.rand(3, 1), torch.randn(96)
    want = y * tokens * packed.scales + b
    want = reference.silu_and_mul(want) if gated else want
    r = torch.randn(want.shape)
    assert error(scaled(y, tokens, packed, b, r.clone(), gated), want + r) < 1e-6
    assert scaled(y, tokens, packed, None, None, gated).shape == want.shape


@pytest.mark.parametrize(("kind", "columns", "zeroed"), FORMS)
def test_packing_takes_no_more_memory(kind: str, columns: int, zeroed: bool) -> None:
    weight = random_weight(kind, columns, zeroed, 128, 896)
    packed = pack(weight)
    held = (packed.words, packed.scales, packed.zeros)
    assert sum(tensor.nbytes for tensor in held if tensor is not None) <= 1.03 * weight.nbytes


def test_what_it_cannot_read() -> None:
    assert not can_pack(random_weight("int4", 16, False, 32, 64))
