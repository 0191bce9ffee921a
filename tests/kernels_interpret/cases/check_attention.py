"""Rope and KV write, decode, prefill and shared prefix, against the oracles; outputs poisoned first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.attention.base import AttentionShape, KVPool
from octavo.attention.triton import Sizes, TritonAttention, TritonPlan
from octavo.kernels import reference
from octavo.kernels.gpu.rope import norm_rotate_write
from octavo.kernels.gpu.step import Cut
from tests.kernels_interpret.cases.common import Case, error, make_case

HEADS = [(4, 4, 16), (6, 2, 16), (8, 2, 24)]


def pool_for(case: Case, kv_heads: int, dim: int, block_size: int = 16) -> KVPool:
    pool = KVPool(1, case.blocks + 1, block_size, kv_heads, dim, torch.float32)
    pool.data.normal_()
    return pool


def expected(case: Case, q_THD: Tensor, pool: KVPool, shape: AttentionShape) -> Tensor:
    tables = case.tables_SM[case.rows]
    keys = [s + n for s, n in zip(case.starts, case.lengths, strict=True)]
    return reference.paged_attention(
        q_THD, pool.keys[0], pool.values[0], tables, case.lengths, keys, shape.scale, shape.softcap, shape.window
    )[0]


def attend(
    case: Case, q_THD: Tensor, pool: KVPool, backend: TritonAttention, cut: Cut, prefix: bool = False
) -> Tensor:
    """The backend's kernels on a case, its output poisoned."""
    decodes = sum(1 for n in case.lengths if n == 1)
    backend.reserve(case.step.items_2I.shape[1], case.step.rows_CR.shape[1], torch.device("cpu"))
    assert backend._partials is not None
    backend._partials.o_UHD.fill_(float("nan"))
    backend._partials.lse_UH.fill_(float("nan"))
    lanes = case.step.rows_CR.shape[1]
    tiles = case.step.tiles_2Q.shape[1] if decodes < len(case.lengths) else 0
    sizes = Sizes(len(q_THD), lanes, cut.items + lanes if decodes else 0, tiles, prefix)
    plan = TritonPlan(sizes, case.step, case.tables_SM, case.step.slots_T[: len(q_THD)])
    return backend._attend(0, q_THD, pool, plan)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("normed", [False, True])
def test_norm_rotate_write(heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    torch.manual_seed(1)
    case = make_case([5, 40], [(3, 6)], Cut(4, 16, 16, 4))
    tokens = sum(case.lengths)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim)
    angles = torch.rand(64, dim // 2) * 6
    rope = torch.cat((angles.cos(), angles.sin()), 1)
    norm = (torch.rand(heads + kv_heads, dim) + 0.5, 1e-6) if normed else None
    got, want = pool_for(case, kv_heads, dim), pool_for(case, kv_heads, dim)
    want.data.copy_(got.data)
    q = norm_rotate_write(qkv, norm, rope, case.step.positions_T, case.step.slots_T, got.keys[0], got.values[0])
    at = case.step.positions_T.long()
    cos = torch.cat((angles[at].cos(),) * 2, 1)
    sin = torch.cat((-angles[at].sin(), angles[at].sin()), 1)
    parts = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    weights = None if norm is None else (norm[0][:heads], norm[0][heads:], norm[1])
    expected_q = reference.norm_rotate_write(
        *parts, weights, cos, sin, want.keys[0], want.values[0], case.step.slots_T.long()
    )
    assert error(q, expected_q) < 1e-6
    assert error(got.data, want.data) < 1e-6


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("block_size", "options"), [(8, {}), (32, {"softcap": 5.0}), (16, {"window": 20})])
def test_decode(heads: int, kv_heads: int, dim: int, block_size: int, options: dict[str, float]) -> None:
    torch.manual_seed(2)
    shape = AttentionShape(heads, kv_heads, dim, 0.3, **options)
    cut = Cut(5, 32, 32, 8, shape.window)
    case = make_case([0, 100, 31, 32, 33], [], cut, block_size=block_size, lanes=7)
    pool = pool_for(case, kv_heads, dim, block_size)
    q = torch.randn(5, heads, dim)
    got = attend(case, q, pool, TritonAttention(shape, torch.float32), cut)
    assert error(got, expected(case, q, pool, shape)) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 20}])
def test_mixed(heads: int, kv_heads: int, dim: int, options: dict[str, float]) -> None:
    torch.manual_seed(3)
    shape = AttentionShape(heads, kv_heads, dim, 0.3, **options)
    backend = TritonAttention(shape, torch.float32)
    cut = Cut(4, 32, 32, backend.tile, shape.window)
    case = make_case([50, 7], [(0, 70), (45, 5), (32, 33)], cut)
    pool = pool_for(case, kv_heads, dim)
    q = torch.randn(sum(case.lengths), heads, dim)
    got = attend(case, q, pool, backend, cut)
    assert error(got, expected(case, q, pool, shape)) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS[1:])
@pytest.mark.parametrize(("shared", "softcap"), [(16, 0.0), (48, 5.0)])
def test_shared_prefix(heads: int, kv_heads: int, dim: int, shared: int, softcap: float) -> None:
    torch.manual_seed(4)
    shape = AttentionShape(heads, kv_heads, dim, 0.3, softcap)
    backend, cut = TritonAttention(shape, torch.float32), Cut(6, 16, 16, 8)
    case = make_case([48, 60, 130, 55], [], cut, shared=shared)
    pool = pool_for(case, kv_heads, dim)
    q = torch.randn(4, heads, dim)
    got = attend(case, q, pool, backend, cut, prefix=True)
    assert error(got, expected(case, q, pool, shape)) < 1e-5


def test_half_precision() -> None:
    """float16 only: the interpreter has no bfloat16 products."""
    torch.manual_seed(5)
    dtype = torch.float16
    shape = AttentionShape(4, 2, 16, 0.3)
    backend, cut = TritonAttention(shape, dtype), Cut(4, 64, 64, tile_of(shape))
    case = make_case([90], [(0, 40)], cut)
    pool = KVPool(1, case.blocks + 1, 16, 2, 16, dtype)
    pool.data.normal_()
    q = torch.randn(41, 4, 16).to(dtype)
    got = attend(case, q, pool, backend, cut)
    wide = KVPool(1, case.blocks + 1, 16, 2, 16, torch.float64)
    wide.data.copy_(pool.data)
    assert error(got, expected(case, q.double(), wide, shape)) < 1e-2


def tile_of(shape: AttentionShape) -> int:
    return TritonAttention(shape, torch.float32).tile


def test_plan_and_run_of_the_protocol() -> None:
    from octavo.attention.base import StepBatch

    torch.manual_seed(6)
    shape = AttentionShape(6, 2, 16, 0.3)
    case = make_case([33], [(0, 70), (10, 3)], Cut(4, 16, 16, 4))
    backend = TritonAttention(shape, torch.float32)
    tokens = sum(case.lengths)
    q, k, v = torch.randn(tokens, 6, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    starts = torch.tensor([0, 1, 71, 74], dtype=torch.int32)
    batch = StepBatch(
        case.step.ids_T.long(), case.step.positions_T.long(), case.step.slots_T.long(), starts,
        torch.tensor([34, 70, 13], dtype=torch.int32), case.tables_SM[case.rows],
    )  # fmt: skip
    pool = pool_for(case, 2, 16)
    got = backend.run(0, q, k, v, pool, backend.plan(batch, 16))
    assert error(got, expected(case, q, pool, shape)) < 1e-5
