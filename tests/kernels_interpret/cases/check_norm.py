"""Norms and the gated activation against the oracles."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.gpu import norm
from tests.kernels_interpret.cases.common import error


@pytest.mark.parametrize("size", [8, 96, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x = torch.randn(5, size).to(dtype)
    w = torch.randn(size).to(dtype)
    limit = 1e-6 if dtype == torch.float32 else 1e-3
    for weight in (w, w.float()):  # some models keep their norms wide
        want = reference.rms_norm(x.double(), weight.double(), 1e-6)
        assert error(norm.rms_norm(x, weight, 1e-6), want) < limit


def test_norm_of_a_view_with_other_row_stride() -> None:
    x = torch.randn(4, 64)[:, :32]
    w = torch.ones(32)
    assert error(norm.rms_norm(x, w, 1e-5), reference.rms_norm(x, w, 1e-5)) < 1e-6


@pytest.mark.parametrize("size", [3, 1500])
def test_silu_and_mul(size: int) -> None:
    x = torch.randn(3, 2 * size) * 4
    assert error(norm.silu_and_mul(x), reference.silu_and_mul(x.double())) < 1e-6
    for cut in (size, 2 * size - 1):
        got = norm.silu_and_mul_pieces(x[:, :cut].contiguous(), x[:, cut:].contiguous())
        assert error(got, reference.silu_and_mul(x.double())) < 1e-6
