"""Products of a few tokens with 4- and 8-bit weights: as in `octavo.kernels.gpu.quantized`, but nothing goes through
shared memory.

A program is one warp. A product may sum its inputs in any order, so words of the weight and values of the tokens are
loaded in the order in which a thread of the tensor cores' product has them: threads 4 r to 4 r + 3 hold row r, each
four words of sixteen. Scales and zeros are loaded by each thread for its own rows. Before a program waits for its
turn, it has its first words in registers and has asked for some of the others.

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.gpu.launch import ask_for, await_turn, let_in
from octavo.kernels.gpu.quantized import above, finished, sum_parts, widened


@triton.jit
def _in_order(x):
    """[rows, 16] in the order of the tensor cores' operands."""
    return tl.reshape(tl.permute(tl.reshape(x, [x.shape[0], 4, 2, 2]), (0, 2, 1, 3)), [x.shape[0], 16])


@triton.jit
def _words(WORDS, u, n, ok, rows, width, AT: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr):
    """Sixteen words from AT on of rows n in block u, of W words, of a matrix of `rows` rows of `width` words."""
    if KIND == "int4":
        at = (u * rows + n).to(tl.int64) * W
    else:
        at = n.to(tl.int64) * width + u * W
    at = (at + AT)[:, None] + tl.arange(0, 16)[None, :]
    if EVEN:
        p = tl.load(WORDS + at, eviction_policy="evict_first")
    else:
        p = tl.load(WORDS + at, mask=ok[:, None], other=0, eviction_policy="evict_first")
    return p


@triton.jit
def _facts(VALUES, u, n, ok, rows, blocks, NG: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Scales or zeros [n, 4, NG] of block u, the same for each of four threads."""
    if ROWS > 1:
        at = n // ROWS * blocks + u
    else:
        at = (u * rows + n) * NG
    at = at[:, None] + (tl.arange(0, 4 * NG) % NG)[None, :]
    if EVEN:
        x = tl.load(VALUES + at)
    else:
        x = tl.load(VALUES + at, mask=ok[:, None], other=0)
    return tl.reshape(x, [x.shape[0], 4, NG])


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
def _zeros(x, AT: tl.constexpr, NG: tl.constexpr):
    """Group AT of the facts x for words [n, 16]."""
    y = _pick(x, AT, NG)[:, None, :, None]
    return tl.reshape(tl.broadcast_to(y, [x.shape[0], 2, 4, 2]), [x.shape[0], 16])


@triton.jit
def _inputs(X, m, k, T, KI, EVEN: tl.constexpr):
    """Values k to k + 15 of the tokens, [16, m]."""
    w = tl.arange(0, 16)
    at = (m.to(tl.int64) * KI + k)[:, None] + w[None, :]
    ok = (m < T)[:, None]
    if EVEN:
        at = tl.max_contiguous(tl.multiple_of(at, [1, 4]), [1, 4])  # four for a thread, as of the words
    else:
        ok = ok & (k + w < KI)[None, :]
    x = tl.load(X + at, mask=ok, other=0.0)
    return tl.trans(_in_order(x))


@triton.jit
def _ask_for_words(WORDS, lo, hi, n, rows, width, W: tl.constexpr, KIND: tl.constexpr, AHEAD: tl.constexpr):
    """The first AHEAD blocks of lo to hi - 1 of rows n; a block of a row is no longer than a line of the cache."""
    u = tl.minimum(lo + tl.arange(0, AHEAD), hi - 1)[None, :]
    if KIND == "int4":
        at = (u * rows + n[:, None]).to(tl.int64) * W
    else:
        at = n.to(tl.int64)[:, None] * width + u * W
    ask_for(WORDS + at)


@triton.jit
def _multiply(
    p, q, acc, X, m, T, KI, u, scales, zeros,
    KIND: tl.constexpr, IMPLIED: tl.constexpr, SLICES: tl.constexpr, W: tl.constexpr, NG: tl.constexpr,
    ZEROED: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, RAW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add block u, the words p and, if there are 32, q, of the product; with RAW fields zeros come off the sums."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    LONG: tl.constexpr = SLICES // NG  # slices of a group
    MB: tl.constexpr = acc.shape[1]
    part = tl.zeros(acc.shape, tl.float32)
    total = tl.zeros([16, MB], tl.float32)
    for s in tl.static_range(SLICES):
        z = tl.full([acc.shape[0], 1], IMPLIED, tl.float32)
        if ZEROED and not RAW:
            z = _zeros(zeros, s // LONG, NG)
        for h in tl.static_range(W // 16):
            x = _inputs(X, m, (u * SLICES + s) * W + h * 16, T, KI, EVEN)
            if RAW:
                ones = tl.full([16, 16], 1.0, tl.float32).to(DTYPE)
                total = tl.dot(ones, x, total, input_precision=PRECISION)
            w = widened(_in_order(p if h == 0 else q), z, s, KIND, DTYPE, ASM, RAW)
            part = tl.dot(w, x, part, input_precision=PRECISION)
        if s % LONG == LONG - 1:
            if RAW:
                zero = _group(zeros, s // LONG, NG, MB) if ZEROED else tl.full(acc.shape, IMPLIED, tl.float32)
                part -= _repeat(total, acc.shape[0]) * (zero + above(DTYPE, ASM))
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
    PRECISION: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `octavo.kernels.gpu.quantized.products`; AHEAD: blocks that are asked for before its turn, or 0."""
    SLICES: tl.constexpr = 8 if KIND == "int4" else 4
    W: tl.constexpr = BK // SLICES
    LAST: tl.constexpr = W - 16
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
    p = _words(WORDS, lo, n, ok, rows, width, 0, W, KIND, EVEN)
    q = _words(WORDS, lo, n, ok, rows, width, LAST, W, KIND, EVEN)
    if AHEAD > 0 and EARLY and EVEN:
        _ask_for_words(WORDS, lo + 1, hi, n, rows, width, W, KIND, AHEAD)
    first = lo if NG > 0 else 0
    scales = _facts(SCALES, first, n, ok, rows, blocks, GROUPS, ROWS, EVEN)
    zeros = _facts(ZEROS, first, n, ok, rows, blocks, GROUPS, 1, EVEN) if ZEROED else scales
    acc = tl.zeros([BN, MB], tl.float32)
    await_turn(EARLY)
    for u in range(lo, hi):  # words and scales of the next block are on their way while this one is multiplied
        p_now = p
        q_now = q
        scales_now = scales
        zeros_now = zeros
        v = tl.minimum(u + 1, hi - 1)
        p = _words(WORDS, v, n, ok, rows, width, 0, W, KIND, EVEN)
        q = _words(WORDS, v, n, ok, rows, width, LAST, W, KIND, EVEN)
        if NG > 0:
            scales = _facts(SCALES, v, n, ok, rows, blocks, NG, ROWS, EVEN)
            zeros = _facts(ZEROS, v, n, ok, rows, blocks, NG, 1, EVEN) if ZEROED else zeros
        acc = _multiply(
            p_now, q_now, acc, X, m, T, KI, u, scales_now, zeros_now, KIND, IMPLIED, SLICES, W, GROUPS, ZEROED, EVEN,
            ASM, RAW, PRECISION,
        )  # fmt: skip
    last = SPLIT - 1
    if SPLIT > 1:
        acc, last = sum_parts(acc, PART, COUNT, m, T, BN, MB, SPLIT)
    if last == SPLIT - 1:
        finished(acc, BIAS, OUT, n, m, T, N, BN, MB, GATED, ADD, BIASED)
