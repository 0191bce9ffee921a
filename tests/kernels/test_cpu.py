"""The CPU implementations equal the plain ones: products of any size, with and without bias, and rotation."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import cpu, reference

TOKENS = [1, 3, 64, 130]


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * 0.3).to(dtype) for shape in shapes]


def close(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == exact.shape
    within = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(got.double(), exact, rtol=within, atol=within)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_products(dtype, bias):
    weight_OI, bias_O = tensors(dtype, (96, 40), (96,))
    plain, gated = (f(weight_OI.clone(), bias_O if bias else None) for f in (cpu.linear, cpu.gated_linear))
    for tokens in TOKENS:
        x_TI = tensors(dtype, (tokens, 40))[0]
        exact = torch.nn.functional.linear(x_TI.double(), weight_OI.double(), bias_O.double() if bias else None)
        close(plain(x_TI), exact, dtype)
        close(gated(x_TI), reference.silu_and_mul(exact), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rotate(dtype):
    x, cos, sin = tensors(dtype, (9, 5, 16), (9, 16), (9, 16))
    close(cpu.rotate(x, cos, sin), reference.rotate(x.double(), cos.double(), sin.double()), dtype)


def test_only_bfloat16_on_the_cpu_is_packed():
    assert not cpu.can_pack(torch.zeros(4, 4)) and not cpu.can_pack(torch.zeros(4, 4, dtype=torch.float64))
    assert not cpu.can_pack(torch.zeros(4, 4, dtype=torch.bfloat16, device="meta"))
