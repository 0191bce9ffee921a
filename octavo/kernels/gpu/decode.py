"""Paged decode attention: one query token a row, keys cut into items, partial results joined by log-sum-exp.

A program reads the keys of one item for all query heads that share a key/value head, so K and V are read once.
Rows of one item write their output at once; the others leave partial results that `merge` joins, together with
those of a shared prefix if there is one (Milakov and Gimelshein 2018 for the running softmax; Dao et al. 2023 for
the split). Lengths, tables and items are read from `StepTables`, so one launch serves any plan of its size.

Shape letters: R rows, H query heads, K key/value heads, G = H / K, D head dim, N blocks, S tokens in a block,
S device rows and M columns of the table, U partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.step import (
    C_CHUNKS,
    C_SLOT,
    I_FROM,
    I_LANE,
    I_LENGTH,
    I_PLACE,
    I_ROW,
    I_TO,
    ITEM_WORDS,
    M_DECODE,
    M_ITEMS,
    StepTables,
)

LOG2_E = 1.4426950408889634
# Keys of a block, warps, stages: for 2-byte elements and head dims up to 128, for wider heads, for float32.
TUNED = {"half": (64, 4, 3), "wide": (32, 4, 3), "float32": (16, 4, 2)}
_FEW = 32  # rows up to which `merge` reads many partial results of one head at once
_NEG = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class Partials:
    """Where partial results wait for `merge`: o_UHD and log2 of the sum of exp2 per head, lse_UH; float32.

    The last `prefix_splits * rows` of the U places belong to the shared prefix, by split, then row.
    """

    o_UHD: Tensor
    lse_UH: Tensor
    prefix_splits: int

    @classmethod
    def empty(cls, items: int, rows: int, splits: int, heads: int, dim: int, device: torch.device) -> Partials:
        """Room for `items` decode items of `rows` rows and the prefix of each row in `splits` parts."""
        places = items + splits * rows
        return cls(
            torch.zeros((places, heads, dim), dtype=torch.float32, device=device),
            torch.zeros((places, heads), dtype=torch.float32, device=device),
            splits,
        )


@triton.jit
def capped(s, scale, SOFTCAP: tl.constexpr):
    """Scores in powers of two: `scale` has the factor log2(e) in it. Soft-cap: c * tanh(s / c)."""
    s *= scale
    if SOFTCAP > 0:
        e = tl.exp2(s * (2.0 / SOFTCAP))
        s = SOFTCAP * 1.4426950408889634 * (1.0 - 2.0 / (e + 1.0))
    return s


@triton.jit
def _decode(
    Q, KEYS, VALUES, OUT, PART, LSE, TABLES, META, ITEMS, M, q_stride, scale,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    item = ITEMS + tl.program_id(1) * ITEM_WORDS
    lane = tl.load(item + I_LANE).to(tl.int64)  # before the count is known: one wait instead of two
    table = TABLES + tl.load(item + I_ROW).to(tl.int64) * M
    lo = tl.load(item + I_FROM)
    hi = tl.load(item + I_TO)
    length = tl.load(item + I_LENGTH)
    place = tl.load(item + I_PLACE).to(tl.int64)
    if tl.program_id(1) >= tl.load(META + M_ITEMS):
        return
    g = tl.arange(0, GP)
    d = tl.arange(0, BD)
    heads = head * G + g
    wanted = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(Q + (lane * q_stride + heads * D)[:, None] + d[None, :], mask=wanted, other=0.0)
    m = tl.full([GP], _NEG, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, BD], tl.float32)
    if WINDOW > 0:
        lo = tl.maximum(lo, length - WINDOW)
    for n0 in range(lo, hi, BN):
        n = n0 + tl.arange(0, BN)
        ok = n < hi
        block = tl.load(table + n // S, mask=ok, other=0).to(tl.int64)
        at = (((block * K + head) * S + n % S) * D)[:, None] + d[None, :]
        inside = ok[:, None] & (d < D)[None, :]
        k = tl.load(KEYS + at, mask=inside, other=0.0)
        v = tl.load(VALUES + at, mask=inside, other=0.0)
        s = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, SOFTCAP)
        s = tl.where(ok[None, :], s, _NEG)
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(m - top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = top
    seen = total > 0.0  # an item behind the window sees nothing
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    if place < 0:
        out = OUT + (lane * H + heads)[:, None] * D + d[None, :]
        tl.store(out, acc.to(OUT.dtype.element_ty), mask=wanted)
    else:
        at = place * H + heads
        tl.store(PART + at[:, None] * D + d[None, :], acc, mask=wanted)
        tl.store(LSE + at, tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), -float("inf")), mask=g < G)


@triton.jit
def _merge(
    OUT, PART, LSE, META, ROWS, R, first,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PREFIX: tl.constexpr, BU: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0)
    chunks = tl.load(ROWS + C_CHUNKS * R + lane)
    slot = tl.load(ROWS + C_SLOT * R + lane)
    if (lane >= tl.load(META + M_DECODE)) | ((chunks == 1) & (PREFIX == 0)):
        return
    heads = tl.program_id(1) * HB + tl.arange(0, HB)
    d = tl.arange(0, BD)
    m = tl.full([HB], -float("inf"), tl.float32)
    total = tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, BD], tl.float32)
    for i in range(0, chunks + PREFIX, BU):
        u = i + tl.arange(0, BU)
        place = tl.where(u < chunks, slot + u, first + (u - chunks) * R + lane).to(tl.int64)
        at = place[:, None] * H + heads[None, :]
        ok = (u < chunks + PREFIX)[:, None] & (heads < H)[None, :]
        lse = tl.load(LSE + at, mask=ok, other=-float("inf"))
        top = tl.maximum(m, tl.max(lse, 0))
        base = tl.where(top == -float("inf"), 0.0, top)
        weight = tl.exp2(lse - base[None, :])
        shrink = tl.exp2(m - base)
        inside = (weight > 0.0)[:, :, None] & (d < D)[None, None, :]
        part = tl.load(PART + at[:, :, None] * D + d[None, None, :], mask=inside, other=0.0)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        m = top
    out = OUT + (lane.to(tl.int64) * H + heads)[:, None] * D + d[None, :]
    wanted = (heads < H)[:, None] & (d < D)[None, :]
    tl.store(out, (acc / tl.where(total > 0.0, total, 1.0)[:, None]).to(OUT.dtype.element_ty), mask=wanted)


def precision_of(q_THD: Tensor) -> str:
    """How `tl.dot` multiplies: exactly for float32; other types have one way only."""
    return "ieee" if q_THD.dtype == torch.float32 else "tf32"


def decode_attention(
    q_THD: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    out_THD: Tensor,
    tables_SM: Tensor,
    step: StepTables,
    partials: Partials,
    scale: float,
    softcap: float,
    window: int,
    lanes: int,
    items: int,
    prefix: bool,
) -> None:
    """Attention of the step's decode rows into `out_THD`, launched for `lanes` rows and `items` items.

    With `prefix`, the first `meta[M_PREFIX]` keys of all rows have been attended to by `prefix_attention`.
    """
    heads, dim = q_THD.shape[1:]
    kv_heads, block_size = keys_NKSD.shape[1:3]
    group, rows = heads // kv_heads, step.rows_CR.shape[1]
    width, padded = triton.next_power_of_2(dim), max(16, triton.next_power_of_2(group))
    single = q_THD.dtype == torch.float32
    block, warps, stages = TUNED["float32" if single else "wide" if width > 128 else "half"]
    _decode[(kv_heads, items)](
        q_THD, keys_NKSD, values_NKSD, out_THD, partials.o_UHD, partials.lse_UH, tables_SM, step.meta, step.items_I8,
        tables_SM.shape[1], q_THD.stride(0), scale * LOG2_E, heads, kv_heads, group, padded, dim, width, block_size,
        block, softcap, window, precision_of(q_THD), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    first = partials.o_UHD.shape[0] - partials.prefix_splits * rows
    at_once, many = (16, 1) if lanes <= _FEW else (2, min(8, triton.next_power_of_2(heads)))
    _merge[(lanes, triton.cdiv(heads, many))](
        out_THD, partials.o_UHD, partials.lse_UH, step.meta, step.rows_CR, rows, first, heads, dim, width,
        partials.prefix_splits if prefix else 0, at_once, many, num_warps=2 if many == 1 else 4,
    )  # fmt: skip
