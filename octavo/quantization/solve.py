"""Codes for 4-bit weights that know what the weights are multiplied with: AWQ's scales and GPTQ's corrections.

Everything works on one matrix and the inputs it was given on a calibration text, in float32.

Sources: AWQ (Lin et al. 2023, arxiv.org/abs/2306.00978): inputs that are large on average get finer codes, by
scaling columns up and their inputs down; then outliers of a group are clipped where that lowers the error. GPTQ
(Frantar et al. 2022, arxiv.org/abs/2210.17323): columns are rounded one after the other, and the error of each is
spread over those that follow, by the inverse of the inputs' second moments (Cholesky factor).

Shape letters: T tokens, I inputs, O outputs, G groups of inputs, S inputs of a group, B inputs of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.quantization.online import pack_int4, round_int4

_GRID = 20  # exponents that AWQ tries
_ROWS = 128  # outputs whose loss decides
_SHRINKS = tuple(1.0 - 0.05 * i for i in range(8))  # parts of a group's range that are tried
_BLOCK = 128  # columns that GPTQ corrects before it passes their errors on
# What is added to the diagonal of the second moments, in parts of its mean: this many times inputs per token, since
# few tokens say little about most directions. On tokens that were not seen, with 0.4 tokens an input, a part of 0.01
# loses 30 % more than 0.1; with 2 and more tokens an input 0.01 is best.
_DAMP, _LEAST_DAMP, _MOST_DAMP = 0.05, 0.01, 0.3


@dataclass(frozen=True, eq=False)
class Rounded:
    """A matrix in 4-bit codes with zeros: uint8 codes [O, I / 2] as in `QuantWeight`, float16 scales, uint8 zeros."""

    codes: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor
    group: int

    def dequantize(self) -> Tensor:
        """weight_OI in float32."""
        values = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).reshape(len(self.codes), -1)
        codes_OGS = values.view(len(self.codes), -1, self.group).float()
        return ((codes_OGS - self.zeros_OG[..., None].float()) * self.scales_OG[..., None].float()).flatten(1)


def nearest(weight_OI: Tensor, group: int) -> Rounded:
    """Round to nearest between the extremes of each group."""
    codes_OGS, scales_OG, zeros_OG = round_int4(weight_OI.view(len(weight_OI), -1, group))
    return Rounded(pack_int4(codes_OGS.flatten(1)), scales_OG, zeros_OG, group)


def shrunk(weight_OI: Tensor, importance_I: Tensor, group: int) -> Tensor:
    """shrink_OG: the part of each group's range that loses least, errors weighted by the inputs' second moments."""
    weight_OGS = weight_OI.view(len(weight_OI), -1, group)
    importance_GS = importance_I.view(-1, group)
    best_OG = torch.full(weight_OGS.shape[:2], float("inf"), device=weight_OI.device)
    chosen_OG = torch.ones_like(best_OG)
    for shrink in _SHRINKS:
        error_OGS = _round_within(weight_OGS, torch.full_like(best_OG, shrink))[0] - weight_OGS
        loss_OG = (error_OGS.square() * importance_GS).sum(-1)
        better = loss_OG < best_OG
        best_OG = torch.where(better, loss_OG, best_OG)
        chosen_OG = torch.where(better, shrink, chosen_OG)
    return chosen_OG


def _round_within(weight_OGS: Tensor, shrink_OG: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values, codes, scales, zeros) of groups whose range is cut to a part of it."""
    low, high = weight_OGS.amin(-1).clamp_max(0) * shrink_OG, weight_OGS.amax(-1).clamp_min(0) * shrink_OG
    scales_OG = ((high - low) / 15).clamp_min(1e-7).half()
    wide = scales_OG.float()
    zeros_OG = (-low / wide).round().clamp(0, 15)
    codes = ((weight_OGS / wide[..., None]).round() + zeros_OG[..., None]).clamp(0, 15)
    return (codes - zeros_OG[..., None]) * wide[..., None], codes, scales_OG, zeros_OG


def clipped(weight_OI: Tensor, importance_I: Tensor, group: int) -> Rounded:
    """`nearest` with ranges cut where that loses less (AWQ's second half)."""
    weight_OGS = weight_OI.view(len(weight_OI), -1, group)
    _, codes, scales_OG, zeros_OG = _round_within(weight_OGS, shrunk(weight_OI, importance_I, group))
    return Rounded(pack_int4(codes.to(torch.uint8).flatten(1)), scales_OG, zeros_OG.to(torch.uint8), group)


def awq_scales(weight_OI: Tensor, moments_II: Tensor, mean_I: Tensor, group: int) -> Tensor:
    """scale_I for the columns of a matrix: the power of the inputs' mean size that loses least after rounding.

    `moments_II`: sum of x x^T, `mean_I`: mean of |x|, of the matrix's inputs.
    Some of the outputs decide.
    """
    best, chosen_I = float("inf"), torch.ones_like(mean_I)
    weight_OI = weight_OI[:: -(-len(weight_OI) // _ROWS)]
    size_I = mean_I.clamp_min(1e-5)
    for step in range(_GRID):
        scale_I = size_I.pow(step / _GRID)
        scale_I = scale_I / (scale_I.max() * scale_I.min()).sqrt()
        weight_OGS = (weight_OI * scale_I).view(len(weight_OI), -1, group)
        whole_OG = torch.ones(weight_OGS.shape[:2], device=weight_OI.device)
        error_OI = _round_within(weight_OGS, whole_OG)[0].flatten(1) / scale_I - weight_OI
        loss = float(((error_OI @ moments_II) * error_OI).sum())
        if loss < best:
            best, chosen_I = loss, scale_I
    return chosen_I


def gptq(weight_OI: Tensor, moments_II: Tensor, group: int, tokens: int) -> Rounded:
    """GPTQ in the order of the columns, ranges chosen by `shrunk` as each group is reached. `tokens`: of the moments.

    ModelError when the second moments are not finite.
    """
    weight_OI = weight_OI.clone()
    outputs, inputs = weight_OI.shape
    part = min(max(_DAMP * inputs / max(tokens, 1), _LEAST_DAMP), _MOST_DAMP)
    upper_II, importance_I = _inverse_factor(weight_OI, moments_II, part)
    codes_OI = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight_OI.device)
    scales, zeros = [], []
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors_OB = torch.zeros(outputs, stop - start, device=weight_OI.device)
        for i in range(start, stop):
            if i % group == 0:
                part_OI = weight_OI[:, i : i + group]
                shrink_OG = shrunk(part_OI, importance_I[i : i + group], group)
                _, _, scale_OG, zero_OG = _round_within(part_OI.view(outputs, 1, group), shrink_OG)
                scales.append(scale_OG)
                zeros.append(zero_OG)
            scale_O, zero_O = scales[-1][:, 0].float(), zeros[-1][:, 0]
            code_O = ((weight_OI[:, i] / scale_O).round() + zero_O).clamp(0, 15)
            codes_OI[:, i] = code_O.to(torch.uint8)
            error_O = (weight_OI[:, i] - (code_O - zero_O) * scale_O) / upper_II[i, i]
            weight_OI[:, i + 1 : stop] -= error_O[:, None] * upper_II[i, i + 1 : stop]
            errors_OB[:, i - start] = error_O
        weight_OI[:, stop:] -= errors_OB @ upper_II[start:stop, stop:]
    zeros_OG = torch.cat(zeros, 1).to(torch.uint8)
    return Rounded(pack_int4(codes_OI), torch.cat(scales, 1), zeros_OG, group)


def _inverse_factor(weight_OI: Tensor, moments_II: Tensor, part: float) -> tuple[Tensor, Tensor]:
    """Upper Cholesky factor of the inverse second moments, and their diagonal; unused inputs lose their weights."""
    if not bool(torch.isfinite(moments_II).all()):
        raise ModelError("The calibration text gives activations that are not finite.", "Use --dtype float32.")
    moments_II = moments_II.clone()
    diagonal_I = moments_II.diagonal()
    unused = diagonal_I == 0
    weight_OI[:, unused] = 0
    diagonal_I[unused] = 1
    importance_I = diagonal_I.clone()
    damp = part * float(diagonal_I.mean())
    for _ in range(8):
        diagonal_I += damp
        lower_II, info = torch.linalg.cholesky_ex(moments_II)
        if int(info) == 0:
            inverse_II = torch.cholesky_inverse(lower_II)
            return torch.linalg.cholesky(inverse_II, upper=True), importance_I
        damp *= 4
    raise ModelError("The second moments of the activations cannot be inverted.", "Use a longer calibration text.")
