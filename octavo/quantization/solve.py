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
_ROWS = 256  # outputs whose loss decides
_SHRINKS = tuple(1.0 - 0.05 * i for i in range(8))  # parts of a group's range that are tried
_BLOCK = 32  # columns that GPTQ corrects before it passes their errors on
_MOST_COLUMNS = 1024  # of one product of second moments
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


def second_moments(x_TI: Tensor) -> Tensor:
    """x^T x, each product of two blocks of columns once."""
    size = x_TI.shape[1]
    moments_II = torch.empty(size, size, device=x_TI.device)
    blocks = [slice(start, min(start + _MOST_COLUMNS, size)) for start in range(0, size, _MOST_COLUMNS)]
    for i, rows in enumerate(blocks):
        for columns in blocks[i:]:
            moments_II[rows, columns] = x_TI[:, rows].T @ x_TI[:, columns]
            if rows != columns:
                moments_II[columns, rows] = moments_II[rows, columns].T
    return moments_II


def group_moments(x_TI: Tensor, group: int) -> Tensor:
    """x^T x inside each group of inputs: moments_GSS."""
    x_GTS = x_TI.view(len(x_TI), -1, group).transpose(0, 1)
    return x_GTS.transpose(1, 2) @ x_GTS


def nearest(weight_OI: Tensor, group: int) -> Rounded:
    """Round to nearest between the extremes of each group."""
    codes_OGS, scales_OG, zeros_OG = round_int4(weight_OI.view(len(weight_OI), -1, group))
    return Rounded(pack_int4(codes_OGS.flatten(1)), scales_OG, zeros_OG, group)


def shrunk(weight_OI: Tensor, moments_GSS: Tensor) -> Tensor:
    """shrink_OG: the part of each group's range that loses least on inputs with these second moments.

    The moments of pairs count: clipped weights all err towards zero, which adds up where inputs go together.
    """
    weight_OGS = weight_OI.view(len(weight_OI), *moments_GSS.shape[:2])
    best_OG = torch.full(weight_OGS.shape[:2], float("inf"), device=weight_OI.device)
    chosen_OG = torch.ones_like(best_OG)
    for shrink in _SHRINKS:
        error_OGS = _round_within(weight_OGS, torch.full_like(best_OG, shrink))[0] - weight_OGS
        pulled_OGS = (error_OGS.transpose(0, 1) @ moments_GSS).transpose(0, 1)
        loss_OG = (pulled_OGS * error_OGS).sum(-1)
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


def clipped(weight_OI: Tensor, moments_GSS: Tensor) -> Rounded:
    """`nearest` with ranges cut where that loses less (AWQ's second half)."""
    weight_OGS = weight_OI.view(len(weight_OI), *moments_GSS.shape[:2])
    _, codes, scales_OG, zeros_OG = _round_within(weight_OGS, shrunk(weight_OI, moments_GSS))
    zeros_OG, group = zeros_OG.to(torch.uint8), moments_GSS.shape[1]
    return Rounded(pack_int4(codes.to(torch.uint8).flatten(1)), scales_OG, zeros_OG, group)


def awq_scales(
    weight_OI: Tensor, sample_TI: Tensor, size_I: Tensor, group: int, shared: tuple[int, int, int] | None = None
) -> Tensor:
    """scale_I for the columns of a matrix: the power of the inputs' mean size, as it is or over the power of the
    columns' own, that loses least on a sample of its inputs. All ones where no power is better.

    `size_I`: mean of |x|. `shared`: a shape of the inputs whose second axis must have one scale. Some of the outputs
    decide.
    """
    part_OI = weight_OI[:: -(-len(weight_OI) // _ROWS)]
    relative_OI = weight_OI.abs().view(len(weight_OI), -1, group)
    relative_OI = (relative_OI / relative_OI.amax(-1, keepdim=True).clamp_min(1e-9)).flatten(1)
    size_I, column_I = (_of_all(x_I.clamp_min(1e-5), shared) for x_I in (size_I, relative_OI.mean(0)))
    best, chosen_I = float("inf"), torch.ones_like(size_I)
    for step in range(2 * _GRID):
        power = step // 2 / _GRID
        scale_I = size_I.pow(power)
        if step % 2:
            scale_I = scale_I / column_I.pow(1 - power)
        scale_I = scale_I / (scale_I.max() * scale_I.min()).sqrt()
        weight_OGS = (part_OI * scale_I).view(len(part_OI), -1, group)
        whole_OG = torch.ones(weight_OGS.shape[:2], device=weight_OI.device)
        error_OI = _round_within(weight_OGS, whole_OG)[0].flatten(1) / scale_I - part_OI
        loss = float((sample_TI @ error_OI.T).square().sum())
        if loss < best:
            best, chosen_I = loss, scale_I
    return chosen_I


def _of_all(size_I: Tensor, shared: tuple[int, int, int] | None) -> Tensor:
    if shared is None:
        return size_I
    return size_I.log().view(shared).mean(1, keepdim=True).expand(shared).exp().reshape(-1)


def gptq(weight_OI: Tensor, moments_II: Tensor, group: int, tokens: int) -> Rounded:
    """GPTQ, inputs with the largest second moments first; ranges by `shrunk`, before. `tokens`: of the moments.

    Groups are of neighbouring columns whatever the order, so that nothing of it is stored. ModelError when the second
    moments are not finite.
    """
    if not bool(torch.isfinite(moments_II).all()):
        raise ModelError("The calibration text gives activations that are not finite.", "Use --dtype float32.")
    outputs, inputs = weight_OI.shape
    weight_OI = weight_OI.masked_fill(moments_II.diagonal() == 0, 0)  # what is never seen
    blocks_GSS = torch.stack([moments_II[i : i + group, i : i + group] for i in range(0, inputs, group)])
    _, _, scales_OG, zeros_OG = _round_within(weight_OI.view(outputs, -1, group), shrunk(weight_OI, blocks_GSS))
    order_I = moments_II.diagonal().argsort(descending=True)
    places = (order_I // group).tolist()
    weight_OI = weight_OI[:, order_I]
    wide_GO, zeros_GO = scales_OG.float().T.contiguous(), zeros_OG.T.contiguous()
    part = min(max(_DAMP * inputs / max(tokens, 1), _LEAST_DAMP), _MOST_DAMP)
    upper_II = _inverse_factor(moments_II[order_I][:, order_I], part)
    codes_IO = torch.empty(inputs, outputs, dtype=torch.uint8, device=weight_OI.device)
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        block_BO = weight_OI[:, start:stop].T.contiguous()
        for i in range(start, stop):
            scale_O, zero_O, weight_O = wide_GO[places[i]], zeros_GO[places[i]], block_BO[i - start]
            code_O = (weight_O / scale_O).round_().add_(zero_O).clamp_(0, 15)
            codes_IO[i] = code_O
            weight_O.sub_((code_O - zero_O) * scale_O).div_(upper_II[i, i])  # from here on its error
            block_BO[i - start + 1 :].addr_(upper_II[i, i + 1 : stop], weight_O, alpha=-1)
        weight_OI[:, stop:].addmm_(block_BO.T, upper_II[start:stop, stop:], alpha=-1)
    sorted_IO = torch.empty_like(codes_IO)
    sorted_IO[order_I] = codes_IO
    return Rounded(pack_int4(sorted_IO.T.contiguous()), scales_OG, zeros_OG.to(torch.uint8), group)


def _inverse_factor(moments_II: Tensor, part: float) -> Tensor:
    """Upper Cholesky factor of the inverse second moments, damped by a part of their mean; changes the moments."""
    diagonal_I = moments_II.diagonal()
    diagonal_I[diagonal_I == 0] = 1
    damp = part * float(diagonal_I.mean())
    for _ in range(8):
        diagonal_I += damp
        lower_II, info = torch.linalg.cholesky_ex(moments_II)
        if int(info) == 0:
            upper_II: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower_II), upper=True)
            return upper_II
        damp *= 4
    raise ModelError("The second moments of the activations cannot be inverted.", "Use a longer calibration text.")
