"""Between the qkv product and attention, in one pass: q/k norm, rotation, and the write into the KV pool.

Shape letters: T tokens, H query heads, K key/value heads, J = H + 2K, D head dim, P positions, N blocks, S tokens
in a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import early, in_turn

_MANY = 1024  # tokens from which a program does more


@triton.jit
def _norm_rotate_write(
    QKV, NORM, ROPE, POSITION, SLOT, Q, KEYS, VALUES, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, HB: tl.constexpr,
    NORMED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    d = tl.arange(0, BD)
    half: tl.constexpr = D // 2
    partner = tl.where(d < half, d + half, d - half)
    turned = h < H + K
    ok = (h < H + 2 * K)[:, None] & (d < D)[None, :]
    row = QKV + t * (H + 2 * K) * D + h[:, None] * D
    own = tl.load(row + d[None, :], mask=ok, other=0.0).to(tl.float32)
    x = own
    y = tl.load(row + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        known = ok & turned[:, None]
        x *= inverse * tl.load(NORM + h[:, None] * D + d[None, :], mask=known, other=0.0).to(tl.float32)
        y *= inverse * tl.load(NORM + h[:, None] * D + partner[None, :], mask=known, other=0.0).to(tl.float32)
    angle = ROPE + tl.load(POSITION + t).to(tl.int64) * D + d % half
    cos = tl.load(angle, mask=d < D, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=d < D, other=0.0).to(tl.float32)
    sin = tl.where(d < half, -sin, sin)
    out = tl.where(turned[:, None], x * cos[None, :] + y * sin[None, :], own).to(Q.dtype.element_ty)
    tl.store(Q + (t * (H + K) + h)[:, None] * D + d[None, :], out, mask=ok & turned[:, None])
    slot = tl.load(SLOT + t).to(tl.int64)
    head = tl.where(turned, h - H, h - H - K)
    place = ((slot // S * K + head) * S + slot % S)[:, None] * D + d[None, :]
    tl.store(KEYS + place, out, mask=ok & ((h >= H) & turned)[:, None])
    tl.store(VALUES + place, out, mask=ok & (h >= H + K)[:, None])


def norm_rotate_write(
    qkv_TJD: Tensor,
    norm: tuple[Tensor, float] | None,
    rope_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
) -> Tensor:
    """`reference.norm_rotate_write` on the qkv product as it is; returns rotated q and k side by side [T, H + K, D].

    `norm` is (weight of each q and k head [H + K, D], eps). `rope_PD` holds cosines, then sines, of each position.
    """
    tokens, heads, dim = qkv_TJD.shape
    kv_heads, block_size = keys_NKSD.shape[1:3]
    q_heads = heads - 2 * kv_heads
    qk_TJD = torch.empty((tokens, q_heads + kv_heads, dim), dtype=qkv_TJD.dtype, device=qkv_TJD.device)
    width = triton.next_power_of_2(dim)
    group = min(triton.next_power_of_2(heads), max(1, (1024 if tokens < _MANY else 4096) // width))
    _norm_rotate_write[(tokens, triton.cdiv(heads, group))](
        qkv_TJD, qkv_TJD if norm is None else norm[0], rope_PD, positions_T, slots_T, qk_TJD, keys_NKSD, values_NKSD,
        0.0 if norm is None else norm[1], q_heads, kv_heads, dim, width, block_size, group, norm is not None,
        early(qkv_TJD), num_warps=4, launch_pdl=early(qkv_TJD),
    )  # fmt: skip
    return qk_TJD
