"""Plain torch oracles: one function per kernel, written to be read, right for any dtype and device.

Every faster implementation (CPU torch, Triton, native) is tested against these. Sums, norms and softmax
run in float32, or in float64 when the input is float64.

Shape letters: T tokens, H query heads, K key/value heads, J any number of heads, D head dim, N blocks in
the pool, S tokens in a block, R rows, M table columns, P parts, C copies, I features of a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.quant import FP8_MAX


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over values of `dtype` run in: float64 stays, all others use float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; the weight may also be [J, D] (Zhang, Sennrich 2019)."""
    wide = x_TI.to(accumulate_dtype(x_TI.dtype))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * weight_I).to(x_TI.dtype)


def add_rms_norm(x_TI: Tensor, residual_TI: Tensor, weight_I: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its RMS norm). The sum is rounded to the dtype before it is normed."""
    total = x_TI + residual_TI
    return total, rms_norm(total, weight_I, eps)


def rotate(x_TJD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary embedding in half-split order: element i pairs with i + D/2 (Su et al. 2021).

    `cos_TD` repeats its half, `sin_TD` is [-sin, sin], as `octavo.layers.rope.Rope` makes them.
    """
    half = x_TJD.shape[-1] // 2
    swapped = torch.cat((x_TJD[..., half:], x_TJD[..., :half]), dim=-1)
    return x_TJD * cos_TD[:, None] + swapped * sin_TD[:, None]


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(first half) * second half of the last dim."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """gelu(first half), by its tanh formula (Hendrycks, Gimpel 2016), * second half of the last dim."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def write_kv(pool_NKSD: Tensor, values_TKD: Tensor, slots_T: Tensor) -> None:
    """Store one vector per token and head at slot = block * S + offset, in place."""
    block_size = pool_NKSD.shape[2]
    pool_NKSD[slots_T // block_size, :, slots_T % block_size] = values_TKD


def to_fp8(values_TKD: Tensor, scale_K: Tensor) -> Tensor:
    """values / scale of their head in float8_e4m3fn, clamped to its range of +-448."""
    scaled = values_TKD.to(torch.float32) / scale_K[:, None]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def write_kv_fp8(pool_NKSD: Tensor, values_TKD: Tensor, slots_T: Tensor, scale_K: Tensor) -> None:
    """`write_kv` into an FP8 pool with one scale for each head."""
    write_kv(pool_NKSD.view(torch.uint8), to_fp8(values_TKD, scale_K).view(torch.uint8), slots_T)


def read_fp8(pool_NKSD: Tensor, scale_K: Tensor) -> Tensor:
    """What an FP8 pool stands for, in float32."""
    return pool_NKSD.to(torch.float32) * scale_K[:, None, None]


def norm_rotate_write(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos_TD: Tensor,
    sin_TD: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Between the qkv product and attention: optional q/k norm (weights, eps), rotation, write. Returns q."""
    if norms is not None:
        q_weight_D, k_weight_D, eps = norms
        q_THD, k_TKD = rms_norm(q_THD, q_weight_D, eps), rms_norm(k_TKD, k_weight_D, eps)
    write_kv(keys_NKSD, rotate(k_TKD, cos_TD, sin_TD), slots_T)
    write_kv(values_NKSD, v_TKD, slots_T)
    return rotate(q_THD, cos_TD, sin_TD)


def attend_row(
    q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, scale: float, softcap: float = 0.0, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Causal attention of one row: the last of T queries sees all U keys, the one before U - 1, and so on.

    Returns (o_THD, lse_TH); lse is the log of the sum of exp(score), natural, in the accumulation dtype. A
    query without any key gives zeros and lse -inf. With `window` W, a query sees itself and W - 1 before it.
    """
    wide = accumulate_dtype(q_THD.dtype)
    queries, keys, heads, kv_heads = q_THD.shape[0], k_UKD.shape[0], q_THD.shape[1], k_UKD.shape[1]
    k_UHD = k_UKD.to(wide).repeat_interleave(heads // kv_heads, dim=1)
    v_UHD = v_UKD.to(wide).repeat_interleave(heads // kv_heads, dim=1)
    scores_HTU = torch.einsum("thd,uhd->htu", q_THD.to(wide), k_UHD) * scale
    if softcap:
        scores_HTU = softcap * torch.tanh(scores_HTU / softcap)
    device = q_THD.device
    at_T1 = torch.arange(keys - queries, keys, device=device)[:, None]
    key_U = torch.arange(keys, device=device)
    hidden_TU = key_U > at_T1
    if window:
        hidden_TU = hidden_TU | (key_U <= at_T1 - window)
    scores_HTU = scores_HTU.masked_fill(hidden_TU, float("-inf"))
    lse_HT = torch.logsumexp(scores_HTU, dim=-1)
    weights_HTU = torch.exp(scores_HTU - lse_HT[..., None].nan_to_num(neginf=0.0))
    o_THD = torch.einsum("htu,uhd->thd", weights_HTU, v_UHD)
    return o_THD.to(q_THD.dtype), lse_HT.transpose(0, 1)


def paged_attention(
    q_THD: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    tables_RM: Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """`attend_row` for each row of a step, keys and values read through its block table."""
    outputs, sums, start = [], [], 0
    block_size = keys_NKSD.shape[2]
    for row, (queries, length) in enumerate(zip(query_lens, kv_lens, strict=True)):
        blocks = tables_RM[row, : -(-length // block_size)].long()
        k_UKD, v_UKD = (
            pool[blocks].transpose(1, 2).reshape(-1, *pool.shape[1::2])[:length] for pool in (keys_NKSD, values_NKSD)
        )
        o_THD, lse_TH = attend_row(q_THD[start : start + queries], k_UKD, v_UKD, scale, softcap, window)
        outputs.append(o_THD)
        sums.append(lse_TH)
        start += queries
    return torch.cat(outputs), torch.cat(sums)


def merge_by_lse(o_PTHD: Tensor, lse_PTH: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint key sets into attention over their union: (o_THD, lse_TH)."""
    lse_TH = torch.logsumexp(lse_PTH, dim=0)
    weights_PTH = torch.exp(lse_PTH - lse_TH.nan_to_num(neginf=0.0))
    o_THD = (o_PTHD.to(lse_PTH.dtype) * weights_PTH[..., None]).sum(0)
    return o_THD.to(o_PTHD.dtype), lse_TH


def copy_blocks(data_LPNKSD: Tensor, sources_C: Tensor, destinations_C: Tensor) -> None:
    """Copy blocks of all layers and both parts (keys, values) in place; all reads before all writes."""
    data_LPNKSD[:, :, destinations_C] = data_LPNKSD[:, :, sources_C].clone()
