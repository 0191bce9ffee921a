"""The attention backend for CUDA: Triton kernels that read lengths, tables and work lists from device memory.

Two ways in. The runner calls `run_qkv` with the `StepTables` that its own step kernels have filled, which a captured
graph can do. `plan` and `run` are the plain protocol: the tables are made from a `StepBatch`, every row counts as
host-fed, and nothing is captured.

Shape letters: T tokens, R rows, J = H + 2K heads, D head dim, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.base import AttentionShape, Capabilities, KVPool, StepBatch
from octavo.kernels import reference
from octavo.kernels.gpu.decode import PROGRAMS, Partials, decode_attention, use_of
from octavo.kernels.gpu.prefill import can_read_own, prefill_attention, prefix_attention, tile_tokens
from octavo.kernels.gpu.rope import Turning, norm_rotate_write
from octavo.kernels.gpu.step import C_TOKENS, Cut, StepTables

KEY_BLOCK = 64  # keys of decode rows are shared out in blocks of so many
MANY_ROWS = 64  # decode rows from which most are one item where rows are cut by themselves
PREFIX_SPLITS = 4


def cut_for(shape: AttentionShape, dtype: torch.dtype, lanes: int, processors: int, fp8: bool = False) -> Cut:
    """How to cut the attention work of `lanes` rows for a device with so many multiprocessors.

    With few rows each is easily cut evenly by itself; more are shared out evenly. `fp8`: the pool is in FP8.
    """
    tile = tile_tokens(shape.heads // shape.kv_heads, shape.head_dim, dtype)
    plain = dtype != torch.float32 and shape.head_dim <= 128 and not fp8
    workers = max(1, processors * (PROGRAMS[use_of(lanes)] if plain else 4) // shape.kv_heads)  # all at a time
    if plain:
        return Cut(workers, KEY_BLOCK, tile, alone=3 * lanes <= workers)
    return Cut(max(workers, lanes if lanes >= MANY_ROWS else 2 * lanes), KEY_BLOCK, tile, alone=True)


def partials_for(shape: AttentionShape, items: int, rows: int, device: torch.device) -> Partials:
    """Room for the partial results of steps of up to `items` decode items and `rows` decode rows."""
    return Partials.empty(items, rows, PREFIX_SPLITS, shape.heads, shape.head_dim, device)


def scales(pool: KVPool, layer: int) -> Tensor | None:
    """scales_2K of the keys and values of a layer in an FP8 pool."""
    return None if pool.scales_L2K is None else pool.scales_L2K[layer]


@dataclass(frozen=True)
class Sizes:
    """What one launch is made for: `tokens`, `lanes` rows, the `cut` of decode rows (None: there are none), `tiles`
    query tiles (0: no host-fed rows), and whether the decode rows share a prefix."""

    tokens: int
    lanes: int
    cut: Cut | None
    tiles: int
    prefix: bool = False


@dataclass(frozen=True)
class TritonPlan:
    """A step as the kernels see it."""

    sizes: Sizes
    step: StepTables
    tables_SM: Tensor
    slots_T: Tensor
    partials: Partials | None = None
    """None for steps without decode rows"""


class TritonAttention:
    """See `octavo.attention.base.AttentionBackend`."""

    capabilities = Capabilities(
        "triton",
        "cuda",
        (torch.bfloat16, torch.float16, torch.float32),
        softcap=True,
        window=True,
        needs_host_lengths=False,
        graph_safe=True,
        fp8_kv=True,
    )

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self._dtype = dtype

    def plan(self, batch: StepBatch, block_size: int) -> TritonPlan:
        """The tables of a step in which every row is host-fed."""
        rows, tokens = len(batch.kv_lens_R), len(batch.ids_T)
        device = batch.ids_T.device
        tile = cut_for(self.shape, self._dtype, 1, 1).tile
        lengths_R = batch.starts_R1.diff()
        tiles_R = (lengths_R + tile - 1) // tile
        lane_Q = torch.repeat_interleave(torch.arange(rows, device=device), tiles_R)
        place_Q = torch.arange(len(lane_Q), device=device) - (tiles_R.cumsum(0) - tiles_R)[lane_Q]
        step = StepTables(rows, 1, 1, len(lane_Q), self.shape.kv_heads, device)
        step.tiles_2Q.copy_(torch.stack((lane_Q, place_Q * tile)))
        step.meta.copy_(torch.tensor([rows, tokens, 0, 0, 0, len(lane_Q), 0, 0, 0], dtype=torch.int32))
        step.rows_CR[0] = torch.arange(rows, device=device)
        step.rows_CR[1] = batch.kv_lens_R
        step.rows_CR[2] = batch.starts_R1[:-1]
        step.rows_CR[C_TOKENS.value] = lengths_R
        tables_RM = batch.tables_RM.to(torch.int32).contiguous()
        return TritonPlan(Sizes(tokens, rows, None, len(lane_Q)), step, tables_RM, batch.slots_T)

    def run(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, pool: KVPool, plan: TritonPlan) -> Tensor:
        """Write k and v, attend; o_THD."""
        keys, values = pool.keys[layer], pool.values[layer]
        if pool.scales_L2K is None:
            reference.write_kv(keys, k_TKD, plan.slots_T)
            reference.write_kv(values, v_TKD, plan.slots_T)
        else:
            reference.write_kv_fp8(keys, k_TKD, plan.slots_T, pool.scales_L2K[layer, 0])
            reference.write_kv_fp8(values, v_TKD, plan.slots_T, pool.scales_L2K[layer, 1])
        return self._attend(layer, q_THD.contiguous(), pool, plan)

    def run_qkv(self, layer: int, qkv_TJD: Tensor, turning: Turning, pool: KVPool, plan: TritonPlan) -> Tensor:
        """q/k norm, rotation and KV write of the qkv product, and attention; o_THD. One kernel for decode steps."""
        keys, values = pool.keys[layer], pool.values[layer]
        if not plan.sizes.tiles and not plan.sizes.prefix:
            return self._attend(layer, qkv_TJD, pool, plan, turning=turning)
        qk_TJD = norm_rotate_write(
            qkv_TJD, turning, plan.step.positions_T, plan.slots_T, keys, values, scales(pool, layer)
        )
        own = None
        if pool.scales_L2K is None and can_read_own(self.shape.head_dim, self._dtype, self.shape.window):
            own = qk_TJD, qkv_TJD
        return self._attend(layer, qk_TJD[:, : self.shape.heads], pool, plan, own)

    def _attend(
        self,
        layer: int,
        q_THD: Tensor,
        pool: KVPool,
        plan: TritonPlan,
        own: tuple[Tensor, Tensor] | None = None,
        turning: Turning | None = None,
    ) -> Tensor:
        """The kernels that the plan's sizes ask for. `q_THD` is the whole qkv product with `turning`."""
        shape, sizes, step = self.shape, plan.sizes, plan.step
        keys, values, scales_2K = pool.keys[layer], pool.values[layer], scales(pool, layer)
        o_THD = torch.empty((len(q_THD), shape.heads, shape.head_dim), dtype=q_THD.dtype, device=q_THD.device)
        if sizes.cut is not None and plan.partials is not None:
            if sizes.prefix:
                prefix_attention(
                    q_THD, keys, values, plan.tables_SM, step, plan.partials, shape.scale, shape.softcap, sizes.lanes,
                    scales_2K,
                )  # fmt: skip
            decode_attention(
                q_THD, keys, values, o_THD, plan.tables_SM, step, plan.partials, shape.scale, shape.softcap,
                shape.window, sizes.lanes, sizes.cut, sizes.prefix, turning, scales_2K,
            )  # fmt: skip
        if sizes.tiles:
            prefill_attention(
                q_THD, keys, values, own, o_THD, plan.tables_SM, step, shape.scale, shape.softcap, shape.window,
                sizes.tiles, scales_2K,
            )  # fmt: skip
        return o_THD
