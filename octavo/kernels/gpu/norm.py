"""RMS norm and the gated activation.

Shape letters: T tokens, I features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import early, in_turn

_MANY = 1024  # tokens from which programs rather than warps keep the memory busy


@triton.jit
def _norm(X, WEIGHT, OUT, x_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    in_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ok = at < N
    x = tl.load(X + row * x_stride + at, mask=ok, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    weight = tl.load(WEIGHT + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(OUT + row * N + at, (x * inverse * weight).to(OUT.dtype.element_ty), mask=ok)


def _warps(block: int, tokens: int) -> int:
    if block > 8192:
        return 16
    return 4 if block <= 2048 or tokens >= _MANY else 8


def rms_norm(x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm` for one weight and 2-D input."""
    tokens, size = x_TI.shape
    out_TI = torch.empty((tokens, size), dtype=x_TI.dtype, device=x_TI.device)
    block = triton.next_power_of_2(size)
    _norm[(tokens,)](
        x_TI, weight_I, out_TI, x_TI.stride(0), eps, size, block, early(x_TI), num_warps=_warps(block, tokens),
        launch_pdl=early(x_TI),
    )  # fmt: skip
    return out_TI


@triton.jit
def _gated(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_and_mul(GATE_UP, OUT, N, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    in_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < N
    gate = tl.load(GATE_UP + row * 2 * N + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * N + N + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(OUT + row * N + at, _gated(gate, up).to(OUT.dtype.element_ty), mask=ok)


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """`reference.silu_and_mul`, rounded once."""
    tokens, size = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    out_TI = torch.empty((tokens, size), dtype=gate_up_TI.dtype, device=gate_up_TI.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_and_mul[(tokens, triton.cdiv(size, block))](
        gate_up_TI, out_TI, size, block, early(gate_up_TI), num_warps=4, launch_pdl=early(gate_up_TI)
    )
    return out_TI


@triton.jit
def _silu_and_mul_pieces(A, B, OUT, N, cut, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    in_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rest = 2 * N - cut
    gate = tl.load(A + row * cut + at, mask=at < N, other=0.0).to(tl.float32)
    up = tl.load(A + row * cut + N + at, mask=at < cut - N, other=0.0).to(tl.float32)
    more = tl.load(B + row * rest + N + at - cut, mask=(at >= cut - N) & (at < N), other=0.0).to(tl.float32)
    tl.store(OUT + row * N + at, _gated(gate, up + more).to(OUT.dtype.element_ty), mask=at < N)


def silu_and_mul_pieces(first_TI: Tensor, second_TI: Tensor) -> Tensor:
    """`silu_and_mul` of a product whose columns are in two tensors, the gate in the first of them."""
    tokens, cut = first_TI.shape
    size = (cut + second_TI.shape[1]) // 2
    out_TI = torch.empty((tokens, size), dtype=first_TI.dtype, device=first_TI.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_and_mul_pieces[(tokens, triton.cdiv(size, block))](
        first_TI, second_TI, out_TI, size, cut, block, early(first_TI), num_warps=4, launch_pdl=early(first_TI)
    )
    return out_TI
