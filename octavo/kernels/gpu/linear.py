"""Matrix products for few tokens: the weight is streamed once, at the speed of memory, and what lies around it is
done in the same kernel: bias, the gate of an MLP, the sum with the residual stream.

`multiply` is for up to FEW_TOKENS. It needs no tensor cores, norms its input itself, and where kernels are launched
early a program has its rows of the weight in registers before it waits for its turn; so the memory is busy while the
kernels before it finish. `stream_linear` is for up to MOST_TOKENS and small weights. With SPLIT > 1 the inputs of an
output are shared out over several programs; the last of them to finish adds the parts in their order, so the result
does not depend on who is last.

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cpu import Norm
from octavo.kernels.gpu.launch import await_turn, early, in_turn, let_in

FEW_TOKENS = 4
MOST_TOKENS = 16  # beyond this the vendor's library is faster, and for ...
MOST_WEIGHTS = 8 << 20  # ... larger weights too
_MAX_SPLIT = 8
_COUNTERS = 4096


@dataclass(frozen=True)
class Launch:
    """Outputs and inputs of a tile, programs that share a tile of outputs, warps, stages."""

    outputs: int
    inputs: int
    split: int
    warps: int
    stages: int


TUNED = Launch(32, 128, 4, 4, 4)
TUNED_GATED = Launch(32, 256, 1, 4, 4)
# `multiply`: bytes of weight that a program holds, the most inputs of a piece, warps.
TUNED_FEW = (32 << 10, 4096, 4)


@triton.jit
def _rows(W, n, k, N, KI):
    """Some rows of the weight, in the order of memory."""
    at = n[:, None].to(tl.int64) * KI + k[None, :]
    return tl.load(W + at, mask=(n < N)[:, None] & (k < KI)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _multiply(
    X, W, NORM, BIAS, OUT, T, N, KI, eps,
    TB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PIECES: tl.constexpr, NORMED: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BN outputs of all tokens. The first piece of the weight does not wait for the kernels before this one."""
    let_in(EARLY)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    w = _rows(W, n, k, N, KI)
    u = w
    if GATED:
        u = _rows(W + N.to(tl.int64) * KI, n, k, N, KI)
    await_turn(EARLY)
    for t in tl.static_range(TB):
        seen = t < T
        acc = tl.zeros([BN], tl.float32)
        up = tl.zeros([BN], tl.float32)
        square = 0.0
        for piece in tl.static_range(PIECES):
            at = piece * BK + k
            a, b = w, u
            if piece > 0:
                a = _rows(W, n, at, N, KI)
                if GATED:
                    b = _rows(W + N.to(tl.int64) * KI, n, at, N, KI)
            x = tl.load(X + t * KI + at, mask=(at < KI) & seen, other=0.0).to(tl.float32)
            if NORMED:
                square += tl.sum(x * x, 0)
                x *= tl.load(NORM + at, mask=at < KI, other=0.0).to(tl.float32)
            acc += tl.sum(a.to(tl.float32) * x[None, :], 1)
            if GATED:
                up += tl.sum(b.to(tl.float32) * x[None, :], 1)
        if NORMED:
            inverse = tl.rsqrt(square / KI + eps)
            acc *= inverse
            up *= inverse
        if BIASED:
            acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)
            if GATED:
                up += tl.load(BIAS + N + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        ok = (n < N) & seen
        if ADD:
            acc += tl.load(OUT + t * N + n, mask=ok, other=0.0).to(tl.float32)
        tl.store(OUT + t * N + n, acc.to(OUT.dtype.element_ty), mask=ok)


def multiply(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    residual_TO: Tensor | None,
    gated: bool,
    norm: Norm | None,
    tuned: tuple[int, int, int] | None = None,
) -> Tensor:
    """norm(x) W^T + b for at most FEW_TOKENS tokens; added to `residual_TO` in place if there is one.

    `gated`: the rows of the weight are G, then U, and the result is silu(x G^T) * (x U^T).
    """
    tokens, inputs = x_TI.shape
    outputs = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
    held, most, warps = tuned or TUNED_FEW
    piece = min(most, triton.next_power_of_2(inputs))
    rows = max(1, held // (piece * weight_OI.element_size() * (2 if gated else 1)))
    out_TO = residual_TO
    if out_TO is None:
        out_TO = torch.empty((tokens, outputs), dtype=x_TI.dtype, device=x_TI.device)
    pdl = early(x_TI)
    _multiply[(triton.cdiv(outputs, rows),)](
        x_TI, weight_OI, weight_OI if norm is None else norm[0], x_TI if bias_O is None else bias_O, out_TO, tokens,
        outputs, inputs, 0.0 if norm is None else norm[1], triton.next_power_of_2(tokens), rows, piece,
        triton.cdiv(inputs, piece), norm is not None, gated, residual_TO is not None, bias_O is not None, pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_TO


@triton.jit
def _weights(W, n, k, N, KI, EVEN: tl.constexpr):
    at = n[None, :].to(tl.int64) * KI + k[:, None]
    if EVEN:
        w = tl.load(W + at, mask=(n < N)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        w = tl.load(W + at, mask=(n < N)[None, :] & (k < KI)[:, None], other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _sum_parts(acc, PART, COUNT, m, n, T, N, SPLIT: tl.constexpr):
    """Leave a part; the program that comes last gets the sum of all parts, the others a count below SPLIT - 1."""
    at = m[:, None] * N + n[None, :]
    ok = (m < T)[:, None] & (n < N)[None, :]
    tl.store(PART + tl.program_id(1) * T * N + at, acc, mask=ok)
    tl.debug_barrier()
    before = tl.atomic_add(COUNT + tl.program_id(0), 1, sem="acq_rel")
    if before == SPLIT - 1:
        acc = acc * 0.0
        for s in tl.static_range(SPLIT):
            acc += tl.load(PART + s * T * N + at, mask=ok, other=0.0, cache_modifier=".cg")
        tl.store(COUNT + tl.program_id(0), 0)
    return acc, before


@triton.jit(do_not_specialize=["T"])
def _stream(
    X, W, BIAS, OUT, PART, COUNT, T, N, KI,
    MB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, MB)
    per = tl.cdiv(tl.cdiv(KI, SPLIT), BK) * BK
    lo = tl.program_id(1) * per
    acc = tl.zeros([MB, BN], tl.float32)
    up = tl.zeros([MB, BN], tl.float32)
    for k0 in range(lo, tl.minimum(lo + per, KI), BK):
        k = k0 + tl.arange(0, BK)
        w = _weights(W, n, k, N, KI, EVEN)
        x = tl.load(X + m[:, None] * KI + k[None, :], mask=(m < T)[:, None] & (k < KI)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(x, _weights(W + N.to(tl.int64) * KI, n, k, N, KI, EVEN), up, input_precision=PRECISION)
    last = SPLIT - 1
    if SPLIT > 1:
        acc, last = _sum_parts(acc, PART, COUNT, m, n, T, N, SPLIT)
    if last == SPLIT - 1:
        if BIASED:
            acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(BIAS + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        at = m[:, None] * N + n[None, :]
        ok = (m < T)[:, None] & (n < N)[None, :]
        if ADD:
            acc += tl.load(OUT + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=ok)


class Scratch:
    """Parts and counters of the split products of one device; products run one after the other and share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self._parts = torch.empty(0, dtype=torch.float32, device=device)

    def reserve(self, outputs: int) -> None:
        """Room for products of up to so many outputs."""
        size = MOST_TOKENS * outputs * _MAX_SPLIT
        if len(self._parts) < size:
            self._parts = torch.empty(size, dtype=torch.float32, device=self._device)

    @property
    def parts(self) -> Tensor:
        """Where programs leave their parts."""
        return self._parts


def stream_linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    residual_TO: Tensor | None,
    gated: bool,
    scratch: Scratch,
    launch: Launch | None = None,
) -> Tensor:
    """x W^T + b for at most MOST_TOKENS tokens; added to `residual_TO` in place if there is one.

    `gated`: the rows of the weight are G, then U, and the result is silu(x G^T) * (x U^T); it is not split.
    """
    tokens, inputs = x_TI.shape
    outputs = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
    launch = launch or (TUNED_GATED if gated else TUNED)
    split = 1 if gated else min(launch.split, max(1, inputs // launch.inputs))
    out_TO = residual_TO
    if out_TO is None:
        out_TO = torch.empty((tokens, outputs), dtype=x_TI.dtype, device=x_TI.device)
    _stream[(triton.cdiv(outputs, launch.outputs), split)](
        x_TI, weight_OI, x_TI if bias_O is None else bias_O, out_TO, scratch.parts, scratch.counters, tokens, outputs,
        inputs, max(16, triton.next_power_of_2(tokens)), launch.outputs, launch.inputs, split,
        inputs % (launch.inputs * split) == 0, gated, residual_TO is not None, bias_O is not None,
        "ieee" if x_TI.dtype == torch.float32 else "tf32", early(x_TI), num_warps=launch.warps,
        num_stages=launch.stages, launch_pdl=early(x_TI),
    )  # fmt: skip
    return out_TO
