"""How the CPU backend cuts a step into groups changes nothing, nor do a row's neighbours; head shapes and dtypes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.attention import torch_cpu
from octavo.attention.base import AttentionShape
from octavo.attention.reference import ReferenceAttention
from octavo.attention.torch_cpu import TorchCpuAttention
from octavo.errors import EngineError
from tests.attention.steps import Step, make_step

DECODE = [(0, 1), (5, 1), (15, 1), (16, 1), (17, 1), (63, 1), (200, 1), (1, 1)]
MIXED = [(40, 1), (0, 7), (33, 300), (9, 1), (0, 130), (12, 5), (64, 64), (0, 1), (3, 5)]
GQA = AttentionShape(4, 2, 16, 0.25)


def run_and_written(backend_class, shape: AttentionShape, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """o_THD of the last layer and the pool afterwards; the step's own pool stays as it was."""
    pool = step.pool
    kept = pool.data.clone()
    backend = backend_class(shape, pool.data.dtype)
    plan = backend.plan(step.batch, pool.block_size)
    for layer in range(2):
        o_THD = backend.run(layer, step.q_THD, step.k_TKD, step.v_TKD, pool, plan)
    written = pool.data.clone()
    pool.data.copy_(kept)
    assert o_THD.dtype == step.q_THD.dtype
    return o_THD, written


def run(backend_class, shape: AttentionShape, step: Step) -> torch.Tensor:
    return run_and_written(backend_class, shape, step)[0]


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("rows", [DECODE, MIXED, [(0, 1)], [(130, 129)]])
@pytest.mark.parametrize("shape", [GQA, AttentionShape(6, 6, 24, 0.3), AttentionShape(8, 1, 64, 0.125)])
def test_head_shapes_and_what_is_written(shape, rows, block_size):
    step = make_step(rows, shape, block_size=block_size)
    expected, expected_pool = run_and_written(ReferenceAttention, shape, step)
    got, pool = run_and_written(TorchCpuAttention, shape, step)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("dtype,within", [(torch.float32, 2e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_narrow_types(dtype, within):
    step = make_step(MIXED, GQA, dtype)
    got, expected = (run(c, GQA, step).double() for c in (TorchCpuAttention, ReferenceAttention))
    assert (got - expected).abs().max() < within


@pytest.mark.parametrize("group_bytes,waste_bytes", [(1, 0), (20_000, 1 << 30), (1 << 30, 1 << 30), (1 << 30, 4000)])
def test_any_grouping_gives_the_same(monkeypatch, group_bytes, waste_bytes):
    rows = DECODE * 3 + [(20, 4), (70, 4), (0, 4)]
    step = make_step(rows, GQA)
    expected = run(ReferenceAttention, GQA, step)
    monkeypatch.setattr(torch_cpu, "_GROUP_BYTES", group_bytes)
    monkeypatch.setattr(torch_cpu, "_WASTE_BYTES", waste_bytes)
    groups = TorchCpuAttention(GQA, torch.float64).plan(step.batch, 16).groups
    assert sum(group.rows for group in groups) == len(rows)
    assert len(groups) == len(rows) if group_bytes == 1 else len(groups) < len(rows)
    torch.testing.assert_close(run(TorchCpuAttention, GQA, step), expected, rtol=0, atol=1e-12)


def test_similar_decode_rows_are_one_group():
    shape = AttentionShape(9, 3, 64, 0.125)
    step = make_step([(100 + i % 7, 1) for i in range(32)], shape, torch.bfloat16)
    assert len(TorchCpuAttention(shape, torch.bfloat16).plan(step.batch, 16).groups) == 1


def test_a_row_does_not_depend_on_its_neighbours():
    """Alone, and with NaN in every block that is not the row's own."""
    rows = [(50, 1), (300, 1), (2, 9), (0, 40)]
    step = make_step(rows, GQA)
    together = run(TorchCpuAttention, GQA, step)
    batch, host, kept = step.batch, step.batch.host, step.pool.data.clone()
    for row in range(len(rows)):
        a, b = int(batch.starts_R1[row]), int(batch.starts_R1[row + 1])
        blocks = batch.tables_RM[row, : -(-int(host.kv_R[row]) // 16)].long()
        own = dataclasses.replace(
            batch,
            slots_T=batch.slots_T[a:b],
            starts_R1=torch.tensor([0, b - a], dtype=torch.int32),
            kv_lens_R=batch.kv_lens_R[row : row + 1],
            tables_RM=batch.tables_RM[row : row + 1],
            host=dataclasses.replace(host, query_R=host.query_R[row : row + 1], kv_R=host.kv_R[row : row + 1]),
        )
        step.pool.data[:, :, 1:] = torch.nan
        step.pool.data[:, :, blocks] = kept[:, :, blocks]
        alone = Step(own, step.pool, step.q_THD[a:b], step.k_TKD[a:b], step.v_TKD[a:b])
        torch.testing.assert_close(run(TorchCpuAttention, GQA, alone), together[a:b], rtol=0, atol=1e-13)


def test_rows_of_one_step_see_each_others_writes():
    """Row 1 starts with the block that row 0 fills in the same step."""
    step = make_step([(0, 16), (16, 1)], GQA, shared_blocks=1)
    expected = run(ReferenceAttention, GQA, step)
    torch.testing.assert_close(run(TorchCpuAttention, GQA, step), expected, rtol=0, atol=1e-12)
    step.k_TKD[3] += 1
    assert not torch.allclose(run(TorchCpuAttention, GQA, step)[16], expected[16])


def test_oracle_returns_log_sum_exp():
    """Against scores computed by hand for one row."""
    step = make_step([(6, 1)], GQA)
    backend = ReferenceAttention(GQA, torch.float64)
    plan = backend.plan(step.batch, 16)
    _, lse_TH = backend.run_with_lse(0, step.q_THD, step.k_TKD, step.v_TKD, step.pool, plan)
    keys_UKD = step.pool.keys[0][step.batch.tables_RM[0, 0].long(), :, :7].transpose(0, 1)
    scores_HU = torch.einsum("hd,uhd->hu", step.q_THD[0], keys_UKD.repeat_interleave(2, 1)) * GQA.scale
    torch.testing.assert_close(lse_TH[0], scores_HU.logsumexp(-1))


def test_cpu_backend_needs_host_lengths():
    step = make_step([(0, 1)], GQA)
    with pytest.raises(EngineError, match="row lengths"):
        TorchCpuAttention(GQA, torch.float64).plan(dataclasses.replace(step.batch, host=None), 16)
