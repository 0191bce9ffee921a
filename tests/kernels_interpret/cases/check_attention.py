"""Rope and KV write, decode, prefill and shared prefix, against the oracles; outputs poisoned first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.attention.base import AttentionShape, KVPool
from octavo.attention.triton import Sizes, TritonAttention, TritonPlan, cut_for, partials_for
from octavo.kernels import reference
from octavo.kernels.gpu.rope import Turning, norm_rotate_write
from octavo.kernels.gpu.step import Cut
from tests.kernels_interpret.cases.check_quantized import same_codes
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
    partials = partials_for(backend.shape, len(case.step.items_I8), case.step.rows_CR.shape[1], torch.device("cpu"))
    partials.o_UHD.fill_(float("nan"))
    partials.lse_UH.fill_(float("nan"))
    lanes = case.step.rows_CR.shape[1]
    tiles = case.step.tiles_2Q.shape[1] if decodes < len(case.lengths) else 0
    sizes = Sizes(len(q_THD), lanes, cut if decodes else None, tiles, prefix)
    plan = TritonPlan(sizes, case.step, case.tables_SM, case.step.slots_T[: len(q_THD)], partials)
    return backend._attend(0, q_THD, pool, plan)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("normed", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.float16)])
def test_norm_rotate_write(heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    """The norm's weights are float32 beside 16-bit heads, too."""
    torch.manual_seed(1)
    case = make_case([5, 40], [(3, 6)], Cut(4, 16, 4, True))
    tokens = sum(case.lengths)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    angles = torch.rand(64, dim // 2) * 6
    rope = torch.cat((angles.cos(), angles.sin()), 1)
    norm = (torch.rand(heads + kv_heads, dim) + 0.5, 1e-6) if normed else None
    got, want = pool_for(case, kv_heads, dim), pool_for(case, kv_heads, dim)
    want.data.copy_(got.data)
    args = case.step.positions_T, case.step.slots_T, got.keys[0], got.values[0]
    q = norm_rotate_write(qkv, Turning(norm, rope), *args)[:, :heads]
    at = case.step.positions_T.long()
    cos = torch.cat((angles[at].cos(),) * 2, 1)
    sin = torch.cat((-angles[at].sin(), angles[at].sin()), 1)
    parts = [part.float() for part in qkv.split((heads, kv_heads, kv_heads), 1)]
    weights = None if norm is None else (norm[0][:heads], norm[0][heads:], norm[1])
    expected_q = reference.norm_rotate_write(
        *parts, weights, cos, sin, want.keys[0], want.values[0], case.step.slots_T.long()
    )
    limit = 1e-6 if dtype == torch.float32 else 1e-3
    assert error(q, expected_q) < limit and q.dtype == dtype
    assert error(got.data, want.data) < limit


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("block_size", "options"), [(8, {}), (32, {"softcap": 5.0}), (16, {"window": 20})])
@pytest.mark.parametrize("alone", [True, False])
def test_decode(
    heads: int, kv_heads: int, dim: int, block_size: int, options: dict[str, float], alone: bool
) -> None:
    torch.manual_seed(2)
    shape = AttentionShape(heads, kv_heads, dim, 0.3, **options)
    cut = Cut(5, 32, 8, alone)
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
    cut = Cut(4, 32, tile_of(shape), False)
    case = make_case([50, 7], [(0, 70), (45, 5), (32, 33)], cut)
    pool = pool_for(case, kv_heads, dim)
    q = torch.randn(sum(case.lengths), heads, dim)
    got = attend(case, q, pool, backend, cut)
    assert error(got, expected(case, q, pool, shape)) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS[1:])
@pytest.mark.parametrize(("shared", "softcap", "alone"), [(16, 0.0, True), (48, 5.0, False)])
def test_shared_prefix(heads: int, kv_heads: int, dim: int, shared: int, softcap: float, alone: bool) -> None:
    torch.manual_seed(4)
    shape = AttentionShape(heads, kv_heads, dim, 0.3, softcap)
    backend, cut = TritonAttention(shape, torch.float32), Cut(6, 16, 8, alone)
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
    backend, cut = TritonAttention(shape, dtype), Cut(4, 64, cut_for(shape, dtype, 1, 1).tile, True)
    case = make_case([90], [(0, 40)], cut)
    pool = KVPool(1, case.blocks + 1, 16, 2, 16, dtype)
    pool.data.normal_()
    q = torch.randn(41, 4, 16).to(dtype)
    got = attend(case, q, pool, backend, cut)
    wide = KVPool(1, case.blocks + 1, 16, 2, 16, torch.float64)
    wide.data.copy_(pool.data)
    assert error(got, expected(case, q.double(), wide, shape)) < 1e-2


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [*HEADS, (16, 1, 16)])
@pytest.mark.parametrize(("normed", "alone"), [(False, False), (True, True)])
def test_decode_that_turns_and_writes_itself(heads: int, kv_heads: int, dim: int, normed: bool, alone: bool) -> None:
    torch.manual_seed(8)
    shape, cut = AttentionShape(heads, kv_heads, dim, 0.3), Cut(5, 32, 8, alone)
    backend, case = TritonAttention(shape, torch.float32), make_case([0, 100, 31, 32, 33], [], cut, lanes=7)
    pool, want = pool_for(case, kv_heads, dim), pool_for(case, kv_heads, dim)
    want.data.copy_(pool.data)
    qkv = torch.randn(5, heads + 2 * kv_heads, dim)
    angles = torch.rand(128, dim // 2) * 6
    norm = (torch.rand(heads + kv_heads, dim) + 0.5, 1e-6) if normed else None
    turning = Turning(norm, torch.cat((angles.cos(), angles.sin()), 1))
    q = norm_rotate_write(
        qkv, turning, case.step.positions_T, case.step.slots_T, want.keys[0], want.values[0]
    )[:, :heads]  # fmt: skip
    partials = partials_for(shape, len(case.step.items_I8), 7, torch.device("cpu"))
    plan = TritonPlan(Sizes(5, 7, cut, 0), case.step, case.tables_SM, case.step.slots_T, partials)
    got = backend.run_qkv(0, qkv, turning, pool, plan)
    assert error(pool.data, want.data) < 1e-6
    assert error(got, expected(case, q, want, shape)) < 1e-5


@pytest.mark.parametrize("heads", [2, 6])
def test_keys_of_the_step_itself(heads: int) -> None:
    """Prefill that reads the step's own keys and values from the products, and earlier ones from the pool."""
    torch.manual_seed(7)
    shape, dtype = AttentionShape(heads, 2, 64, 0.2), torch.float16
    backend, cut = TritonAttention(shape, dtype), Cut(4, 64, cut_for(shape, dtype, 1, 1).tile, True)
    case = make_case([30], [(0, 90), (70, 40), (64, 3)], cut)
    pool = KVPool(1, case.blocks + 1, 16, 2, 64, dtype)
    pool.data.normal_()
    tokens = sum(case.lengths)
    qkv = torch.randn(tokens, heads + 4, 64).to(dtype)
    qk = torch.randn(tokens, heads + 2, 64).to(dtype)
    slots = case.step.slots_T.long()
    reference.write_kv(pool.keys[0], qk[:, heads:], slots)
    reference.write_kv(pool.values[0], qkv[:, heads + 2 :], slots)
    wide = KVPool(1, case.blocks + 1, 16, 2, 64, torch.float64)
    wide.data.copy_(pool.data)
    for length, start, row in zip(case.lengths[1:], case.starts[1:], case.rows[1:], strict=True):
        at = torch.arange(start, start + length)  # what the kernel must not read from the pool
        pool.data[0, :, case.tables_SM[row, at // 16].long(), :, at % 16] = float("nan")
    partials = partials_for(shape, len(case.step.items_I8), case.step.rows_CR.shape[1], torch.device("cpu"))
    sizes = Sizes(tokens, len(case.lengths), cut, case.step.tiles_2Q.shape[1])
    plan = TritonPlan(sizes, case.step, case.tables_SM, case.step.slots_T, partials)
    # Padding tokens, or a row whose numbers broke, lie behind the last row.
    qk, qkv = (torch.cat((x, torch.full((40, *x.shape[1:]), float("nan"), dtype=dtype))) for x in (qk, qkv))
    got = backend._attend(0, qk[:, :heads], pool, plan, (qk, qkv))[:tokens]
    assert error(got, expected(case, qk[:tokens, :heads].double(), wide, shape)) < 1e-2


def tile_of(shape: AttentionShape) -> int:
    return cut_for(shape, torch.float32, 1, 1).tile


def test_plan_and_run_of_the_protocol() -> None:
    from octavo.attention.base import StepBatch

    torch.manual_seed(6)
    shape = AttentionShape(6, 2, 16, 0.3)
    case = make_case([33], [(0, 70), (10, 3)], Cut(4, 16, 4, True))
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


def in_fp8(case: Case, kv_heads: int, dim: int) -> tuple[KVPool, KVPool]:
    """An FP8 pool with scales per head, and what it stands for."""
    scales = torch.rand(1, 2, kv_heads) / 50 + 0.01
    pool = KVPool(1, case.blocks + 1, 16, kv_heads, dim, torch.float32, scales_L2K=scales)
    wide = KVPool(1, case.blocks + 1, 16, kv_heads, dim, torch.float32)
    pool.data.copy_((torch.randn(pool.data.shape) * 40).to(torch.float8_e4m3fn))
    for part, like in ((pool.keys[0], wide.keys[0]), (pool.values[0], wide.values[0])):
        like.copy_(reference.read_fp8(part, scales[0, 0 if part is pool.keys[0] else 1]))
    return pool, wide


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_fp8_pool(heads: int, kv_heads: int, dim: int) -> None:
    torch.manual_seed(8)
    shape = AttentionShape(heads, kv_heads, dim, 0.3)
    cut = Cut(5, 32, 8, True)
    for decodes, chunks, shared in (([0, 100, 31], [], 0), ([33], [(20, 12), (0, 5)], 0), ([70, 80], [], 64)):
        case = make_case(decodes, chunks, cut, shared=shared)
        pool, wide = in_fp8(case, kv_heads, dim)
        q = torch.randn(sum(case.lengths), heads, dim)
        got = attend(case, q, pool, TritonAttention(shape, torch.float32), cut, shared > 0)
        assert error(got, expected(case, q, wide, shape)) < 1e-5


def test_writes_to_an_fp8_pool() -> None:
    torch.manual_seed(9)
    heads, kv_heads, dim = 6, 2, 16
    case = make_case([5, 40], [(3, 6)], Cut(4, 16, 4, True))
    pool, _ = in_fp8(case, kv_heads, dim)
    want = pool.data.clone()
    qkv, rope = torch.randn(sum(case.lengths), heads + 2 * kv_heads, dim), torch.zeros(64, dim)
    rope[:, : dim // 2] = 1.0  # no turn, so that rounding is all that differs
    scales = pool.scales_L2K[0]
    args = case.step.positions_T, case.step.slots_T, pool.keys[0], pool.values[0], scales
    norm_rotate_write(qkv, Turning(None, rope), *args)
    reference.write_kv_fp8(want[0, 0], qkv[:, heads : heads + kv_heads], case.step.slots_T.long(), scales[0])
    reference.write_kv_fp8(want[0, 1], qkv[:, heads + kv_heads :], case.step.slots_T.long(), scales[1])
    assert same_codes(pool.data.float(), want.float())
