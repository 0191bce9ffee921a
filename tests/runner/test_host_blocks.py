"""Blocks that are swapped out and in again come back as they were, wherever they go."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.runner.host_blocks import HostBlocks


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_out_and_in(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    pool = torch.randn(3, 2, 80, 2, 16, 8, device=device).to(dtype)
    data = pool.view(torch.uint8)
    kept = data.clone()
    host = HostBlocks(75, pool)
    rng = np.random.default_rng(3)
    out = rng.permutation(np.arange(1, 80, dtype=np.int32))[:70]
    places = rng.permutation(75).astype(np.int32)[:70]
    host.take(pool, torch.from_numpy(out).long().to(device), places)
    data[:, :, torch.from_numpy(out).long().to(device)] = 0x7F
    back = rng.permutation(out)
    host.give(pool, places, torch.from_numpy(back).long().to(device))
    for source, destination in zip(out.tolist(), back.tolist(), strict=True):
        assert torch.equal(data[:, :, destination], kept[:, :, source])
    left = sorted(set(range(80)) - set(out.tolist()))
    assert torch.equal(data[:, :, left], kept[:, :, left])
