"""Paged causal attention for rows with many query tokens, and of all decode rows over a prefix that they share.

A program holds one tile: some query tokens of one row for all G query heads that share a key/value head, so that a
tile is tall even when a chunk is short, and K and V are read once for G heads. Keys before the tile's first token
need no mask and are read in a loop of their own. Tiles and lengths come from `StepTables`.

Shape letters: T tokens, R rows, H query heads, K key/value heads, G = H / K, D head dim, N blocks, S tokens in a
block, S device rows and M columns of the table, U partial results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.decode import LOG2_E, Partials, capped, precision_of
from octavo.kernels.gpu.step import (
    C_KEYS,
    C_ROW,
    C_START,
    C_TOKENS,
    M_DECODE,
    M_PREFIX,
    M_TILES,
    StepTables,
)

_NEG = tl.constexpr(-1.0e30)
# Rows of a tile (tokens times padded G), keys of a block, warps, stages: for 2-byte elements and head dims up to
# 128, for wider heads, for float32 (exact products, no tensor cores: small tiles, or it neither compiles nor runs well).
TUNED = {"half": (128, 64, 4, 3), "wide": (128, 32, 8, 3), "float32": (32, 16, 4, 2)}


def _tuned(dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    return TUNED["float32" if dtype == torch.float32 else "wide" if dim > 128 else "half"]


def tile_tokens(group: int, dim: int, dtype: torch.dtype) -> int:
    """Query tokens of one tile when G = `group`."""
    return max(1, _tuned(dim, dtype)[0] // triton.next_power_of_2(group))


@triton.jit
def _over_keys(
    q, m, total, acc, table, KEYS, VALUES, head, position, lo, hi, last, scale,
    K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys lo..hi - 1. MASKED: some keys may be invisible to a query, or past `last`."""
    d = tl.arange(0, BD)
    for n0 in range(lo, hi, BN):
        n = n0 + tl.arange(0, BN)
        if MASKED:
            ok = n < last
            block = tl.load(table + n // S, mask=ok, other=0).to(tl.int64)
        else:
            block = tl.load(table + n // S).to(tl.int64)
        at = ((block * K + head) * S + n % S) * D
        if MASKED or BD != D:
            inside = (n < last) if MASKED else (n >= 0)
            k = tl.load(KEYS + at[None, :] + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(VALUES + at[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        else:
            k = tl.load(KEYS + at[None, :] + d[:, None])
            v = tl.load(VALUES + at[:, None] + d[None, :])
        s = capped(tl.dot(q, k, input_precision=PRECISION), scale, SOFTCAP)
        if MASKED:
            seen = (n[None, :] <= position[:, None]) & (n < last)[None, :]
            if WINDOW > 0:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, _NEG)
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        if MASKED and WINDOW > 0:  # a query may see nothing of this block yet
            p = tl.where(seen, p, 0.0)
        shrink = tl.exp2(m - top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = top
    return m, total, acc


@triton.jit
def _prefill(
    Q, KEYS, VALUES, OUT, TABLES, META, ROWS, TILES, R, M, tiles_cap, scale,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    head = tl.program_id(0)
    if tile >= tl.load(META + M_TILES):
        return
    lane = tl.load(TILES + tile)
    t0 = tl.load(TILES + tiles_cap + tile)
    first = tl.load(ROWS + C_START * R + lane)
    end = tl.load(ROWS + C_KEYS * R + lane)
    tokens = tl.load(ROWS + C_TOKENS * R + lane)
    i = tl.arange(0, BM)
    t = t0 + i // GP
    g = i % GP
    d = tl.arange(0, BD)
    ok = ((t < tokens) & (g < G))[:, None] & (d < D)[None, :]
    at = ((first + t).to(tl.int64) * H + head * G + g)[:, None] * D + d[None, :]
    q = tl.load(Q + at, mask=ok, other=0.0)
    position = end - tokens + t
    table = TABLES + tl.load(ROWS + C_ROW * R + lane).to(tl.int64) * M
    m = tl.full([BM], _NEG, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    start = end - tokens + t0  # position of the tile's first token
    stop = tl.minimum(start + BM // GP, end)
    lo = 0
    if WINDOW > 0:
        lo = tl.maximum(start - WINDOW + 1, 0) // BN * BN
        free = lo
    else:
        free = (start + 1) // BN * BN
        m, total, acc = _over_keys(
            q, m, total, acc, table, KEYS, VALUES, head, position, lo, free, end, scale,
            K, D, BD, S, BN, SOFTCAP, WINDOW, False, PRECISION,
        )  # fmt: skip
    m, total, acc = _over_keys(
        q, m, total, acc, table, KEYS, VALUES, head, position, free, stop, end, scale,
        K, D, BD, S, BN, SOFTCAP, WINDOW, True, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=ok)


@triton.jit
def _prefix(
    Q, KEYS, VALUES, PART, LSE, TABLES, META, ROWS, R, M, first, scale,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    lane0 = tl.program_id(1) * (BM // GP)
    split = tl.program_id(2)
    lanes = tl.load(META + M_DECODE)
    if lane0 >= lanes:
        return
    keys = tl.load(META + M_PREFIX)
    per = tl.cdiv(tl.cdiv(keys, SPLITS), BN) * BN
    lo = split * per
    hi = tl.minimum(lo + per, keys)
    i = tl.arange(0, BM)
    lane = lane0 + i // GP
    g = i % GP
    d = tl.arange(0, BD)
    ok = (lane < lanes) & (g < G)
    heads = head * G + g
    inside = ok[:, None] & (d < D)[None, :]
    q = tl.load(Q + (lane.to(tl.int64) * H + heads)[:, None] * D + d[None, :], mask=inside, other=0.0)
    table = TABLES + tl.load(ROWS + C_ROW * R).to(tl.int64) * M
    m = tl.full([BM], _NEG, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    free = tl.maximum(lo, hi // BN * BN)
    position = i * 0 + keys
    m, total, acc = _over_keys(
        q, m, total, acc, table, KEYS, VALUES, head, position, lo, free, hi, scale,
        K, D, BD, S, BN, SOFTCAP, 0, False, PRECISION,
    )  # fmt: skip
    m, total, acc = _over_keys(
        q, m, total, acc, table, KEYS, VALUES, head, position, free, hi, hi, scale,
        K, D, BD, S, BN, SOFTCAP, 0, True, PRECISION,
    )  # fmt: skip
    place = (first + split * R + lane).to(tl.int64) * H + heads
    lse = tl.where(total > 0.0, m + tl.log2(total), -float("inf"))
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(PART + place[:, None] * D + d[None, :], acc, mask=inside)
    tl.store(LSE + place, lse, mask=ok)


def _sizes(q_THD: Tensor, keys_NKSD: Tensor) -> tuple[tuple[int, ...], str, dict[str, int]]:
    """H, K, G, GP, D, BD, S, BM, BN of the kernels above; precision of products; launch options."""
    heads, dim = q_THD.shape[1:]
    kv_heads, block_size = keys_NKSD.shape[1:3]
    group, width = heads // kv_heads, triton.next_power_of_2(dim)
    padded = triton.next_power_of_2(group)
    rows, block, warps, stages = _tuned(dim, q_THD.dtype)
    sizes = (heads, kv_heads, group, padded, dim, width, block_size, max(rows, padded), block)
    return sizes, precision_of(q_THD), {"num_warps": warps, "num_stages": stages}


def prefill_attention(
    q_THD: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    out_THD: Tensor,
    tables_SM: Tensor,
    step: StepTables,
    scale: float,
    softcap: float,
    window: int,
    tiles: int,
) -> None:
    """Attention of the step's host-fed rows into `out_THD`, launched for `tiles` tiles of `tile_tokens` tokens."""
    sizes, precision, launch = _sizes(q_THD, keys_NKSD)
    _prefill[(sizes[1], tiles)](
        q_THD, keys_NKSD, values_NKSD, out_THD, tables_SM, step.meta, step.rows_CR, step.tiles_2Q,
        step.rows_CR.shape[1], tables_SM.shape[1], step.tiles_2Q.shape[1], scale * LOG2_E, *sizes, softcap, window,
        precision, **launch,
    )  # fmt: skip


def prefix_attention(
    q_THD: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    tables_SM: Tensor,
    step: StepTables,
    partials: Partials,
    scale: float,
    softcap: float,
    lanes: int,
) -> None:
    """All decode rows over the keys that they share (`meta[M_PREFIX]` of them) into the prefix part of `partials`."""
    sizes, precision, launch = _sizes(q_THD, keys_NKSD)
    rows, splits = step.rows_CR.shape[1], partials.prefix_splits
    grid = (sizes[1], triton.cdiv(lanes * sizes[3], sizes[7]), splits)
    _prefix[grid](
        q_THD, keys_NKSD, values_NKSD, partials.o_UHD, partials.lse_UH, tables_SM, step.meta, step.rows_CR,
        rows, tables_SM.shape[1], partials.o_UHD.shape[0] - splits * rows, scale * LOG2_E, *sizes, softcap, splits,
        precision, **launch,
    )  # fmt: skip
