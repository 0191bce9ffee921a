"""KV pools in FP8: what is written, read, copied, and how the scales are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.attention.base import AttentionShape, KVPool
from octavo.attention.choose import choose_backend
from octavo.attention.reference import ReferenceAttention
from octavo.attention.torch_cpu import TorchCpuAttention
from octavo.kernels.reference import read_fp8, to_fp8
from octavo.runner.kv_scales import calibrate
from octavo.runner.torch_runner import TorchRunner
from tests.attention.test_backends import ROWS, make_step
from tests.engine.tiny import tiny_decoder

SHAPE = AttentionShape(6, 2, 16, 0.3)
SCALES = torch.tensor([[[0.02, 0.05], [0.01, 0.1]]])


def fp8_pool(blocks: int, block_size: int) -> KVPool:
    pool = KVPool(1, blocks, block_size, 2, 16, torch.float32, scales_L2K=SCALES)
    values = torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1))
    pool.data.copy_((values / SCALES[..., None, :, None, None]).clamp(-448, 448).to(torch.float8_e4m3fn))
    return pool


@pytest.mark.parametrize("rows", ROWS)
def test_backends_agree_with_a_plain_pool_of_the_rounded_values(rows: str) -> None:
    rng = np.random.default_rng(3)
    batch, blocks = make_step(rng, 16, ROWS[rows])
    tokens = len(batch.ids_T)
    q, k, v = (torch.from_numpy(rng.normal(size=(tokens, heads, 16))).float() for heads in (6, 2, 2))
    plain = KVPool(1, blocks, 16, 2, 16, torch.float32)
    for part in (0, 1):
        plain.data[0, part] = read_fp8(fp8_pool(blocks, 16).data[0, part], SCALES[0, part])
    rounded = [read_fp8(to_fp8(x, s)[:, :, None], s)[:, :, 0] for x, s in zip((k, v), SCALES[0], strict=True)]
    oracle = ReferenceAttention(SHAPE, torch.float32)
    expected = oracle.run(0, q, *rounded, plain, oracle.plan(batch, 16))
    for backend in (oracle, TorchCpuAttention(SHAPE, torch.float32)):
        got = backend.run(0, q, k, v, fp8_pool(blocks, 16), backend.plan(batch, 16))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_values_beyond_the_range_are_clamped_and_blocks_are_copied_exactly() -> None:
    assert to_fp8(torch.tensor([[[1e9]]]), torch.tensor([1.0])).float().item() == 448.0
    pool = fp8_pool(5, 8)
    pool.copy_blocks(torch.tensor([1, 2]), torch.tensor([3, 4]))
    assert torch.equal(pool.bits[:, :, 3:5], pool.bits[:, :, 1:3])
    assert pool.data.nbytes * 4 == KVPool(1, 5, 8, 2, 16, torch.float32).data.nbytes


def test_scales_are_measured_per_head_and_the_decoder_then_makes_fp8_pools() -> None:
    decoder = tiny_decoder(torch.float32)
    scales_L2K = calibrate(decoder, list(range(3, 90)))
    assert scales_L2K.shape == (2, 2, 2) and len(scales_L2K.unique()) == 8 and (scales_L2K < 1).all()
    decoder.kv_scales_L2K = scales_L2K
    runner = TorchRunner(decoder, blocks=9, block_size=16, rows=2, max_len=64)
    assert runner.pool.data.dtype == torch.float8_e4m3fn
    runner.pool.data[:, :, 3] = torch.tensor(float("nan")).to(torch.float8_e4m3fn)
    runner.rows.tables_SM[1] = 3
    runner._clean(np.array([1], np.int32))
    assert not runner.pool.data.float().isnan().any()


def test_the_backend_of_the_cpu_can_use_it() -> None:
    assert choose_backend(SHAPE, torch.float32, torch.device("cpu"), fp8_kv=True).capabilities.fp8_kv
