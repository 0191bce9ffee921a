"""The canonical layout of quantised weights against the formula of its docstring, element by element."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import cpu
from octavo.kernels.ops import ops_for
from octavo.kernels.quant import JoinedWeight, QuantWeight, dense, linear, unpack_int4
from octavo.layers.linear import product


def make(kind: str, outputs: int, inputs: int, columns: int, zeros: bool = False, order: bool = False) -> QuantWeight:
    g = torch.Generator().manual_seed(outputs + inputs + columns)
    scales = torch.rand(outputs, inputs // columns, generator=g) * 0.1 + 0.01
    high = 16 if kind == "int4" else 256
    values = torch.randint(0, high, (outputs, inputs), generator=g)
    zero = torch.randint(0, high, scales.shape, generator=g) if zeros else None
    order_I = torch.randperm(inputs, generator=g).to(torch.int32) if order else None
    if kind == "int4":
        codes = (values[:, ::2] | values[:, 1::2] << 4).to(torch.uint8)
        zero = zero if zero is None else zero.to(torch.uint8)
    else:
        codes = (values - 128).to(torch.int8)
        zero = zero if zero is None else (zero - 128).to(torch.int8)
    return QuantWeight(kind, (outputs, inputs), codes, scales.half(), columns, zeros_RG=zero, order_I=order_I)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("order", [False, True])
def test_integers_follow_the_formula(kind: str, zeros: bool, order: bool) -> None:
    weight = make(kind, 6, 64, 32, zeros, order)
    got = weight.dequantize(torch.float32)
    codes = unpack_int4(weight.codes) if kind == "int4" else weight.codes
    for o in range(6):
        for j in range(64):
            zero = (8 if kind == "int4" else 0) if weight.zeros_RG is None else int(weight.zeros_RG[o, j // 32])
            expected = (int(codes[o, j]) - zero) * float(weight.scales_RG[o, j // 32])
            i = j if weight.order_I is None else int(weight.order_I[j])
            assert float(got[o, i]) == pytest.approx(expected, rel=1e-6)


def test_fp8_blocks_are_ragged_at_the_edges() -> None:
    g = torch.Generator().manual_seed(1)
    codes = torch.randn(200, 300, generator=g).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=g)
    weight = QuantWeight("fp8", (200, 300), codes, scales, columns=128, rows=128)
    got = weight.dequantize(torch.float32)
    for o, i in ((0, 0), (127, 127), (128, 127), (199, 299), (5, 256)):
        assert float(got[o, i]) == pytest.approx(float(codes[o, i].float() * scales[o // 128, i // 128]))


def test_products_of_a_joined_weight_equal_the_dense_one() -> None:
    g = torch.Generator().manual_seed(2)
    joined = JoinedWeight((make("int4", 6, 64, 32), torch.randn(3, 64, generator=g), make("int8", 2, 64, 64, True)))
    x_TI, bias_O = torch.randn(5, 64, generator=g), torch.randn(11, generator=g)
    norm = torch.rand(64, generator=g), 1e-5
    whole = dense(joined, torch.float32)
    got = product(ops_for(torch.device("cpu")), joined, bias_O, norm)(x_TI)
    torch.testing.assert_close(got, cpu.linear(whole, bias_O, norm)(x_TI))
    assert joined.shape == (11, 64) and joined.nbytes == 6 * 32 + 6 * 2 * 2 + 3 * 64 * 4 + 2 * 64 + 2 * 2 + 2


def test_gate_and_sum_of_a_quantised_weight() -> None:
    weight = make("int4", 8, 64, 32, True, True)
    g = torch.Generator().manual_seed(3)
    x_TI, residual = torch.randn(5, 64, generator=g), torch.randn(5, 8, generator=g)
    plain = weight.dequantize(torch.float32)
    torch.testing.assert_close(cpu.gated_linear(weight, None)(x_TI), cpu.gated_linear(plain, None)(x_TI))
    torch.testing.assert_close(cpu.linear_add(weight, None)(x_TI, residual.clone()), x_TI @ plain.T + residual)
    torch.testing.assert_close(linear(x_TI.double(), weight), x_TI.double() @ weight.dequantize(torch.float64).T)
