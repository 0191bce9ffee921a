"""Activations in FP8 (e4m3), and products with FP8 weights on the tensor cores for that.

One kernel does what comes before a product (nothing, an RMS norm, or the gate of an MLP), finds the scale of each
token, or of each 128 inputs of it, and writes the codes in the order in which `octavo.kernels.gpu.quantized.Packed`
holds the weight's columns; a product does not care in which order its inputs are summed.

Shape letters: T tokens, I inputs, P = I up to a multiple of 128, O outputs, G = P / 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from octavo.kernels.gpu.launch import early, in_turn
from octavo.kernels.gpu.quantized import Packed

_LARGEST = 448.0


@triton.jit
def _quantize(
    X, WEIGHT, OUT, SCALES, FIXED, x_stride, eps, T, N: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, STATIC: tl.constexpr, BLOCKED: tl.constexpr, EARLY: tl.constexpr,
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
    if GATE:
        x = x / (1.0 + tl.exp(-x)) * tl.load(X + row * x_stride + N + column, mask=ok, other=0.0).to(tl.float32)
    x = x.to(X.dtype.element_ty).to(tl.float32)
    if BLOCKED:
        groups = tl.reshape(x, [BLOCK // 128, 128])
        scales = tl.maximum(tl.max(tl.abs(groups), 1) / 448.0, 1e-12)
        x = tl.reshape(groups / scales[:, None], [BLOCK])
        g = tl.arange(0, BLOCK // 128)
        tl.store(SCALES + g * T + row, scales, mask=g < P // 128)
    else:
        if STATIC:
            scale = tl.load(FIXED)
        else:
            scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)
        x = x / scale
        tl.store(SCALES + row, scale)
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    tl.store(OUT + row * P + at, x.to(tl.float8e4nv), mask=at < P)


def quantize_tokens(
    x_TI: Tensor, packed: Packed, norm: tuple[Tensor, float] | None = None, gate: bool = False
) -> tuple[Tensor, Tensor]:
    """(codes_TP, scales): of x, of its norm, or of silu(first half) * second half, rounded to the dtype of x first.

    The scales are [T, 1], the weight's own scale of activations if it has one; for weights in blocks they are [T, G],
    lying token by token.
    """
    tokens, inputs = x_TI.shape[0], packed.shape[1]
    padded = packed.blocks * 128
    blocked = packed.rows > 1
    codes_TP = torch.empty((tokens, padded), dtype=torch.float8_e4m3fn, device=x_TI.device)
    scales = torch.empty((padded // 128 if blocked else 1, tokens), dtype=torch.float32, device=x_TI.device)
    block = triton.next_power_of_2(padded)
    static = packed.input_scale is not None and not blocked
    _quantize[(tokens,)](
        x_TI, x_TI if norm is None else norm[0], codes_TP, scales, packed.input_scale if static else scales,
        x_TI.stride(0), 0.0 if norm is None else norm[1], tokens, inputs, padded, block, norm is not None, gate,
        static, blocked, early(x_TI), num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
        launch_pdl=early(x_TI),
    )  # fmt: skip
    return codes_TP, scales.t()


def can_multiply(packed: Packed, dtype: torch.dtype) -> bool:
    """Whether the device's library multiplies FP8 tokens with this weight and returns `dtype`."""
    device = packed.words.device
    fits = packed.kind == "fp8" and packed.shape[0] % 16 == 0 and dtype == torch.bfloat16
    return fits and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def multiply(codes_TP: Tensor, scales: Tensor, packed: Packed, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product of `quantize_tokens` with the weight, plus the bias, [T, O]."""
    weight_PO = packed.words.view(torch.float8_e4m3fn).t()
    if packed.rows == 1:
        return torch._scaled_mm(
            codes_TP, weight_PO, scales, packed.scales.view(1, -1), bias_O, out_dtype=dtype, use_fast_accum=True
        )
    y_TO = scaled_mm(
        codes_TP, weight_PO, scales, ScalingType.BlockWise1x128, packed.scales.t(), ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )  # fmt: skip
    return y_TO if bias_O is None else y_TO.add_(bias_O)
