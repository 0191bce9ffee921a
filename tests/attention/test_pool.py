"""The KV pool: zeroed, its views, its arithmetic, block copies."""

from __future__ import annotations

import torch

from octavo.attention.base import KVPool


def test_zeroed_and_one_allocation():
    pool = KVPool(3, 7, 16, 2, 8, torch.bfloat16)
    assert pool.data.shape == (3, 2, 7, 2, 16, 8) and not pool.data.any()
    pool.keys[1][4] = 1
    pool.values[2][4] = 2
    assert pool.data[1, 0, 4].sum() == 2 * 16 * 8 and pool.data[2, 1, 4].sum() == 2 * 2 * 16 * 8
    assert pool.data.sum() == 3 * 2 * 16 * 8


def test_bytes_per_block_is_what_the_pool_takes():
    pool = KVPool(3, 7, 16, 2, 8, torch.float32)
    assert pool.data.nbytes == 7 * KVPool.bytes_per_block(3, 16, 2, 8, torch.float32)


def test_copy_blocks_copies_all_layers_and_nothing_else():
    pool = KVPool(2, 6, 4, 2, 8, torch.float64)
    pool.data.normal_(generator=torch.Generator().manual_seed(0))
    before = pool.data.clone()
    pool.copy_blocks(torch.tensor([1, 1, 4]), torch.tensor([2, 5, 3]))
    before[:, :, [2, 5, 3]] = before[:, :, [1, 1, 4]]
    assert torch.equal(pool.data, before)
