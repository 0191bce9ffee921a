"""Paged decode attention: one query token a row, keys cut into items, partial results joined by log-sum-exp.

A program is a worker of `StepTables` for one key/value head: it takes the items of its share one after the other and
reads their keys for all query heads that share the head, so K and V are read once, and all programs read as much.
Rows of one item get their output at once; of the others partial results are left, and the program that finishes a
row's last item joins them in their order, together with those of a shared prefix if there is one (Milakov and
Gimelshein 2018 for the running softmax; Dao et al. 2023 for the split). Lengths, tables and items are read from
`StepTables`, so one launch serves any plan of its size.

Shape letters: R rows, H query heads, K key/value heads, G = H / K, D head dim, N blocks, S tokens in a block,
S device rows and M columns of the table, U partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.fp8_pool import as_words, in_fp8, join_pairs, pairs, scaled_for, split_pairs
from octavo.kernels.gpu.launch import LINE, ask_for, await_turn, early, let_in
from octavo.kernels.gpu.linear import FEW_TOKENS
from octavo.kernels.gpu.rope import Turning, turn
from octavo.kernels.gpu.step import (
    I_FROM,
    I_LANE,
    I_LENGTH,
    I_PART,
    I_PARTS,
    I_PLACE,
    I_ROW,
    I_TO,
    ITEM_WORDS,
    M_ITEMS,
    M_WORKERS,
    Cut,
    StepTables,
)

LOG2_E = 1.4426950408889634
# Keys of a block, warps, stages: for 2-byte elements and head dims up to 128 (with up to FEW_TOKENS rows: "few"), for
# wider heads, for float32, and for FP8 pools where the tokens have 2 bytes and head dims are up to 128, with few rows
# and with many.
TUNED = {
    "half": (32, 2, 4), "few": (64, 4, 4), "wide": (32, 4, 3), "float32": (16, 4, 2), "fp8": (64, 2, 3),
    "many fp8": (64, 2, 5),
}  # fmt: skip
PROGRAMS = {"half": 6, "few": 4}  # that a multiprocessor has at a time; others 4
REGISTERS = 1 << 16  # of a multiprocessor: a program that loops must be kept from taking more than its part
_FEW = 16  # rows up to which there are so many parts of a row that many are loaded at a time
_JOINED = 4096  # floats of partial results that are loaded at a time at most
_NEG = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class Partials:
    """Where partial results wait to be joined: o_UHD and log2 of the sum of exp2 per head, lse_UH; float32.

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
    Q, KEYS, VALUES, OUT, PART, LSE, FINISHED, TABLES, META, ITEMS, FIRST, NORM, ROPE, SCALES, R, M, first, q_stride,
    scale, eps, H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    PREFIX: tl.constexpr, GJ: tl.constexpr, JOIN: tl.constexpr, TURN: tl.constexpr, NORMED: tl.constexpr,
    PRECISION: tl.constexpr, FP8: tl.constexpr, AHEAD: tl.constexpr, ALONE: tl.constexpr, ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_in(EARLY)  # items and tables lie behind a kernel of torch's, the embedding
    worker = tl.program_id(1)
    if not ALONE:
        number = tl.load(FIRST + worker)
        stop = tl.load(FIRST + worker + 1)
        if worker >= tl.load(META + M_WORKERS):
            stop = number
            await_turn(EARLY)  # who does not wait would end before the kernels before it
        for i in range(number, stop):
            lane, row, lo, hi, length, part, parts, place = _record(ITEMS + i * ITEM_WORDS)
            _item(
                Q, KEYS, VALUES, OUT, PART, LSE, FINISHED, TABLES, NORM, ROPE, SCALES, R, M, first, q_stride, scale,
                eps, lane, row, lo, hi, length, part, parts, place, H, K, G, GP, D, BD, S, BN, SOFTCAP, WINDOW,
                PREFIX, GJ, JOIN, TURN, NORMED, PRECISION, FP8, AHEAD, ASM, EARLY,
            )  # fmt: skip
    else:
        lane, row, lo, hi, length, part, parts, place = _record(ITEMS + worker * ITEM_WORDS)
        if worker >= tl.load(META + M_ITEMS):  # asked only now: one wait instead of two
            await_turn(EARLY)
            return
        _item(
            Q, KEYS, VALUES, OUT, PART, LSE, FINISHED, TABLES, NORM, ROPE, SCALES, R, M, first, q_stride, scale, eps,
            lane, row, lo, hi, length, part, parts, place, H, K, G, GP, D, BD, S, BN, SOFTCAP, WINDOW, PREFIX, GJ,
            JOIN, TURN, NORMED, PRECISION, FP8, AHEAD, ASM, EARLY,
        )  # fmt: skip


@triton.jit
def _record(item):
    return (
        tl.load(item + I_LANE), tl.load(item + I_ROW), tl.load(item + I_FROM), tl.load(item + I_TO),
        tl.load(item + I_LENGTH), tl.load(item + I_PART), tl.load(item + I_PARTS), tl.load(item + I_PLACE),
    )  # fmt: skip


@triton.jit
def _item(
    Q, KEYS, VALUES, OUT, PART, LSE, FINISHED, TABLES, NORM, ROPE, SCALES, R, M, first, q_stride, scale, eps,
    lane, row, lo, hi, length, part, parts, place, H: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, PREFIX: tl.constexpr, GJ: tl.constexpr, JOIN: tl.constexpr, TURN: tl.constexpr,
    NORMED: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One item of the program's key/value head, and the row's result if it is the last."""
    head = tl.program_id(0)
    lane = lane.to(tl.int64)
    place = place.to(tl.int64)
    table = TABLES + row.to(tl.int64) * M
    if WINDOW > 0:
        lo = tl.maximum(lo, length - WINDOW)
    if AHEAD > 0:
        _ask_for_keys(KEYS, VALUES, table, lo, hi, head, K, D, S, BN, AHEAD)
    await_turn(EARLY)  # over at once but for a program's first item
    g = tl.arange(0, GP)
    d = tl.arange(0, BD)
    heads = head * G + g
    wanted = (g < G)[:, None] & (d < D)[None, :]
    if TURN:
        q = _turned_and_own(
            Q + lane * q_stride, NORM, ROPE, KEYS, VALUES, SCALES, table, length - 1, hi == length, head, eps, H, K,
            G, GP, D, BD, S, NORMED, FP8,
        )  # fmt: skip
    else:
        q = tl.load(Q + (lane * q_stride + heads * D)[:, None] + d[None, :], mask=wanted, other=0.0)
    if FP8:
        q = scaled_for(q, tl.load(SCALES + head))
    m, total, acc = _over_all(
        q, KEYS, VALUES, table, lo, hi, head, scale, K, GP, D, BD, S, BN, SOFTCAP, PRECISION, ASM
    )  # fmt: skip
    seen = total > 0.0  # an item behind the window sees nothing
    acc = acc / tl.where(seen, total, 1.0)[:, None] * (tl.load(SCALES + K + head) if FP8 else 1.0)
    if (parts == 1) & (PREFIX == 0):
        out = OUT + (lane * H + heads)[:, None] * D + d[None, :]
        tl.store(out, acc.to(OUT.dtype.element_ty), mask=wanted)
    else:
        at = (place + part) * H + heads
        tl.store(PART + at[:, None] * D + d[None, :], acc, mask=wanted)
        tl.store(LSE + at, tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), -float("inf")), mask=g < G)
        tl.debug_barrier()  # all of this program's results are out before it counts itself
        if tl.atomic_add(FINISHED + lane * K + head, 1, sem="acq_rel") == parts - 1:
            tl.store(FINISHED + lane * K + head, 0)
            _join(PART, LSE, OUT + lane * H * D, place, parts, first + lane, R, head, H, G, GJ, D, BD, PREFIX, JOIN)


@triton.jit
def _over_all(
    q, KEYS, VALUES, table, lo, hi, head, scale,
    K: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys lo..hi - 1: maximum, sum, and the sum of weighted values."""
    if KEYS.dtype.element_ty == tl.float8e4nv and q.dtype == tl.float16:
        m, total, acc = _over_pairs(q, KEYS, VALUES, table, lo, hi, head, scale, K, GP, D, BD, S, BN, SOFTCAP, ASM)
    else:
        m, total, acc = _over_keys(
            q, KEYS, VALUES, table, lo, hi, head, scale, K, GP, D, BD, S, BN, SOFTCAP, PRECISION
        )  # fmt: skip
    return m, total, acc


@triton.jit
def _over_keys(
    q, KEYS, VALUES, table, lo, hi, head, scale,
    K: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_over_all`, value by value."""
    d = tl.arange(0, BD)
    m = tl.full([GP], _NEG, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, BD], tl.float32)
    for n0 in range(lo, hi, BN):
        n = n0 + tl.arange(0, BN)
        ok = n < hi
        block = tl.load(table + n // S, mask=ok, other=0).to(tl.int64)
        at = (((block * K + head) * S + n % S) * D)[:, None] + d[None, :]
        inside = ok[:, None] & (d < D)[None, :]
        k = tl.load(KEYS + at, mask=inside, other=0.0)
        v = tl.load(VALUES + at, mask=inside, other=0.0)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        s = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, SOFTCAP)
        s = tl.where(ok[None, :], s, _NEG)
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(m - top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = top
    return m, total, acc


@triton.jit
def _over_pairs(
    q, KEYS, VALUES, table, lo, hi, head, scale,
    K: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`_over_keys` of an FP8 pool, whose bytes are read in pairs; q is float16."""
    KEYS = as_words(KEYS)
    VALUES = as_words(VALUES)
    even, odd = split_pairs(q)
    d = tl.arange(0, BD // 2)
    m = tl.full([GP], _NEG, tl.float32)
    total = tl.zeros([GP, BN], tl.float32)  # a sum for each place of a block, so that threads need not meet
    acc_even = tl.zeros([GP, BD // 2], tl.float32)
    acc_odd = tl.zeros([GP, BD // 2], tl.float32)
    for n0 in range(lo, hi, BN):
        n = n0 + tl.arange(0, BN)
        ok = n < hi
        block = tl.load(table + n // S, mask=ok, other=0).to(tl.int64)
        at = (((block * K + head) * S + n % S) * (D // 2))[:, None] + d[None, :]
        inside = ok[:, None] & (d < D // 2)[None, :]
        k_even, k_odd = pairs(tl.trans(tl.load(KEYS + at, mask=inside, other=0)), ASM)
        v_even, v_odd = pairs(tl.load(VALUES + at, mask=inside, other=0), ASM)
        s = capped(tl.dot(odd, k_odd, tl.dot(even, k_even)), scale, SOFTCAP)
        s = tl.where(ok[None, :], s, _NEG)
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(m - top)
        total = total * shrink[:, None] + p
        p = p.to(tl.float16)
        acc_even = tl.dot(p, v_even, acc_even * shrink[:, None])
        acc_odd = tl.dot(p, v_odd, acc_odd * shrink[:, None])
        m = top
    return m, tl.sum(total, 1), join_pairs(acc_even, acc_odd)


@triton.jit
def _ask_for_keys(
    KEYS, VALUES, table, lo, hi, head, K: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BN: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """The first BN keys and values of an item; what other kernels have still to write comes again when it is read."""
    step: tl.constexpr = LINE // (KEYS.dtype.element_ty.primitive_bitwidth // 8)
    n = tl.minimum(lo + tl.arange(0, BN), tl.maximum(hi - 1, lo))
    block = tl.load(table + n // S).to(tl.int64)
    d = tl.arange(0, LINES) * step
    at = (((block * K + head) * S + n % S) * D)[:, None] + tl.minimum(d, D - 1)[None, :]
    ask_for(KEYS + at)
    ask_for(VALUES + at)


@triton.jit
def _turned_and_own(
    X, NORM, ROPE, KEYS, VALUES, SCALES, table, position, writes, head, eps,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    S: tl.constexpr, NORMED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Queries of the row at X. If it `writes`, key and value of the row's own token go into the pool before they are
    read there; the key is turned as one more query."""
    g = tl.arange(0, GP)
    d = tl.arange(0, BD)
    ok = d < D
    angle = ROPE + position.to(tl.int64) * D
    v = tl.load(X + (H + K + head) * D + d, mask=ok, other=0.0)
    block = tl.load(table + position // S).to(tl.int64)
    h = tl.where(g < G, head * G + g, tl.where(g == G, H + head, -1))
    _, turned = turn(X, NORM, angle, h, h >= 0, eps, D, BD, NORMED)
    q = turned.to(X.dtype.element_ty)
    if writes:
        at = ((block * K + head) * S + position % S) * D + d
        tl.store(VALUES + at, in_fp8(v, tl.load(SCALES + K + head)) if FP8 else v, mask=ok)
        if G < GP:
            k = q
            own = g == G
        else:
            one = tl.arange(0, 1)
            own = one == 0
            k = turn(X, NORM, angle, H + head + one, own, eps, D, BD, NORMED)[1].to(X.dtype.element_ty)
        k = in_fp8(k, tl.load(SCALES + head)) if FP8 else k
        tl.store(KEYS + at[None, :] + own.to(tl.int64)[:, None] * 0, k, mask=own[:, None] & ok[None, :])
        tl.debug_barrier()
    return q


@triton.jit
def _join(
    PART, LSE, OUT, place, parts, prefix, R, head,
    H: tl.constexpr, G: tl.constexpr, GJ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PREFIX: tl.constexpr,
    JOIN: tl.constexpr,
):  # fmt: skip
    """The partial results of one row for the heads of one key/value head; JOIN of them at a time."""
    g = tl.arange(0, GJ)
    d = tl.arange(0, BD)
    wanted = (g < G)[:, None] & (d < D)[None, :]
    m = tl.full([GJ], _NEG, tl.float32)
    total = tl.zeros([GJ], tl.float32)
    acc = tl.zeros([GJ, BD], tl.float32)
    for i in range(0, parts + PREFIX, JOIN):
        u = i + tl.arange(0, JOIN)
        at = tl.where(u < parts, place + u, prefix + (u - parts) * R)[None, :] * H + head * G + g[:, None]
        ok = (u < parts + PREFIX)[None, :] & (g < G)[:, None]
        lse = tl.load(LSE + at, mask=ok, other=-float("inf"), cache_modifier=".cg")
        o = tl.load(
            PART + at[:, :, None] * D + d[None, None, :], mask=ok[:, :, None] & (d < D)[None, None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        top = tl.maximum(m, tl.max(lse, 1))
        weight = tl.exp2(lse - top[:, None])
        shrink = tl.exp2(m - top)
        acc = acc * shrink[:, None] + tl.sum(tl.where(weight > 0.0, weight, 0.0)[:, :, None] * o, 1)
        total = total * shrink + tl.sum(weight, 1)
        m = top
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(OUT + (head * G + g)[:, None] * D + d[None, :], acc.to(OUT.dtype.element_ty), mask=wanted)


def precision_of(q_THD: Tensor) -> str:
    """How `tl.dot` multiplies: exactly for float32; other types have one way only."""
    return "ieee" if q_THD.dtype == torch.float32 else "tf32"


def use_of(lanes: int) -> str:
    """Which launch `lanes` rows have where the pool has 2-byte elements and head dims are up to 128."""
    return "few" if lanes <= FEW_TOKENS else "half"


def kernel_of(lanes: int, cut: Cut) -> tuple[bool, ...]:
    """What of `lanes` rows chooses the compiled kernel; Triton has its own for 1 row and for multiples of 16."""
    return lanes == 1, lanes % 16 == 0, use_of(lanes) == "few", lanes > _FEW, cut.alone


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
    cut: Cut,
    prefix: bool,
    turning: Turning | None = None,
    scales_2K: Tensor | None = None,
) -> None:
    """Attention of the step's decode rows into `out_THD`, launched for `lanes` rows; `cut` is that of `step`.

    With `prefix`, the first `meta[M_PREFIX]` keys of all rows have been attended to by `prefix_attention`. With
    `turning`, `q_THD` is the qkv product as it is, and the kernel does the part of `norm_rotate_write` itself.
    `scales_2K`: those of an FP8 pool.
    """
    heads, dim = out_THD.shape[1:]
    kv_heads, block_size = keys_NKSD.shape[1:3]
    group, rows = heads // kv_heads, step.rows_CR.shape[1]
    width, padded = triton.next_power_of_2(dim), max(16, triton.next_power_of_2(group))
    single = q_THD.dtype == torch.float32
    if scales_2K is None:
        half = use_of(lanes)
    else:
        half = "fp8" if lanes <= _FEW else "many fp8"
    block, warps, stages = TUNED["float32" if single else "wide" if width > 128 else half]
    lines = triton.next_power_of_2(triton.cdiv(dim * keys_NKSD.element_size(), LINE.value))
    first, pdl = partials.o_UHD.shape[0] - partials.prefix_splits * rows, early(q_THD)
    turned = turning is not None
    joined = triton.next_power_of_2(group)
    options = {} if cut.alone else {"maxnreg": min(REGISTERS // (PROGRAMS.get(half, 4) * 32 * warps) // 8 * 8, 248)}
    _decode[(kv_heads, cut.workers + lanes if cut.alone else cut.workers)](
        q_THD, keys_NKSD, values_NKSD, out_THD, partials.o_UHD, partials.lse_UH, step.finished_RK, tables_SM,
        step.meta, step.items_I8, step.first_W, tables_SM if turning is None else turning.weight,
        tables_SM if turning is None else turning.rope_PD, tables_SM if scales_2K is None else scales_2K, rows,
        tables_SM.shape[1], first, q_THD.stride(0), scale * LOG2_E, 0.0 if turning is None else turning.eps, heads,
        kv_heads, group, padded, dim, width, block_size, block, softcap, window,
        partials.prefix_splits if prefix else 0, joined,
        max(1, min(4 if lanes > _FEW else 32, _JOINED // (joined * width))), turned,
        turning is not None and turning.norm is not None, precision_of(q_THD), scales_2K is not None,
        lines if pdl and lanes <= FEW_TOKENS else 0, cut.alone, not triton.knobs.runtime.interpret, pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl, **options,
    )  # fmt: skip
