"""Products of few tokens against torch, with everything they do around the product."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.gpu.linear import multiply
from tests.kernels_interpret.cases.common import error


@pytest.mark.parametrize(
    ("gated", "normed", "bias"), [(False, True, True), (True, True, False), (False, False, True)]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 64), (38, 72)])
def test_product_of_few_tokens(gated: bool, normed: bool, bias: bool, outputs: int, inputs: int) -> None:
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
