"""Paged causal attention for rows with many query tokens, and of all decode rows over a prefix that they share.

A program holds one tile: some query tokens of one row for all G query heads that share a key/value head, so that a
tile is tall even when a chunk is short, and K and V are read once for G heads. Keys before the tile's first token
need no mask and are read in a loop of their own. Tiles and lengths come from `StepTables`.

Shape letters: T tokens, R rows, H query heads, K key/value heads, G = H / K, D head dim, N blocks, S tokens in a
block, S device rows and M columns of the table, U partial results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.gpu.decode import LOG2_E, Partials, capped, precision_of
from octavo.kernels.gpu.fp8_pool import scaled_for
from octavo.kernels.gpu.launch import early, in_turn
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
# Rows of a tile (tokens times padded G), keys of a block, warps, stages. For 2-byte elements and head dims up to 128:
# "half", "own" where the keys are the step's own, "prefix" for a shared prefix. "wide" for wider heads, "float32" for
# exact products without tensor cores (large tiles hardly compile).
TUNED = {
    "half": (128, 64, 4, 3), "own": (128, 64, 8, 3), "prefix": (64, 64, 4, 3), "wide": (128, 32, 8, 3),
    "float32": (32, 16, 4, 2),
}  # fmt: skip


def _tuned(dim: int, dtype: torch.dtype, use: str = "half") -> tuple[int, int, int, int]:
    return TUNED["float32" if dtype == torch.float32 else "wide" if dim > 128 else use]


def tile_tokens(group: int, dim: int, dtype: torch.dtype) -> int:
    """Query tokens of one tile when G = `group`."""
    return max(1, _tuned(dim, dtype)[0] // triton.next_power_of_2(group))


@triton.jit
def _join(s, v, m, total, acc, seen, scale, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the running softmax: scores and values of some keys into maximum, sum and result."""
    unit = scale  # scaled with the difference below, so that the compiler joins the two
    if SOFTCAP > 0:
        s = capped(s, scale, SOFTCAP)
        unit = scale * 0.0 + 1.0
    if MASKED:
        s = tl.where(seen, s, _NEG)
    top = tl.maximum(m, tl.max(s, 1) * unit)
    p = tl.exp2(s * unit - top[:, None])
    if MASKED:  # a query may see none of these keys, and none before
        p = tl.where(seen, p, 0.0)
    shrink = tl.exp2(m - top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return top, total, acc


@triton.jit
def _over_pool(
    q, m, total, acc, table, KEYS, VALUES, head, position, lo, hi, last, scale,
    K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys lo..hi - 1 of the pool. MASKED: some may be invisible to a query, or past `last`."""
    d = tl.arange(0, BD)
    for n0 in range(lo, hi, BN):
        n = n0 + tl.arange(0, BN)
        ok = (n < last) if MASKED else (n >= 0)
        block = tl.load(table + n // S, mask=ok, other=0) if MASKED else tl.load(table + n // S)
        at = ((block.to(tl.int64) * K + head) * S + n % S) * D
        if MASKED or BD != D:
            k = tl.load(KEYS + at[None, :] + d[:, None], mask=ok[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(VALUES + at[:, None] + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
        else:
            k = tl.load(KEYS + at[None, :] + d[:, None])
            v = tl.load(VALUES + at[:, None] + d[None, :])
        if KEYS.dtype.element_ty == tl.float8e4nv:
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        seen = ok[None, :]
        if MASKED:
            seen = seen & (n[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
        s = tl.dot(q, k, input_precision=PRECISION)
        m, total, acc = _join(s, v, m, total, acc, seen, scale, SOFTCAP, MASKED, PRECISION)
    return m, total, acc


@triton.jit
def _over_step(
    q, m, total, acc, KEYS, VALUES, first, key_column, value_column, t, lo, hi, scale,
    BN: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys of the row's own tokens lo..hi - 1 of this step, by tensor descriptors over the step's products.

    LAST: behind `hi` comes another row, which may hold NaN, and zero times NaN is NaN.
    """
    for n0 in range(lo, hi, BN):
        k = KEYS.load([first + n0, key_column])
        v = VALUES.load([first + n0, value_column])
        if LAST:
            v = tl.where((n0 + tl.arange(0, BN) < hi)[:, None], v, tl.zeros_like(v))
        seen = (n0 + tl.arange(0, BN))[None, :] <= t[:, None]
        s = tl.dot(q, k.T, input_precision=PRECISION)
        m, total, acc = _join(s, v, m, total, acc, seen, scale, SOFTCAP, MASKED, PRECISION)
    return m, total, acc


@triton.jit
def _over_own(
    q, m, total, acc, KEYS, VALUES, first, key_column, value_column, t0, t, tokens, scale,
    TILE: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All keys of the row's own tokens that a tile of TILE tokens from `t0` on sees."""
    free = (t0 + 1) // BN * BN
    stop = tl.minimum(t0 + TILE, tokens)
    whole = tl.maximum(tl.minimum(stop, tokens // BN * BN), free)
    m, total, acc = _over_step(
        q, m, total, acc, KEYS, VALUES, first, key_column, value_column, t, 0, free, scale, BN, SOFTCAP, False,
        False, PRECISION,
    )  # fmt: skip
    m, total, acc = _over_step(
        q, m, total, acc, KEYS, VALUES, first, key_column, value_column, t, free, whole, scale, BN, SOFTCAP, True,
        False, PRECISION,
    )  # fmt: skip
    m, total, acc = _over_step(
        q, m, total, acc, KEYS, VALUES, first, key_column, value_column, t, whole, stop, scale, BN, SOFTCAP, True,
        True, PRECISION,
    )  # fmt: skip
    return m, total, acc


@triton.jit
def _prefill(
    Q, KEYS, VALUES, OWN_KEYS, OWN_VALUES, OUT, TABLES, META, ROWS, TILES, SCALES, R, M, tiles_cap, q_stride, scale,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    OWN: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
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
    heads = head * G + i % GP
    d = tl.arange(0, BD)
    ok = ((t < tokens) & (i % GP < G))[:, None] & (d < D)[None, :]
    token = (first + t).to(tl.int64)
    q = tl.load(Q + (token * q_stride + heads * D)[:, None] + d[None, :], mask=ok, other=0.0)
    if FP8:
        q = scaled_for(q, tl.load(SCALES + head))
    before = end - tokens  # keys of earlier steps
    table = TABLES + tl.load(ROWS + C_ROW * R + lane).to(tl.int64) * M
    m = tl.full([BM], _NEG, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    stop = tl.minimum(before + t0 + BM // GP, end)  # after the last key that the tile sees
    if OWN:
        stop = before
        free = before // BN * BN
    else:
        free = (before + t0 + 1) // BN * BN
    if WINDOW > 0:
        free = tl.maximum(before + t0 - WINDOW + 1, 0) // BN * BN
    else:
        m, total, acc = _over_pool(
            q, m, total, acc, table, KEYS, VALUES, head, before + t, 0, free, end, scale,
            K, D, BD, S, BN, SOFTCAP, WINDOW, False, PRECISION,
        )  # fmt: skip
    m, total, acc = _over_pool(
        q, m, total, acc, table, KEYS, VALUES, head, before + t, free, stop, stop, scale,
        K, D, BD, S, BN, SOFTCAP, WINDOW, True, PRECISION,
    )  # fmt: skip
    if OWN:
        m, total, acc = _over_own(
            q, m, total, acc, OWN_KEYS, OWN_VALUES, first, (H + head) * D, (H + K + head) * D, t0, t, tokens, scale,
            BM // GP, BN, SOFTCAP, PRECISION,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if FP8:
        acc *= tl.load(SCALES + K + head)
    tl.store(OUT + ((token * H + heads) * D)[:, None] + d[None, :], acc.to(OUT.dtype.element_ty), mask=ok)


@triton.jit
def _prefix(
    Q, KEYS, VALUES, PART, LSE, TABLES, META, ROWS, SCALES, R, M, q_stride, first, scale,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, SPLITS: tl.constexpr,
    FP8: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
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
    q = tl.load(Q + (lane.to(tl.int64) * q_stride + heads * D)[:, None] + d[None, :], mask=inside, other=0.0)
    if FP8:
        q = scaled_for(q, tl.load(SCALES + head))
    table = TABLES + tl.load(ROWS + C_ROW * R).to(tl.int64) * M
    m = tl.full([BM], _NEG, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    free = tl.maximum(lo, hi // BN * BN)
    position = i * 0 + keys
    m, total, acc = _over_pool(
        q, m, total, acc, table, KEYS, VALUES, head, position, lo, free, hi, scale,
        K, D, BD, S, BN, SOFTCAP, 0, False, PRECISION,
    )  # fmt: skip
    m, total, acc = _over_pool(
        q, m, total, acc, table, KEYS, VALUES, head, position, free, hi, hi, scale,
        K, D, BD, S, BN, SOFTCAP, 0, True, PRECISION,
    )  # fmt: skip
    place = (first + split * R + lane).to(tl.int64) * H + heads
    lse = tl.where(total > 0.0, m + tl.log2(total), -float("inf"))
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if FP8:
        acc *= tl.load(SCALES + K + head)
    tl.store(PART + place[:, None] * D + d[None, :], acc, mask=inside)
    tl.store(LSE + place, lse, mask=ok)


def _sizes(q_THD: Tensor, keys_NKSD: Tensor, use: str) -> tuple[tuple[int, ...], str, dict[str, int]]:
    """H, K, G, GP, D, BD, S, BM, BN of the kernels above; precision of products; launch options."""
    heads, dim = q_THD.shape[1:]
    kv_heads, block_size = keys_NKSD.shape[1:3]
    group, width = heads // kv_heads, triton.next_power_of_2(dim)
    padded = triton.next_power_of_2(group)
    rows, block, warps, stages = _tuned(dim, q_THD.dtype, use)
    sizes = (heads, kv_heads, group, padded, dim, width, block_size, max(rows, padded), block)
    return sizes, precision_of(q_THD), {"num_warps": warps, "num_stages": stages}


def prefill_attention(
    q_THD: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    own: tuple[Tensor, Tensor] | None,
    out_THD: Tensor,
    tables_SM: Tensor,
    step: StepTables,
    scale: float,
    softcap: float,
    window: int,
    tiles: int,
    scales_2K: Tensor | None = None,
) -> None:
    """Attention of the step's host-fed rows into `out_THD`, launched for `tiles` tiles of `tile_tokens` tokens.

    `own`: (rotated q and k [T, H + K, D], the qkv product [T, H + 2K, D]) of the step. With it the keys and values of
    the step itself are read from there, in wide copies that know no blocks. `scales_2K`: those of an FP8 pool, which
    is then the only place that keys and values are read from.
    """
    sizes, precision, launch = _sizes(q_THD, keys_NKSD, "half" if own is None else "own")
    keys: Any = q_THD
    values: Any = q_THD
    if own is not None:
        keys, values = (_descriptor(x_TJD.flatten(1), sizes[8], sizes[4]) for x_TJD in own)
    _prefill[(sizes[1], tiles)](
        q_THD, keys_NKSD, values_NKSD, keys, values, out_THD, tables_SM, step.meta, step.rows_CR, step.tiles_2Q,
        q_THD if scales_2K is None else scales_2K, step.rows_CR.shape[1], tables_SM.shape[1], step.tiles_2Q.shape[1],
        q_THD.stride(0), scale * LOG2_E, *sizes, softcap, window, own is not None, scales_2K is not None, precision,
        early(q_THD), launch_pdl=early(q_THD), **launch,
    )  # fmt: skip


def can_read_own(dim: int, dtype: torch.dtype, window: int) -> bool:
    """Whether `prefill_attention` takes `own`: descriptors hold whole heads, and only of 2-byte elements."""
    return window == 0 and dtype != torch.float32 and dim in (64, 128)


def _descriptor(x_TI: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x_TI, list(x_TI.shape), list(x_TI.stride()), [rows, columns])


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
    scales_2K: Tensor | None = None,
) -> None:
    """All decode rows over the keys that they share (`meta[M_PREFIX]` of them) into the prefix part of `partials`."""
    sizes, precision, launch = _sizes(q_THD, keys_NKSD, "prefix")
    rows, splits = step.rows_CR.shape[1], partials.prefix_splits
    grid = (sizes[1], triton.cdiv(lanes * sizes[3], sizes[7]), splits)
    _prefix[grid](
        q_THD, keys_NKSD, values_NKSD, partials.o_UHD, partials.lse_UH, tables_SM, step.meta, step.rows_CR,
        q_THD if scales_2K is None else scales_2K, rows, tables_SM.shape[1], q_THD.stride(0),
        partials.o_UHD.shape[0] - splits * rows, scale * LOG2_E, *sizes, softcap, splits,
        scales_2K is not None, precision, early(q_THD), launch_pdl=early(q_THD), **launch,
    )  # fmt: skip
