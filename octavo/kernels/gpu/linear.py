"""Matrix products for a few tokens: the weight is streamed once, at the speed of memory, and what lies around it is
done in the same kernel: RMS norm of the input, bias, the gate of an MLP, the sum with the residual stream.

No tensor cores: there is one multiplication for each weight and token. Where kernels are launched early, a program
has its rows of the weight in registers before it waits for its turn, so that the memory is busy while the kernels
before it finish. On an H200 a product of one token of Qwen3-0.6B then takes 2.6 to 4.6 microseconds; the vendor's
library and the kernels around it take 6 to 13.

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cpu import Norm
from octavo.kernels.gpu.launch import await_turn, early, let_in

FEW_TOKENS = 4  # beyond this the vendor's library is faster, and from the second token on for ...
MOST_WEIGHTS = 8 << 20  # ... larger weights
# Bytes of weight that a program holds, the most inputs of a piece, warps; "deep": more than 2048 inputs, no gate.
TUNED = {"shallow": (16 << 10, 4096, 4), "deep": (64 << 10, 4096, 8)}


def few(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `multiply` is the fastest product of these."""
    tokens = x_TI.shape[0]
    fits = tokens <= FEW_TOKENS and (tokens == 1 or weight_OI.numel() <= MOST_WEIGHTS)
    return fits and x_TI.dtype in (torch.bfloat16, torch.float16)


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
    held, most, warps = tuned or TUNED["shallow" if gated or inputs <= 2048 else "deep"]
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
