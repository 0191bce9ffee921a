"""Products of few tokens against torch, with everything they do around the product."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.gpu.linear import Launch, Scratch, multiply, stream_linear
from tests.kernels_interpret.cases.common import error


@pytest.mark.parametrize("launch", [Launch(16, 16, 1, 4, 1), Launch(8, 16, 3, 4, 1), Launch(16, 64, 2, 4, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_sum_with_the_residual(launch: Launch, bias: bool) -> None:
    torch.manual_seed(1)
    scratch = Scratch(torch.device("cpu"))
    scratch.reserve(40)
    for tokens in (1, 5):
        x, w, b, r = torch.randn(tokens, 72), torch.randn(40, 72), torch.randn(40), torch.randn(tokens, 40)
        want = torch.nn.functional.linear(x, w, b if bias else None) + r
        got = stream_linear(x, w, b if bias else None, r, False, scratch, launch)
        assert got is r and error(got, want) < 1e-6
        assert not scratch.counters.any()


@pytest.mark.parametrize("gated", [False, True])
def test_gate(gated: bool) -> None:
    torch.manual_seed(2)
    x, w, b = torch.randn(3, 48), torch.randn(40, 48), torch.randn(40)
    want = torch.nn.functional.linear(x, w, b)
    want = reference.silu_and_mul(want) if gated else want
    got = stream_linear(x, w, b, None, gated, Scratch(torch.device("cpu")), Launch(16, 32, 1, 4, 1))
    assert error(got, want) < 1e-6


@pytest.mark.parametrize(
    ("gated", "normed", "bias"), [(False, True, True), (True, True, False), (False, False, True)]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 64), (38, 72)])
def test_product_of_very_few_tokens(gated: bool, normed: bool, bias: bool, outputs: int, inputs: int) -> None:
    torch.manual_seed(3)
    w, b = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    norm = (torch.rand(inputs) + 0.5, 1e-3) if normed else None
    for tokens in (1, 3):
        x = 9 * torch.randn(tokens, inputs)
        r = None if normed else torch.randn(tokens, outputs)
        want = torch.nn.functional.linear(x if norm is None else reference.rms_norm(x, *norm), w, b)
        want = reference.silu_and_mul(want) if gated else want if r is None else want + r
        got = multiply(x, w, b, r, gated, norm, (4 * 32 * 8, 32, 4))
        assert error(got, want) < 1e-6 and (r is None or got is r)
