"""The Triton kernels on a real device against the oracles in float64, on fresh random input, outputs poisoned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.attention.base import AttentionShape, KVPool
from octavo.kernels import reference

pytestmark = pytest.mark.gpu

LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [(16, 8, 128), (32, 8, 128), (40, 40, 128), (9, 3, 64), (8, 1, 256), (4, 2, 96)]
ROWS = [[1023], [5, 700, 64, 63, 1, 130], [2048, 17, 900] * 20]


@pytest.fixture(scope="module")
def cases():
    return pytest.importorskip("tests.kernels_interpret.cases.common")


def attend(cases, shape: AttentionShape, dtype: torch.dtype, decodes, chunks, block_size, shared=0) -> float:
    """Error of one step's attention, rows `decodes` and `chunks` as in `make_case`."""
    from octavo.attention.triton import Sizes, TritonAttention, TritonPlan, cut_for, partials_for

    backend = TritonAttention(shape, dtype)
    cut = cut_for(shape, dtype, max(len(decodes), 1), 132)
    case = cases.make_case(decodes, chunks, cut, device="cuda", block_size=block_size, shared=shared)
    pool = KVPool(1, case.blocks + 1, block_size, shape.kv_heads, shape.head_dim, dtype, "cuda")
    pool.data.normal_()
    q = torch.randn(sum(case.lengths), shape.heads, shape.head_dim, device="cuda", dtype=dtype)
    lanes = case.step.rows_CR.shape[1]
    items = len(case.step.items_I8)
    partials = partials_for(shape, items, lanes, torch.device("cuda"))
    partials.o_UHD.fill_(float("nan"))
    partials.lse_UH.fill_(float("nan"))
    tiles = sum(-(-n // cut.tile) for _, n in chunks)
    sizes = Sizes(len(q), lanes, cut if decodes else None, tiles, shared > 0)
    torch.full_like(q, float("nan"))  # what the output is likely to be allocated over
    got = backend._attend(0, q, pool, TritonPlan(sizes, case.step, case.tables_SM, case.step.slots_T, partials))
    keys = [s + n for s, n in zip(case.starts, case.lengths, strict=True)]
    want = reference.paged_attention(
        q.double(), pool.keys[0].double(), pool.values[0].double(), case.tables_SM[case.rows], case.lengths, keys,
        shape.scale, shape.softcap, shape.window,
    )[0]  # fmt: skip
    return cases.error(got, want)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("case", ["decode", "decode, window", "mixed", "mixed, window", "shared prefix"])
def test_attention(cases, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, case: str) -> None:
    extra = {"softcap": 20.0, "window": 200} if "window" in case else {}
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5, **extra)
    for block_size in (16, 64) if dtype == torch.bfloat16 else (32,):
        if case.startswith("decode"):
            for rows in ROWS:
                assert attend(cases, shape, dtype, rows, [], block_size) < LIMITS[dtype]
        elif case.startswith("mixed"):
            chunks = [(0, 300), (512, 1), (100, 129), (0, 64)]
            assert attend(cases, shape, dtype, [700, 3], chunks, block_size) < LIMITS[dtype]
        else:
            shared = [512, 530, 900, 513] * 9
            assert attend(cases, shape, dtype, shared, [], block_size, shared=448) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [shape for shape in SHAPES if shape[2] in (64, 128)])
def test_keys_of_the_step_itself(cases, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    from octavo.attention.triton import Sizes, TritonAttention, TritonPlan, cut_for, partials_for

    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5)
    cut = cut_for(shape, dtype, 1, 132)
    case = cases.make_case([30], [(0, 500), (70, 140), (64, 3), (1000, 129)], cut, device="cuda")
    pool = KVPool(1, case.blocks + 1, 16, kv_heads, dim, dtype, "cuda")
    pool.data.normal_()
    tokens, rows = sum(case.lengths), len(case.lengths)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device="cuda", dtype=dtype)
    qk = torch.randn(tokens, heads + kv_heads, dim, device="cuda", dtype=dtype)
    reference.write_kv(pool.keys[0], qk[:, heads:], case.step.slots_T.long())
    reference.write_kv(pool.values[0], qkv[:, heads + kv_heads :], case.step.slots_T.long())
    want = reference.paged_attention(
        qk[:, :heads].double(), pool.keys[0].double(), pool.values[0].double(), case.tables_SM[case.rows],
        case.lengths, [s + n for s, n in zip(case.starts, case.lengths, strict=True)], shape.scale,
    )[0]  # fmt: skip
    partials = partials_for(shape, len(case.step.items_I8), rows, torch.device("cuda"))
    sizes = Sizes(tokens, rows, cut, case.step.tiles_2Q.shape[1])
    plan = TritonPlan(sizes, case.step, case.tables_SM, case.step.slots_T, partials)
    qk, qkv = (torch.cat((x, torch.full_like(x[:40], float("nan")))) for x in (qk, qkv))  # of another row
    got = TritonAttention(shape, dtype)._attend(0, qk[:, :heads], pool, plan, (qk, qkv))[:tokens]
    assert cases.error(got, want) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("size", [576, 1024, 4096, 5120])
def test_elementwise(cases, size: int, dtype: torch.dtype) -> None:
    from octavo.kernels.gpu import norm

    x = torch.randn(333, size, device="cuda", dtype=dtype)
    for kept in (dtype, torch.float32):  # some models keep their norms wide
        w = torch.randn(size, device="cuda", dtype=kept)
        want = reference.rms_norm(x.double(), w.double(), 1e-5)
        assert cases.error(norm.rms_norm(x, w, 1e-5), want) < LIMITS[dtype]
    gate_up = torch.randn(77, 2 * size, device="cuda", dtype=dtype)
    assert cases.error(norm.silu_and_mul(gate_up), reference.silu_and_mul(gate_up.double())) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("normed", ["", "norm", "wide norm"])
def test_rope(cases, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: str) -> None:
    from octavo.kernels.gpu.rope import Turning, norm_rotate_write

    tokens = 301
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device="cuda", dtype=dtype)
    angles = torch.rand(500, dim // 2, device="cuda") * 6
    rope = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
    kept = dtype if normed == "norm" else torch.float32
    norm = (torch.rand(heads + kv_heads, dim, device="cuda").to(kept), 1e-6) if normed else None
    positions = torch.randint(0, 500, (tokens,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(20 * 16, device="cuda")[:tokens].to(torch.int32)
    pools = [torch.full((20, kv_heads, 16, dim), 7.0, device="cuda", dtype=dtype) for _ in range(2)]
    q = norm_rotate_write(qkv, Turning(norm, rope), positions, slots, *pools)[:, :heads]
    wide = rope.double()[positions.long()]
    cos, sin = wide[:, : dim // 2], wide[:, dim // 2 :]
    parts: list[Tensor] = [qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]]
    weights = None if norm is None else (norm[0][:heads].double(), norm[0][heads:].double(), norm[1])
    want = [torch.full((20, kv_heads, 16, dim), 7.0, device="cuda", dtype=torch.float64) for _ in range(2)]
    want_q = reference.norm_rotate_write(
        *(part.double() for part in parts), weights, torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1), *want,
        slots.long(),
    )  # fmt: skip
    for got, expected in zip((q, *pools), (want_q, *want), strict=True):
        assert cases.error(got, expected) < LIMITS[dtype]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 1024), (1024, 3072), (576, 1536), (960, 576), (4096, 14336)])
def test_products_of_few_tokens(cases, tokens: int, outputs: int, inputs: int) -> None:
    from octavo.kernels.gpu.linear import multiply

    dtype = torch.bfloat16
    x = torch.randn(tokens, inputs, device="cuda", dtype=dtype)
    w = torch.randn(outputs, inputs, device="cuda", dtype=dtype) / inputs**0.5
    b, r = torch.randn(outputs, device="cuda", dtype=dtype), torch.randn(tokens, outputs, device="cuda", dtype=dtype)
    norm, wide, bias = (torch.rand(inputs, device="cuda") + 0.5, 1e-5), w.double(), b.double()
    plain = x.double() @ wide.T + bias
    normed = reference.rms_norm(x.double(), norm[0].double(), 1e-5) @ wide.T + bias
    assert cases.error(multiply(x, w, b, r.clone(), False, None), plain + r.double()) < 1e-2
    assert cases.error(multiply(x, w, b, None, False, norm), normed) < 1e-2
    assert cases.error(multiply(x, w, b, None, True, norm), reference.silu_and_mul(normed)) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_decode_that_turns_and_writes_itself(cases, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    from octavo.attention.triton import Sizes, TritonAttention, TritonPlan, cut_for, partials_for
    from octavo.kernels.gpu.rope import Turning, norm_rotate_write

    for rows in ([1023], [5, 700, 64, 63, 0, 130] * 15):
        shape = AttentionShape(heads, kv_heads, dim, dim**-0.5)
        cut = cut_for(shape, dtype, len(rows), 132)
        case = cases.make_case(rows, [], cut, device="cuda")
        pool, want = (KVPool(1, case.blocks + 1, 16, kv_heads, dim, dtype, "cuda") for _ in range(2))
        pool.data.normal_()
        want.data.copy_(pool.data)
        qkv = torch.randn(len(rows), heads + 2 * kv_heads, dim, device="cuda", dtype=dtype)
        angles = torch.rand(1024, dim // 2, device="cuda") * 6
        kept = torch.float32 if heads == 16 else dtype
        norm = (torch.rand(heads + kv_heads, dim, device="cuda").to(kept), 1e-6) if kv_heads > 2 else None
        turning = Turning(norm, torch.cat((angles.cos(), angles.sin()), 1).to(dtype))
        step = case.step
        q = norm_rotate_write(qkv, turning, step.positions_T, step.slots_T, want.keys[0], want.values[0])[:, :heads]
        partials = partials_for(shape, len(step.items_I8), len(rows), torch.device("cuda"))
        sizes = Sizes(len(rows), len(rows), cut, 0)
        plan = TritonPlan(sizes, step, case.tables_SM, step.slots_T, partials)
        got = TritonAttention(shape, dtype).run_qkv(0, qkv, turning, pool, plan)
        assert cases.error(pool.data, want.data) < LIMITS[dtype]
        expected = reference.paged_attention(
            q.double(), want.keys[0].double(), want.values[0].double(), case.tables_SM[case.rows], case.lengths,
            [n + 1 for n in rows], shape.scale,
        )[0]  # fmt: skip
        assert cases.error(got, expected) < LIMITS[dtype]
        assert not step.finished_RK.any()
