"""The CPU backend equals the oracle: random rows, windows, soft-caps, block sizes, dtypes, several steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.attention.base import AttentionShape, HostLengths, KVPool, StepBatch
from octavo.attention.reference import ReferenceAttention
from octavo.attention.torch_cpu import TorchCpuAttention


def make_step(rng: np.random.Generator, block_size: int, rows: list[tuple[int, int]]) -> tuple[StepBatch, int]:
    """A step of rows (queries, keys) with shuffled blocks, and the number of blocks with the padding block."""
    query, kv = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    columns = -(-int(kv.max()) // block_size)
    blocks = len(rows) * columns + 1
    tables = rng.permutation(np.arange(1, blocks)).reshape(len(rows), columns)
    row_of = np.repeat(np.arange(len(rows)), query)
    position = np.concatenate([np.arange(k - q, k) for q, k in rows])
    slots = tables[row_of, position // block_size] * block_size + position % block_size
    batch = StepBatch(
        ids_T=torch.zeros(len(position), dtype=torch.int64),
        positions_T=torch.from_numpy(position),
        slots_T=torch.from_numpy(slots),
        starts_R1=torch.from_numpy(np.concatenate(([0], np.cumsum(query)))).to(torch.int32),
        kv_lens_R=torch.from_numpy(kv).to(torch.int32),
        tables_RM=torch.from_numpy(tables).to(torch.int32),
        host=HostLengths(query, kv),
    )
    return batch, blocks


ROWS = {
    "decode": [(1, 1), (1, 9), (1, 40), (1, 200), (1, 64)],
    "mixed": [(5, 5), (1, 70), (130, 300), (7, 7), (1, 3), (33, 33)],
    "prefill": [(300, 300), (129, 400)],
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [0, 1, 8, 48, 150, 1000])
@pytest.mark.parametrize(("block_size", "softcap"), [(8, 0.0), (16, 2.0), (64, 0.0)])
def test_cpu_equals_the_oracle(rows: str, window: int, block_size: int, softcap: float) -> None:
    shape = AttentionShape(6, 2, 16, 0.3, softcap, window)
    rng = np.random.default_rng(block_size + window)
    batch, blocks = make_step(rng, block_size, ROWS[rows])
    tokens = len(batch.ids_T)
    q, k, v = (torch.from_numpy(rng.normal(size=(tokens, heads, 16))) for heads in (6, 2, 2))
    outputs = []
    for backend in (ReferenceAttention(shape, torch.float64), TorchCpuAttention(shape, torch.float64)):
        pool = KVPool(1, blocks, block_size, 2, 16, torch.float64)
        pool.data.copy_(torch.from_numpy(np.random.default_rng(1).normal(size=tuple(pool.data.shape))))
        outputs.append(backend.run(0, q, k, v, pool, backend.plan(batch, block_size)))
    assert torch.allclose(*outputs, atol=1e-12)


def test_window_hides_exactly_the_older_keys() -> None:
    """Values are one-hot by position: the output shows which keys a query saw."""
    shape = AttentionShape(1, 1, 64, 1.0, 0.0, 5)
    batch, blocks = make_step(np.random.default_rng(0), 8, [(20, 20)])
    q = k = torch.zeros(20, 1, 64)
    v = torch.eye(64)[:20, None]
    for backend in (ReferenceAttention(shape, torch.float32), TorchCpuAttention(shape, torch.float32)):
        pool = KVPool(1, blocks, 8, 1, 64, torch.float32)
        o = backend.run(0, q, k, v, pool, backend.plan(batch, 8))
        for position in range(20):
            seen = o[position, 0].nonzero().ravel().tolist()
            assert seen == list(range(max(0, position - 4), position + 1))
