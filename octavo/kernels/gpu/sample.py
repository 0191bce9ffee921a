"""Choosing tokens without sorting the vocabulary: greedy, temperature, top-k, top-p, min-p.

Defined by `octavo.runner.sampler`: Gumbel noise from Philox4x32-10 with counter (id // 4, position, child, tag)
and the seed as key; min-p, then top-k, then top-p; ties by the lower id. Noise is computed in float32 in a form
that keeps its relative precision at both ends, so it differs from the float64 definition by some 3e-7.

`thresholds` finds, for rows that filter, the smallest logit that stays: logits are compared as integers in their
order, and the threshold is built bit by bit from the top, each pass a count or a sum over the row (so 16 passes
for 2-byte logits). `choose` then draws in parallel over pieces of the vocabulary and joins the pieces.

Shape letters: N samples, V vocabulary, S device rows, P words of a parameter block, C pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from octavo.kernels.gpu.launch import early, in_turn
from octavo.kernels.gpu.step import M_SAMPLES, StepTables

_TAG = tl.constexpr(0x4F435456)
_TOP_K = tl.constexpr(3)  # words of a parameter block
_TEMPERATURE = tl.constexpr(4)
_TOP_P = tl.constexpr(5)
_MIN_P = tl.constexpr(6)
_SEED_LOW = tl.constexpr(7)
_SEED_HIGH = tl.constexpr(8)
_CHILD = tl.constexpr(9)
_PARAM_WORDS = tl.constexpr(16)
_INF = tl.constexpr(float("inf"))


@triton.jit
def _word(PARAMS, row, word: tl.constexpr):
    return tl.load(PARAMS + row * _PARAM_WORDS + word)


@triton.jit
def _number(PARAMS, row, word: tl.constexpr):
    return tl.load(PARAMS + row * _PARAM_WORDS + word).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, scale, inverse, SOFTCAP: tl.constexpr):
    """Logits as the head makes them from its product, times `inverse` (temperature)."""
    x *= scale
    if SOFTCAP > 0:
        e = tl.exp(x * (2.0 / SOFTCAP))
        x = SOFTCAP * (1.0 - 2.0 / (e + 1.0))
    return x * inverse


@triton.jit
def _minus_log1m(t):
    """-log(1 - t) for t in 0..0.5, relative error 1e-7: t times a polynomial fitted to the quotient."""
    p = 1.4065688848495483
    p = p * t - 1.6274398565292358
    p = p * t + 1.202765703201294
    p = p * t - 0.18062271177768707
    p = p * t + 0.2643258571624756
    p = p * t + 0.24346554279327393
    p = p * t + 0.3336602449417114
    p = p * t + 0.49999380111694336
    return t * (p * t + 1.0)


@triton.jit
def _gumbel(w, FAST: tl.constexpr):
    """-log(-log(u)) for u = (w + 0.5) / 2**32. The inner logarithm is taken near 1 through 1 - u, which is exact.

    FAST: the device's approximate logarithm, which is good to 2**-22 where it is used here.
    """
    upper = w >= 0x80000000
    small = tl.where(upper, 0xFFFFFFFF - w, w)  # below 2**31
    t = (small.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    if FAST:
        e = tl.where(upper, _minus_log1m(t), -libdevice.fast_logf(t))
        g = -libdevice.fast_logf(e)
    else:
        e = tl.where(upper, _minus_log1m(t), -tl.log(t))
        g = -tl.log(e)
    return g


@triton.jit
def _best_of_piece(
    ROW, CUTS, PARAMS, row, position, quad, V, scale, inverse, SOFTCAP: tl.constexpr, RANDOM: tl.constexpr,
    FILTERS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Best value and its id in each group of four, and whether a logit there is not a number or infinite."""
    if RANDOM:
        c0 = quad.to(tl.uint32, bitcast=True)
        c1 = position.to(tl.uint32, bitcast=True) + c0 * 0
        c2 = _word(PARAMS, row, _CHILD).to(tl.uint32, bitcast=True) + c0 * 0
        low = _word(PARAMS, row, _SEED_LOW).to(tl.uint32, bitcast=True)
        high = _word(PARAMS, row, _SEED_HIGH).to(tl.uint32, bitcast=True)
        words = tl.philox_impl(c0, c1, c2, c0 * 0 + _TAG, low, high)
    best = quad.to(tl.float32) * 0.0 - _INF
    where = quad * 0 + 0x7FFFFFFF
    bad = quad * 0
    for j in tl.static_range(4):
        v = 4 * quad + j
        raw = tl.load(ROW + v, mask=v < V, other=-_INF).to(tl.float32)
        bad |= ((raw != raw) | (raw == _INF)).to(tl.int32)
        x = _scaled(raw, scale, inverse, SOFTCAP)
        if FILTERS:
            tie = (raw == tl.load(CUTS)) & (v.to(tl.float32) <= tl.load(CUTS + 1))
            keep = ((raw > tl.load(CUTS)) | tie) & (x >= tl.load(CUTS + 2))
            x = tl.where(keep, x, -_INF)
        if RANDOM:
            x += _gumbel(words[j], FAST)
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, v, where)
    return best, where, bad


@triton.jit
def _choose(
    LOGITS, CUTS, PARAMS, SAMPLES, META, BEST, ID, BAD, R, V, scale,
    SOFTCAP: tl.constexpr, FILTERS: tl.constexpr, QUADS: tl.constexpr, FAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best token of one piece of the vocabulary: QUADS groups of four ids that share a Philox counter."""
    in_turn(EARLY)
    n = tl.program_id(0)
    if n >= tl.load(META + M_SAMPLES):
        return
    row = tl.load(SAMPLES + R + n)
    position = tl.load(SAMPLES + 2 * R + n)
    temperature = _number(PARAMS, row, _TEMPERATURE)
    quad = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    ROW = LOGITS + n.to(tl.int64) * V
    CUTS += 3 * n
    if temperature > 0:
        best, where, bad = _best_of_piece(
            ROW, CUTS, PARAMS, row, position, quad, V, scale, 1.0 / temperature, SOFTCAP, True, FILTERS, FAST
        )
    else:
        best, where, bad = _best_of_piece(
            ROW, CUTS, PARAMS, row, position, quad, V, scale, 1.0, SOFTCAP, False, FILTERS, FAST
        )
    top = tl.max(best, 0)
    at = n * tl.num_programs(1) + tl.program_id(1)
    tl.store(BEST + at, top)
    tl.store(ID + at, tl.min(tl.where(best == top, where, 0x7FFFFFFF), 0))
    tl.store(BAD + at, tl.max(bad, 0))


@triton.jit
def _finish(BEST, ID, BAD, SAMPLES, META, LAST, OUT, R, pieces, CP: tl.constexpr, EARLY: tl.constexpr):
    """Join the pieces; keep the token as the row's last, report it, or report -1 for logits that are not finite."""
    in_turn(EARLY)
    n = tl.program_id(0)
    if n >= tl.load(META + M_SAMPLES):
        return
    c = tl.arange(0, CP)
    ok = c < pieces
    best = tl.load(BEST + n * pieces + c, mask=ok, other=-_INF)
    ids = tl.load(ID + n * pieces + c, mask=ok, other=0x7FFFFFFF)
    bad = tl.max(tl.load(BAD + n * pieces + c, mask=ok, other=0), 0)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, ids, 0x7FFFFFFF), 0)
    broken = (bad > 0) | (token == 0x7FFFFFFF)
    tl.store(LAST + tl.load(SAMPLES + R + n), tl.where(broken, 0, token).to(tl.int64))
    tl.store(OUT + n, tl.where(broken, -1, token))


@triton.jit
def _key(x, BITS: tl.constexpr):
    """Values of a 2- or 4-byte float type as unsigned numbers in the same order; both zeros are one number."""
    x = tl.where(x == 0.0, 0.0, x).to(x.dtype)
    if BITS == 16:
        b = x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        key = tl.where(b >= 0x8000, 0xFFFF - b, b + 0x8000).to(tl.uint32, bitcast=True)
    else:
        b = x.to(tl.uint32, bitcast=True)
        key = tl.where(b >= 0x80000000, 0xFFFFFFFF - b, b + 0x80000000)
    return key


@triton.jit
def _value(key, like, BITS: tl.constexpr):
    """The value that `_key` turned into `key`, as float32; `like` has its type."""
    if BITS == 16:
        b = tl.where(key >= 0x8000, key - 0x8000, 0xFFFF - key).to(tl.int32, bitcast=True)
        value = b.to(tl.int16).to(like.dtype, bitcast=True).to(tl.float32)
    else:
        value = tl.where(key >= 0x80000000, key - 0x80000000, 0xFFFFFFFF - key).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _weights(ROW, v, V, scale, inverse, top, floor, SOFTCAP: tl.constexpr, BITS: tl.constexpr):
    """Key and softmax weight (over the best) of some ids; both are 0 where min-p or the vocabulary ends them."""
    raw = tl.load(ROW + v, mask=v < V, other=-_INF)
    x = _scaled(raw.to(tl.float32), scale, inverse, SOFTCAP)
    ok = (x >= floor) & (x > -_INF)
    return tl.where(ok, _key(raw, BITS), 0), tl.where(ok, tl.exp(x - top), 0.0)


@triton.jit
def _totals(
    ROW, V, scale, inverse, top, floor, above, key, SOFTCAP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Of the ids whose key is over `above`: number and weight of keys over `key`, then of those equal to it."""
    count = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    level = tl.zeros([BLOCK], tl.float32)
    for i in range(0, V, BLOCK):
        k, w = _weights(ROW, i + tl.arange(0, BLOCK), V, scale, inverse, top, floor, SOFTCAP, BITS)
        over = k > key
        same = (k == key) & (k > 0)
        count += over.to(tl.int32)
        equal += same.to(tl.int32)
        mass += tl.where(over, w, 0.0)
        level = tl.maximum(level, tl.where(same, w, 0.0))
    return tl.sum(count, 0), tl.sum(equal, 0), tl.sum(mass, 0), tl.max(level, 0)


@triton.jit
def _threshold(
    ROW, V, scale, inverse, top, floor, least, ties, want, MASS: tl.constexpr, SOFTCAP: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key such that the ids at or over it are `want` in number, or in weight with MASS.

    Two bits a pass. With MASS only ids over `least` count, and those at `least` together weigh `ties`.
    """
    found = tl.full([], 0, tl.uint32)
    bit = tl.full([], 1 << (BITS - 2), tl.uint32)
    for _ in range(BITS // 2):
        one, two, three = found + bit, found + 2 * bit, found + 3 * bit
        a = tl.zeros([BLOCK], tl.float32)
        b = tl.zeros([BLOCK], tl.float32)
        c = tl.zeros([BLOCK], tl.float32)
        for i in range(0, V, BLOCK):
            k, w = _weights(ROW, i + tl.arange(0, BLOCK), V, scale, inverse, top, floor, SOFTCAP, BITS)
            if MASS:
                w = tl.where(k > least, w, 0.0)
            else:
                w = tl.where(k > 0, 1.0, 0.0)
            a += tl.where(k >= one, w, 0.0)
            b += tl.where(k >= two, w, 0.0)
            c += tl.where(k >= three, w, 0.0)
        a_sum = tl.sum(a, 0) + tl.where(one <= least, ties, 0.0)
        b_sum = tl.sum(b, 0) + tl.where(two <= least, ties, 0.0)
        c_sum = tl.sum(c, 0) + tl.where(three <= least, ties, 0.0)
        found = tl.where(c_sum >= want, three, tl.where(b_sum >= want, two, tl.where(a_sum >= want, one, found)))
        bit = bit >> 2
    return found


@triton.jit
def _last_tie(ROW, V, key, ties, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the `ties`-th id whose key equals `key`."""
    seen = 0
    found = 0
    for i in range(0, V, BLOCK):
        v = i + tl.arange(0, BLOCK)
        raw = tl.load(ROW + v, mask=v < V, other=-_INF)
        same = ((_key(raw, BITS) == key) & (v < V)).to(tl.int32)
        place = seen + tl.cumsum(same, 0)
        found += tl.sum(tl.where((same == 1) & (place == ties), v, 0), 0)
        seen += tl.sum(same, 0)
    return found


@triton.jit
def _thresholds(
    LOGITS, CUTS, PARAMS, SAMPLES, META, R, V, scale, SOFTCAP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """CUTS of one sample: the smallest logit that stays, the last id that stays at it, and the floor of min-p."""
    n = tl.program_id(0)
    if n >= tl.load(META + M_SAMPLES):
        return
    row = tl.load(SAMPLES + R + n)
    temperature = _number(PARAMS, row, _TEMPERATURE)
    top_k, top_p, min_p = _word(PARAMS, row, _TOP_K), _number(PARAMS, row, _TOP_P), _number(PARAMS, row, _MIN_P)
    tl.store(CUTS + 3 * n, -_INF)
    tl.store(CUTS + 3 * n + 1, V.to(tl.float32))
    tl.store(CUTS + 3 * n + 2, -_INF)
    if (temperature <= 0) | ((top_k <= 0) & (top_p >= 1) & (min_p <= 0)):
        return
    ROW = LOGITS + n.to(tl.int64) * V
    inverse = 1.0 / temperature
    best = tl.full([BLOCK], -_INF, tl.float32)
    for i in range(0, V, BLOCK):
        v = i + tl.arange(0, BLOCK)
        x = tl.load(ROW + v, mask=v < V, other=-_INF).to(tl.float32)
        best = tl.maximum(best, tl.where(x == x, x, -_INF))
    top = _scaled(tl.max(best, 0), scale, inverse, SOFTCAP)
    floor = tl.where(min_p > 0, top + tl.log(tl.maximum(min_p, 1e-37)), -_INF)
    zero = tl.full([], 0, tl.uint32)
    key = zero
    stay = V
    if (top_k > 0) & (top_k < V):
        key = _threshold(
            ROW, V, scale, inverse, top, floor, zero, 0.0, top_k.to(tl.float32), False, SOFTCAP, BITS, BLOCK
        )
        over, equal, _, _ = _totals(ROW, V, scale, inverse, top, floor, zero, key, SOFTCAP, BITS, BLOCK)
        stay = tl.minimum(top_k - over, equal)
    if top_p < 1:
        over, equal, mass, level = _totals(ROW, V, scale, inverse, top, floor, zero, key, SOFTCAP, BITS, BLOCK)
        ties = tl.minimum(stay, equal).to(tl.float32) * level
        want = top_p * (mass + ties)
        first = key
        key = _threshold(ROW, V, scale, inverse, top, floor, first, ties, want, True, SOFTCAP, BITS, BLOCK)
        key = tl.where(key < first, first, key)
        over, equal, mass, level = _totals(ROW, V, scale, inverse, top, floor, zero, key, SOFTCAP, BITS, BLOCK)
        most = tl.where(key == first, tl.minimum(stay, equal), equal)
        part = tl.ceil((want - mass) / tl.maximum(level, 1e-37))
        stay = tl.minimum(tl.maximum(part, 1.0), most.to(tl.float32)).to(tl.int32)
    over, equal, _, _ = _totals(ROW, V, scale, inverse, top, floor, zero, key, SOFTCAP, BITS, BLOCK)
    if key > 0:
        tl.store(CUTS + 3 * n, _value(key, tl.load(ROW), BITS))
        if stay < equal:
            tl.store(CUTS + 3 * n + 1, _last_tie(ROW, V, key, stay, BITS, BLOCK).to(tl.float32))
    tl.store(CUTS + 3 * n + 2, floor)


def sample(
    logits_NV: Tensor,
    step: StepTables,
    params_SP: Tensor,
    last_token_S: Tensor,
    out_N: Tensor,
    scale: float,
    softcap: float,
    filters: bool,
) -> None:
    """Choose the token of each sample of the step from the head's product (its `scale` and `softcap` still to do).

    Writes the tokens to `out_N` (int32, -1 for logits that are not finite) and to the rows' `last_token_S`.
    `filters`: some row with a temperature uses top-k, top-p or min-p. Launched for as many samples as `logits_NV` has
    rows.
    """
    count, vocab = logits_NV.shape
    device, rows = logits_NV.device, step.rows_CR.shape[1]
    quads = 256 if count <= 32 else 1024
    pieces = triton.cdiv(vocab, 4 * quads)
    best_NC = torch.empty((count, pieces), dtype=torch.float32, device=device)
    id_NC = torch.empty((count, pieces), dtype=torch.int32, device=device)
    bad_NC = torch.empty((count, pieces), dtype=torch.int32, device=device)
    cuts_N3 = torch.empty((count, 3) if filters else 1, dtype=torch.float32, device=device)
    if filters:
        bits = 8 * logits_NV.dtype.itemsize
        block = min(8192, triton.next_power_of_2(vocab))
        _thresholds[(count,)](
            logits_NV, cuts_N3, params_SP, step.samples_3R, step.meta, rows, vocab, scale, softcap, bits, block,
            num_warps=16,
        )  # fmt: skip
    _choose[(count, pieces)](
        logits_NV, cuts_N3, params_SP, step.samples_3R, step.meta, best_NC, id_NC, bad_NC, rows, vocab, scale,
        softcap, filters, quads, not triton.knobs.runtime.interpret, early(logits_NV), num_warps=4,
        launch_pdl=early(logits_NV),
    )  # fmt: skip
    _finish[(count,)](
        best_NC, id_NC, bad_NC, step.samples_3R, step.meta, last_token_S, out_N, rows, pieces,
        triton.next_power_of_2(pieces), early(logits_NV), num_warps=4, launch_pdl=early(logits_NV),
    )  # fmt: skip
