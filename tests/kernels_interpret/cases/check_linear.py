"""Products of few tokens against torch, with everything they do around the product."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.gpu.linear import Launch, Scratch, stream_linear
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
