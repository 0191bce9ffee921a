"""Random steps for attention backends: a batch over shuffled blocks of a filled pool, and q, k, v for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import AttentionShape, HostLengths, KVPool, StepBatch


@dataclass
class Step:
    batch: StepBatch
    pool: KVPool
    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor


def make_step(
    rows: list[tuple[int, int]],
    shape: AttentionShape,
    dtype: torch.dtype = torch.float64,
    *,
    block_size: int = 16,
    seed: int = 0,
    shared_blocks: int = 0,
) -> Step:
    """One step of (tokens before, tokens of this step) rows, earlier keys and values already in the pool.

    All rows have the same first `shared_blocks` blocks; table entries past a row's end name blocks of others.
    """
    generator = torch.Generator().manual_seed(seed)
    before, query = (np.array(part, np.int32) for part in zip(*rows, strict=True))
    kv = before + query
    columns = -(-kv // block_size)
    width = int(columns.max()) + 1
    order = torch.randperm(len(rows) * width, generator=generator).numpy() + 1
    tables = order.reshape(len(rows), width)
    tables[:, :shared_blocks] = tables[0, :shared_blocks]
    blocks = len(order) + 1
    pool = KVPool(2, blocks, block_size, shape.kv_heads, shape.head_dim, dtype)
    pool.data[:, :, 1:] = torch.randn(pool.data[:, :, 1:].shape, generator=generator, dtype=dtype)
    row_of = np.repeat(np.arange(len(rows)), query)
    position = np.concatenate([np.arange(a, b) for a, b in zip(before, kv, strict=True)])
    slots = tables[row_of, position // block_size] * block_size + position % block_size
    tokens = len(position)
    heads = [shape.heads, shape.kv_heads, shape.kv_heads]
    q, k, v = (torch.randn(tokens, n, shape.head_dim, generator=generator, dtype=dtype) for n in heads)
    batch = StepBatch(
        ids_T=torch.zeros(tokens, dtype=torch.int64),
        positions_T=torch.from_numpy(position),
        slots_T=torch.from_numpy(slots),
        starts_R1=torch.from_numpy(np.concatenate(([0], np.cumsum(query))).astype(np.int32)),
        kv_lens_R=torch.from_numpy(kv),
        tables_RM=torch.from_numpy(tables.astype(np.int32)),
        host=HostLengths(query, kv),
    )
    return Step(batch, pool, q, k, v)
