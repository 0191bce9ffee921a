"""Between the qkv product and attention, in one pass: q/k norm, rotation, and the write into the KV pool.

Shape letters: T tokens, H query heads, K key/value heads, J = H + 2K, D head dim, P positions, N blocks, S tokens
in a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.fp8_pool import in_fp8
from octavo.kernels.gpu.launch import early, in_turn

_MANY = 1024  # tokens from which a program does more


@dataclass(frozen=True)
class Turning:
    """How queries and keys are made from the qkv product: RMS norm of each head or none, and rope_PD, which holds
    cosines, then sines, of each position. `norm` is (weight of each q and k head [H + K, D], eps)."""

    norm: tuple[Tensor, float] | None
    rope_PD: Tensor

    @property
    def weight(self) -> Tensor:
        """The norm's weight; any tensor where there is none."""
        return self.rope_PD if self.norm is None else self.norm[0]

    @property
    def eps(self) -> float:
        """The norm's eps."""
        return 0.0 if self.norm is None else self.norm[1]


@triton.jit
def turn(X, NORM, ANGLE, h, turned, eps, D: tl.constexpr, BD: tl.constexpr, NORMED: tl.constexpr):
    """(heads `h` of one token at X as they are, the same normed and rotated by the angles at ANGLE), float32.

    `turned`: which of them are queries or keys, so that there is a norm for them.
    """
    d = tl.arange(0, BD)
    half: tl.constexpr = D // 2
    partner = tl.where(d < half, d + half, d - half)
    ok = turned[:, None] & (d < D)[None, :]
    at = h[:, None] * D + d[None, :]
    own = tl.load(X + at, mask=(d < D)[None, :] & (h >= 0)[:, None], other=0.0).to(tl.float32)
    x = own
    y = tl.load(X + h[:, None] * D + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= inverse * tl.load(NORM + at, mask=ok, other=0.0).to(tl.float32)
        y *= inverse * tl.load(NORM + h[:, None] * D + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    cos = tl.load(ANGLE + d % half, mask=d < D, other=0.0).to(tl.float32)
    sin = tl.load(ANGLE + half + d % half, mask=d < D, other=0.0).to(tl.float32)
    sin = tl.where(d < half, -sin, sin)
    return own, x * cos[None, :] + y * sin[None, :]


@triton.jit
def _norm_rotate_write(
    QKV, NORM, ROPE, POSITION, SLOT, Q, KEYS, VALUES, SCALES, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, HB: tl.constexpr,
    NORMED: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
    t = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * HB + tl.arange(0, HB)
    exists = place < H + 2 * K
    h = tl.where(exists, place, -1)
    turned = exists & (h < H + K)
    d = tl.arange(0, BD)
    angle = ROPE + tl.load(POSITION + t).to(tl.int64) * D
    own, out = turn(QKV + t * (H + 2 * K) * D, NORM, angle, h, turned, eps, D, BD, NORMED)
    out = tl.where(turned[:, None], out, own).to(Q.dtype.element_ty)
    ok = exists[:, None] & (d < D)[None, :]
    tl.store(Q + (t * (H + K) + h)[:, None] * D + d[None, :], out, mask=ok & turned[:, None])
    slot = tl.load(SLOT + t).to(tl.int64)
    head = tl.where(turned, h - H, h - H - K)
    at = ((slot // S * K + head) * S + slot % S)[:, None] * D + d[None, :]
    kept = out
    if FP8:  # scales are those of keys, then those of values, as the heads here
        kept = in_fp8(out, tl.load(SCALES + h - H, mask=h >= H, other=1.0)[:, None])
    tl.store(KEYS + at, kept, mask=ok & ((h >= H) & turned)[:, None])
    tl.store(VALUES + at, kept, mask=ok & (h >= H + K)[:, None])


def norm_rotate_write(
    qkv_TJD: Tensor,
    turning: Turning,
    positions_T: Tensor,
    slots_T: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    scales_2K: Tensor | None = None,
) -> Tensor:
    """`reference.norm_rotate_write` on the qkv product as it is; rotated q and k side by side [T, H + K, D].

    `scales_2K`: those of the layer's keys and values in an FP8 pool (`KVPool.scales_L2K`).
    """
    tokens, heads, dim = qkv_TJD.shape
    kv_heads, block_size = keys_NKSD.shape[1:3]
    q_heads = heads - 2 * kv_heads
    qk_TJD = torch.empty((tokens, q_heads + kv_heads, dim), dtype=qkv_TJD.dtype, device=qkv_TJD.device)
    width = triton.next_power_of_2(dim)
    group = min(triton.next_power_of_2(heads), max(1, (1024 if tokens < _MANY else 8192) // width))
    _norm_rotate_write[(tokens, triton.cdiv(heads, group))](
        qkv_TJD, turning.weight, turning.rope_PD, positions_T, slots_T, qk_TJD, keys_NKSD, values_NKSD,
        qkv_TJD if scales_2K is None else scales_2K, turning.eps, q_heads, kv_heads, dim, width, block_size, group,
        turning.norm is not None, scales_2K is not None, early(qkv_TJD), num_warps=4, launch_pdl=early(qkv_TJD),
    )  # fmt: skip
    return qk_TJD
