"""Activations in FP8 (e4m3), and products with FP8 weights on the tensor cores for that.

One kernel norms the tokens if that is wanted, finds the scale of each, and writes the codes in the order in which
`octavo.kernels.gpu.quantized.Packed` holds the weight's columns: a product may sum its inputs in any order.

Shape letters: T tokens, I inputs, P = I up to a multiple of 128, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.fp8_pool import LARGEST
from octavo.kernels.gpu.launch import early, in_turn
from octavo.kernels.gpu.quantized import Packed


@triton.jit
def _quantize(
    X, WEIGHT, OUT, SCALES, FIXED, x_stride, eps, N: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, STATIC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    column = at // 128 * 128 + at % 4 * 32 + at % 128 // 4
    ok = column < N
    x = tl.load(X + row * x_stride + column, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(WEIGHT + column, mask=ok, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight
    x = x.to(X.dtype.element_ty).to(tl.float32)
    if STATIC:
        scale = tl.load(FIXED)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, 1e-12)
    x = x / scale
    tl.store(SCALES + row, scale)
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    tl.store(OUT + row * P + at, x.to(tl.float8e4nv), mask=at < P)


def quantize_tokens(x_TI: Tensor, packed: Packed, norm: tuple[Tensor, float] | None = None) -> tuple[Tensor, Tensor]:
    """(codes_TP, scales_T1) of x, or of its norm, rounded to the dtype of x first.

    A token's scale is its largest value over 448, or the weight's own scale of activations if it has one.
    """
    tokens, inputs = x_TI.shape[0], packed.shape[1]
    padded = packed.blocks * 128
    codes_TP = torch.empty((tokens, padded), dtype=torch.float8_e4m3fn, device=x_TI.device)
    scales_T1 = torch.empty((tokens, 1), dtype=torch.float32, device=x_TI.device)
    block = triton.next_power_of_2(padded)
    fixed = packed.input_scale
    _quantize[(tokens,)](
        x_TI, x_TI if norm is None else norm[0], codes_TP, scales_T1, scales_T1 if fixed is None else fixed,
        x_TI.stride(0), 0.0 if norm is None else norm[1], inputs, padded, block, norm is not None, fixed is not None,
        early(x_TI), num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16, launch_pdl=early(x_TI),
    )  # fmt: skip
    return codes_TP, scales_T1


def can_multiply(packed: Packed, dtype: torch.dtype) -> bool:
    """Whether the device's library multiplies FP8 tokens with this weight and returns `dtype`."""
    device = packed.words.device
    fits = packed.kind == "fp8" and packed.rows == 1 and packed.shape[0] % 16 == 0 and dtype == torch.bfloat16
    return fits and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def multiply(
    codes_TP: Tensor, scales_T1: Tensor, packed: Packed, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of `quantize_tokens` with the weight, plus the bias, [T, O]."""
    weight_PO = packed.words.view(torch.float8_e4m3fn).t()
    return torch._scaled_mm(
        codes_TP, weight_PO, scales_T1, packed.scales.view(1, -1), bias_O, out_dtype=dtype, use_fast_accum=True
    )


@triton.jit
def _scale(
    Y, TOKENS, OUTPUTS, BIAS, OUT, N, GATED: tl.constexpr, ADD: tl.constexpr, BIASED: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < N
    token = tl.load(TOKENS + row)
    y = Y + row * N * (2 if GATED else 1) + at
    x = tl.load(y, mask=ok, other=0.0).to(tl.float32) * tl.load(OUTPUTS + at, mask=ok, other=0.0) * token
    if BIASED:
        x += tl.load(BIAS + at, mask=ok, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(y + N, mask=ok, other=0.0).to(tl.float32) * tl.load(OUTPUTS + N + at, mask=ok, other=0.0) * token
        if BIASED:
            up += tl.load(BIAS + N + at, mask=ok, other=0.0).to(tl.float32)
        x = x / (1.0 + tl.exp(-x)) * up
    if ADD:
        x += tl.load(OUT + row * N + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(OUT + row * N + at, x.to(OUT.dtype.element_ty), mask=ok)


def multiply_then(
    codes_TP: Tensor, scales_T1: Tensor, packed: Packed, bias_O: Tensor | None, residual_TO: Tensor | None,
    gated: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """As `multiply`; then silu(first half) * second half if `gated`, and added to `residual_TO` if there is one.

    The library's product without scales is faster for few tokens than the one with them; what must follow it anyway
    applies them.
    """
    weight_PO = packed.words.view(torch.float8_e4m3fn).t()
    y_TO = torch._scaled_mm(codes_TP, weight_PO, packed.one, packed.one, out_dtype=dtype, use_fast_accum=True)
    return scaled(y_TO, scales_T1, packed, bias_O, residual_TO, gated)


def scaled(
    y_TO: Tensor, scales_T1: Tensor, packed: Packed, bias_O: Tensor | None, residual_TO: Tensor | None, gated: bool
) -> Tensor:
    """What `multiply_then` does after the product y without scales."""
    outputs = packed.shape[0] // 2 if gated else packed.shape[0]
    tokens, out_TO = len(y_TO), residual_TO
    if out_TO is None:
        out_TO = torch.empty((tokens, outputs), dtype=y_TO.dtype, device=y_TO.device)
    block = min(1024, triton.next_power_of_2(outputs))
    _scale[(tokens, triton.cdiv(outputs, block))](
        y_TO, scales_T1, packed.scales, y_TO if bias_O is None else bias_O, out_TO, outputs, gated,
        residual_TO is not None, bias_O is not None, block, early(y_TO), num_warps=4, launch_pdl=early(y_TO),
    )  # fmt: skip
    return out_TO
