"""Choosing tokens from logits, in torch: greedy, temperature, top-k, top-p, min-p, logprobs.

Noise is counter-based, so a token depends on nothing but its own logits and (seed, child, position): the same
under any batch, preemption, overlap or rank. A draw is the Gumbel-max trick: argmax(logits / temperature + g), which
samples the softmax of what the filters left, without normalising or sorting the vocabulary.

Shape letters: N sampled positions, V vocabulary, W = ceil(V / 4) counters.

Sources: Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Gumbel-max, Gumbel 1954.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.runner.base import TokenLogprobs

PHILOX_TAG = 0x4F435456
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


@dataclass(slots=True)
class SamplingRows:
    """Parameters of N positions as tensors: float32 temperature, top_p, min_p; int64 the rest (words unsigned)."""

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor
    seed_low_N: Tensor
    seed_high_N: Tensor
    child_N: Tensor
    position_N: Tensor


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Philox4x32-10: four random words for each counter (c0..c3) and key (k0, k1); 32-bit words in int64 tensors."""
    for _ in range(10):
        # int64 products of 32-bit words wrap; shifting and masking still gives their upper halves.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> 32 & _LOW) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32 & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def philox_words(rows: SamplingRows, vocab: int) -> Tensor:
    """Random 32-bit words, one for each (row, vocabulary id): int64 [N, V] in 0..2**32 - 1.

    Word v of a row is word v % 4 of Philox with counter (v // 4, position, child, tag) and the seed as key.
    """
    width = -(-vocab // 4)
    count = len(rows.seed_low_N)
    c0 = torch.arange(width, dtype=torch.int64, device=rows.seed_low_N.device).expand(count, width)
    c1, c2 = rows.position_N[:, None].expand_as(c0), rows.child_N[:, None].expand_as(c0)
    words = philox(c0, c1, c2, torch.full_like(c0, PHILOX_TAG), rows.seed_low_N[:, None], rows.seed_high_N[:, None])
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab]


def gumbel_noise(words_NV: Tensor) -> Tensor:
    """Gumbel noise from 32-bit words, float32. In float64 until the end: float32 would round u to 1, noise to inf."""
    u = (words_NV.to(torch.float64) + 0.5) / 2.0**32
    return (-torch.log(-torch.log(u))).to(torch.float32)


def filter_logits(scaled_NV: Tensor, rows: SamplingRows) -> Tensor:
    """Logits with everything outside min-p, top-k and top-p (in this order) at -inf. The best token always stays."""
    vocab = scaled_NV.shape[1]
    best_N1 = scaled_NV.amax(-1, keepdim=True)
    floor_N1 = best_N1 + torch.log(rows.min_p_N)[:, None].to(scaled_NV.dtype)  # log 0 = -inf: off
    scaled_NV = scaled_NV.masked_fill(scaled_NV < floor_N1, -torch.inf)
    sorted_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    k_N = torch.where((rows.top_k_N <= 0) | (rows.top_k_N > vocab), vocab, rows.top_k_N)
    rank_V = torch.arange(vocab, device=scaled_NV.device)
    sorted_NV = sorted_NV.masked_fill(rank_V[None, :] >= k_N[:, None], -torch.inf)
    probs_NV = torch.softmax(sorted_NV, dim=-1)
    before_NV = probs_NV.cumsum(-1) - probs_NV  # mass of better tokens; 0 for the best, so it always stays
    top_p_N1 = rows.top_p_N[:, None].to(scaled_NV.dtype)
    sorted_NV = sorted_NV.masked_fill((before_NV >= top_p_N1) & (top_p_N1 < 1.0), -torch.inf)
    return torch.empty_like(scaled_NV).scatter_(1, order_NV, sorted_NV)


def draw(logits_NV: Tensor, rows: SamplingRows, *, filters: bool) -> Tensor:
    """Sample one token for each position; temperature > 0. `filters`: some row uses top-k, top-p or min-p."""
    scaled_NV = logits_NV / rows.temperature_N[:, None].to(logits_NV.dtype)
    if filters:
        scaled_NV = filter_logits(scaled_NV, rows)
    words_NV = philox_words(rows, logits_NV.shape[1])
    return (scaled_NV + gumbel_noise(words_NV)).argmax(-1)


def all_logprobs(logits_NV: Tensor, tokens_N: Tensor, count: int) -> list[TokenLogprobs]:
    """`token_logprobs` of several positions, with as many operations as for one."""
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    chosen_N1 = logprobs_NV.gather(1, tokens_N[:, None])
    rank_N = (logprobs_NV > chosen_N1).sum(-1) + 1
    best = logprobs_NV.topk(count)
    ids = best.indices.cpu().numpy().astype(np.int32)
    values = best.values.cpu().numpy().astype(np.float32)
    heads = zip(chosen_N1[:, 0].tolist(), rank_N.tolist(), strict=True)
    return [TokenLogprobs(chosen, rank, ids[i], values[i]) for i, (chosen, rank) in enumerate(heads)]


def token_logprobs(logits_V: Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of the unmodified logits: the chosen token, its rank, and the best `count`."""
    logprobs_V = torch.log_softmax(logits_V.float() if logits_V.dtype != torch.float64 else logits_V, dim=-1)
    chosen = float(logprobs_V[token])
    rank = int((logprobs_V > chosen).sum()) + 1
    best = logprobs_V.topk(count)
    return TokenLogprobs(
        chosen, rank, best.indices.cpu().numpy().astype(np.int32), best.values.cpu().numpy().astype(np.float32)
    )
