"""Products of a few tokens with 4- and 8-bit weights: as in `octavo.kernels.gpu.quantized`, but nothing goes through
shared memory.

A program is one warp. A product may sum its inputs in any order, so words of the weight and values of the tokens are
loaded in the order in which a thread of the tensor cores' product has them: threads 4 r to 4 r + 3 hold row r, each
four words of sixteen. Scales and zeros are loaded by each thread for its own rows. Before a program waits for its
turn, it has its first words in registers and has asked for the others.

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.gpu.launch import ask_for, await_turn, let_in
from octavo.kernels.gpu.quantized import above, finished, sum_parts, widened


@triton.jit
def _in_order(x):
    """[H, rows, 16] -> [rows, 16 H] in the order of the tensor cores' operands."""
    x = tl.reshape(x, [x.shape[0], x.shape[1], 4, 2, 2])
    return tl.reshape(tl.permute(x, (1, 0, 3, 2, 4)), [x.shape[1], 16 * x.shape[0]])


@triton.jit
def _words(WORDS, u, n, ok, rows, width, H: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr):
    """Words of rows n in block u of a matrix of `rows` rows of `width` words."""
    if KIND == "int4":
        at = (u * rows + n).to(tl.int64) * (16 * H)
    else:
        at = n.to(tl.int64) * width + u * (16 * H)
    at = at[None, :, None] + tl.arange(0, H)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    if EVEN:
        p = tl.load(WORDS + at, eviction_policy="evict_first")
    else:
        p = tl.load(WORDS + at, mask=ok[None, :, None], other=0, eviction_policy="evict_first")
    return p


@triton.jit
def _facts(VALUES, u, n, ok, rows, blocks, NG: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Scales or zeros [n, 4, NG] of block u, the same for each of four threads."""
    if ROWS > 1:
        at = n // ROWS * blocks + u
    else:
        at = (u * rows + n) * NG
    at = at[:, None, None] + tl.arange(0, 4)[None, :, None] * 0 + tl.arange(0, NG)[None, None, :]
    if EVEN:
        x = tl.load(VALUES + at)
    else:
        x = tl.load(VALUES + at, mask=ok[:, None, None], other=0)
    return x


@triton.jit
def _pick(x, AT: tl.constexpr, NG: tl.constexpr):
    """Group AT of x [n, 4, NG], [n, 4] in float32."""
    if NG == 4:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 4, 2, 2]))
        low, high = tl.split(even if AT % 2 == 0 else odd)
        y = low if AT < 2 else high
    elif NG == 2:
        low, high = tl.split(x)
        y = low if AT == 0 else high
    else:
        y = tl.reshape(x, [x.shape[0], 4])
    return y.to(tl.float32)


@triton.jit
def _group(x, AT: tl.constexpr, NG: tl.constexpr, MB: tl.constexpr):
    """Group AT of the facts x for sums [n, MB]."""
    y = _pick(x, AT, NG)[:, None, :, None]
    return tl.reshape(tl.broadcast_to(y, [x.shape[0], MB // 8, 4, 2]), [x.shape[0], MB])


@triton.jit
def _zeros(x, AT: tl.constexpr, NG: tl.constexpr, H: tl.constexpr):
    """Group AT of the facts x for words [n, 16 H]."""
    y = _pick(x, AT, NG)[:, None, :, None]
    return tl.reshape(tl.broadcast_to(y, [x.shape[0], 2 * H, 4, 2]), [x.shape[0], 16 * H])


@triton.jit
def _inputs(X, m, k, T, KI, H: tl.constexpr, EVEN: tl.constexpr):
    """Values k to k + 16 H of the tokens, [16 H, m]."""
    w = tl.arange(0, H)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    at = m.to(tl.int64)[None, :, None] * KI + k + w
    at = tl.max_contiguous(tl.multiple_of(at, [1, 1, 4]), [1, 1, 4])
    ok = (m < T)[None, :, None]
    x = tl.load(X + at, mask=ok & (EVEN or (k + w < KI)), other=0.0)
    return tl.trans(_in_order(x))


@triton.jit
def _ask_for_words(WORDS, lo, hi, n, rows, width, W: tl.constexpr, KIND: tl.constexpr, AHEAD: tl.constexpr):
    """Blocks lo to hi - 1 of rows n, AHEAD at a time; no block of a row is longer than a line of the cache."""
    for a in range(lo, hi, AHEAD):
        v = tl.minimum(a + tl.arange(0, AHEAD), hi - 1)[None, :]
        if KIND == "int4":
            at = (v * rows + n[:, None]).to(tl.int64) * W
        else:
            at = n.to(tl.int64)[:, None] * width + v * W
        ask_for(WORDS + at)


@triton.jit
def _multiply(
    words, acc, X, m, T, KI, u, scales, zeros,
    KIND: tl.constexpr, IMPLIED: tl.constexpr, SLICES: tl.constexpr, H: tl.constexpr, NG: tl.constexpr,
    ZEROED: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, RAW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add block u of the product; with RAW fields the zeros come off the sums."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    LONG: tl.constexpr = SLICES // NG  # slices of a group
    MB: tl.constexpr = acc.shape[1]
    part = tl.zeros(acc.shape, tl.float32)
    total = tl.zeros([16, MB], tl.float32)
    for s in tl.static_range(SLICES):
        x = _inputs(X, m, (u * SLICES + s) * (16 * H), T, KI, H, EVEN)
        if RAW:
            ones = tl.full([16, 16 * H], 1.0, tl.float32).to(DTYPE)
            total = tl.dot(ones, x, total, input_precision=PRECISION)
            w = widened(words, 0.0, s, KIND, DTYPE, ASM, True)
        else:
            z = _zeros(zeros, s // LONG, NG, H) if ZEROED else tl.full([acc.shape[0], 1], IMPLIED, tl.float32)
            w = widened(words, z, s, KIND, DTYPE, ASM, False)
        part = tl.dot(w, x, part, input_precision=PRECISION)
        if s % LONG == LONG - 1:
            if RAW:
                z = _group(zeros, s // LONG, NG, MB) if ZEROED else tl.full(acc.shape, IMPLIED, tl.float32)
                part -= _repeat(total, acc.shape[0]) * (z + above(DTYPE, ASM))
                total = tl.zeros([16, MB], tl.float32)
            acc += part * _group(scales, s // LONG, NG, MB)
            part = tl.zeros(acc.shape, tl.float32)
    return acc


@triton.jit
def _repeat(total, BN: tl.constexpr):
    """Sixteen equal rows as BN of them."""
    if BN == 16:
        return total
    x = tl.broadcast_to(total[None, :, :], [BN // 16, 16, total.shape[1]])
    return tl.reshape(x, [BN, total.shape[1]])


@triton.jit(do_not_specialize=["T"])
def few_products(
    X, WORDS, SCALES, ZEROS, BIAS, OUT, PART, COUNT, T, N, KI, width, blocks, per,
    KIND: tl.constexpr, IMPLIED: tl.constexpr, MB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NG: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, ZEROED: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr, RAW: tl.constexpr,
    PRECISION: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `octavo.kernels.gpu.quantized.products`. DEPTH: blocks in registers before they are multiplied, 1 or 2;
    AHEAD: blocks that are asked for at a time before the program's turn, or 0."""
    SLICES: tl.constexpr = 8 if KIND == "int4" else 4
    H: tl.constexpr = BK // SLICES // 16
    GROUPS: tl.constexpr = NG if NG > 0 else 1
    let_in(EARLY)
    r = tl.arange(0, BN)
    m = tl.program_id(2) * MB + tl.arange(0, MB)
    rows = N
    n = tl.program_id(0) * BN + r
    ok = n < N
    if GATED:  # a tile is half gate, half up
        rows = N * 2
        n = tl.program_id(0) * (BN // 2) + r % (BN // 2)
        ok = n < N
        n += r // (BN // 2) * N
    lo = tl.program_id(1) * per
    hi = tl.minimum(lo + per, blocks)
    p = _words(WORDS, lo, n, ok, rows, width, H, KIND, EVEN)
    p2 = _words(WORDS, tl.minimum(lo + 1, hi - 1), n, ok, rows, width, H, KIND, EVEN) if DEPTH > 1 else p
    if AHEAD > 0 and EARLY and EVEN:
        _ask_for_words(WORDS, lo + DEPTH, hi, n, rows, width, 16 * H, KIND, AHEAD)
    first = lo if NG > 0 else 0
    scales = _facts(SCALES, first, n, ok, rows, blocks, GROUPS, ROWS, EVEN)
    zeros = _facts(ZEROS, first, n, ok, rows, blocks, GROUPS, 1, EVEN) if ZEROED else scales
    acc = tl.zeros([BN, MB], tl.float32)
    await_turn(EARLY)
    for u in range(lo, hi):  # words and scales of the next block are on their way while this one is multiplied
        words = _in_order(p)
        scales_now = scales
        zeros_now = zeros
        p = p2
        p2 = _words(WORDS, tl.minimum(u + DEPTH, hi - 1), n, ok, rows, width, H, KIND, EVEN)
        if DEPTH == 1:
            p = p2
        if NG > 0:
            v = tl.minimum(u + 1, hi - 1)
            scales = _facts(SCALES, v, n, ok, rows, blocks, NG, ROWS, EVEN)
            zeros = _facts(ZEROS, v, n, ok, rows, blocks, NG, 1, EVEN) if ZEROED else zeros
        acc = _multiply(
            words, acc, X, m, T, KI, u, scales_now, zeros_now, KIND, IMPLIED, SLICES, H, GROUPS, ZEROED, EVEN, ASM,
            RAW, PRECISION,
        )  # fmt: skip
    last = SPLIT - 1
    if SPLIT > 1:
        acc, last = sum_parts(acc, PART, COUNT, m, T, BN, MB, SPLIT)
    if last == SPLIT - 1:
        finished(acc, BIAS, OUT, n, m, T, N, BN, MB, GATED, ADD, BIASED)
