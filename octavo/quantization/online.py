"""Quantising plain weights while they are loaded: round to nearest, no calibration.

"int8" and "fp8" have one scale a row; "int4" has one scale and one zero for 64 inputs (or 32, or a row, where 64 do
not divide it). Round to nearest costs little at 8 bits; at 4 bits a checkpoint made with `octavo quantize` is better.

Shape letters: I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.quant import FP8_MAX, QuantWeight
from octavo.quantization.scheme import ONLINE, online_group


def quantize(weight_OI: Tensor, kind: str, group: int = 0) -> QuantWeight:
    """The nearest codes for a matrix, on its device. `group`: inputs that share a scale, for "int4"."""
    if kind == "int4":
        return _int4(weight_OI, group)
    if kind not in ONLINE:
        raise ConfigError(f"Weights cannot be quantised to {kind!r}.", f"Give one of {', '.join(ONLINE)}.")
    wide = weight_OI.to(torch.float32)
    largest_O1 = wide.abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
    outputs, inputs = weight_OI.shape
    if kind == "fp8":
        scales = largest_O1 / FP8_MAX
        codes = (wide / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return QuantWeight("fp8", (outputs, inputs), codes, scales, inputs)
    scales = largest_O1 / 127
    codes = (wide / scales).round().to(torch.int8)
    return QuantWeight("int8", (outputs, inputs), codes, scales, inputs)


def _int4(weight_OI: Tensor, group: int) -> QuantWeight:
    outputs, inputs = weight_OI.shape
    group = group or online_group(inputs)
    codes_OGI, scales_OG, zeros_OG = round_int4(weight_OI.to(torch.float32).view(outputs, -1, group))
    codes = pack_int4(codes_OGI.view(outputs, inputs))
    return QuantWeight("int4", (outputs, inputs), codes, scales_OG, group, zeros_RG=zeros_OG)


def round_int4(weight_OGI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes uint8, scales float16 [O, G], zeros uint8 [O, G]) of float32 weights: 0 and the extremes of a group are
    inside the range of its codes."""
    low, high = weight_OGI.amin(-1).clamp_max(0), weight_OGI.amax(-1).clamp_min(0)
    scales_OG = ((high - low) / 15).clamp_min(1e-7).to(torch.float16)
    wide = scales_OG.to(torch.float32)
    zeros_OG = (-low / wide).round().clamp(0, 15)
    codes = ((weight_OGI / wide[..., None]).round() + zeros_OG[..., None]).clamp(0, 15)
    return codes.to(torch.uint8), scales_OG, zeros_OG.to(torch.uint8)


def pack_int4(codes_OI: Tensor) -> Tensor:
    """uint8 [O, I] of 0 to 15 -> uint8 [O, I / 2]; the low half of a byte is the even column."""
    return codes_OI[:, ::2] | codes_OI[:, 1::2] << 4
