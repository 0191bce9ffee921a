"""The oracle backend: paged attention row by row in plain torch. Any shape, dtype, device; slow.

Shape letters as in `octavo.attention.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.base import AttentionShape, Capabilities, KVPool, StepBatch
from octavo.kernels import reference

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Plan:
    query_lens: list[int]
    kv_lens: list[int]
    batch: StepBatch


class ReferenceAttention:
    """See `octavo.attention.base.AttentionBackend`; `run_with_lse` also returns the log-sum-exp."""

    capabilities = Capabilities(
        "reference",
        "any",
        _FLOATS,
        softcap=True,
        window=True,
        needs_host_lengths=False,
        graph_safe=False,
        fp8_kv=True,
    )

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._shape = shape

    def plan(self, batch: StepBatch, block_size: int) -> _Plan:
        """Bring the lengths to the host (this backend may: it is never captured)."""
        return _Plan(batch.starts_R1.diff().tolist(), batch.kv_lens_R.tolist(), batch)

    def run(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, pool: KVPool, plan: _Plan) -> Tensor:
        """Write k and v, attend; o_THD."""
        return self.run_with_lse(layer, q_THD, k_TKD, v_TKD, pool, plan)[0]

    def run_with_lse(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, pool: KVPool, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        """`run`, and lse_TH: natural log of the sum of exp(score) of each query and head."""
        shape = self._shape
        keys, values = pool.keys[layer], pool.values[layer]
        if pool.scales_L2K is None:
            reference.write_kv(keys, k_TKD, plan.batch.slots_T)
            reference.write_kv(values, v_TKD, plan.batch.slots_T)
        else:
            k_scale_K, v_scale_K = pool.scales_L2K[layer]
            reference.write_kv_fp8(keys, k_TKD, plan.batch.slots_T, k_scale_K)
            reference.write_kv_fp8(values, v_TKD, plan.batch.slots_T, v_scale_K)
            keys, values = reference.read_fp8(keys, k_scale_K), reference.read_fp8(values, v_scale_K)
        return reference.paged_attention(
            q_THD,
            keys,
            values,
            plan.batch.tables_RM,
            plan.query_lens,
            plan.kv_lens,
            shape.scale,
            shape.softcap,
            shape.window,
        )
