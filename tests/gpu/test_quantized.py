"""Products with quantised weights on a real device against the oracle in float64, on fresh random input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.kernels import reference

pytestmark = pytest.mark.gpu

LIMITS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


@pytest.fixture(scope="module")
def cases():
    return pytest.importorskip("tests.kernels_interpret.cases.check_quantized")


FORMS = [
    ("int4", 128, True), ("int4", 128, False), ("int4", 64, True), ("int4", 32, True), ("int4", 0, True),
    ("int8", 128, True), ("int8", 32, False), ("int8", 0, False), ("fp8", 0, False), ("fp8", 128, False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "columns", "zeroed"), FORMS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"),
    [(1024, 1024, torch.bfloat16), (1152, 640, torch.bfloat16), (1152, 640, torch.float16)],
)
def test_products(
    cases, kind: str, columns: int, zeroed: bool, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    from octavo.kernels.gpu.quantized import pack, widen
    from octavo.kernels.gpu.quantized_linear import Parts, quantized_linear

    device = torch.device("cuda")
    weight = cases.random_weight(kind, columns, zeroed, outputs, inputs, "cuda")
    packed, parts, wide = pack(weight), Parts(device), weight.dequantize(torch.float64)
    assert cases.error(widen(packed, dtype), wide) < LIMITS[dtype]
    b = torch.randn(outputs, device=device, dtype=dtype)
    for tokens in (1, 5, 16, 17, 40, 64, 100):
        x = torch.randn(tokens, inputs, device=device, dtype=dtype)
        r = torch.randn(tokens, outputs, device=device, dtype=dtype)
        want = x.double() @ wide.T + b.double()
        for _ in range(2):  # the counters of the split must be left at zero
            got = quantized_linear(x, packed, b, r.clone(), False, parts)
            assert cases.error(got, want + r.double()) < LIMITS[dtype]
        assert not parts.counters.any()
        got = quantized_linear(x, packed, b, None, True, parts)
        assert cases.error(got, reference.silu_and_mul(want)) < LIMITS[dtype]


@pytest.mark.parametrize("static", [False, True])
def test_products_in_fp8(cases, static: bool) -> None:
    from octavo.kernels.gpu.fp8 import can_multiply, multiply, multiply_then, quantize_tokens
    from octavo.kernels.gpu.quantized import pack

    dtype = torch.bfloat16
    weight = cases.random_weight("fp8", 0, False, 1152, 1024, "cuda")
    if static:
        weight = replace(weight, input_scale=torch.tensor(0.02, device="cuda"))
    packed, wide = pack(weight), weight.dequantize(torch.float64)
    assert can_multiply(packed, dtype)
    norm = torch.rand(1024, device="cuda", dtype=dtype) + 0.5, 1e-5
    b = torch.randn(1152, device="cuda", dtype=dtype)
    for tokens in (1, 17, 300):
        x = torch.randn(tokens, 1024, device="cuda", dtype=dtype)
        for before in (None, norm):
            x64 = x.double() if before is None else reference.rms_norm(x.double(), norm[0].double(), norm[1])
            codes = quantize_tokens(x, packed, before)
            want = x64 @ wide.T + b.double()
            assert cases.error(multiply(*codes, packed, b, dtype), want) < 0.04  # 3 bits of significand leave that
            r = torch.randn(tokens, 1152, device="cuda", dtype=dtype)
            got = multiply_then(*codes, packed, b, r.clone(), False, dtype)
            assert cases.error(got, want + r.double()) < 0.04
            got = multiply_then(*codes, packed, b, None, True, dtype)
            assert cases.error(got, reference.silu_and_mul(want)) < 0.05


def test_functions_of_the_device(cases) -> None:
    from octavo.kernels.ops import ops_for

    ops = ops_for(torch.device("cuda"))
    for kind, columns in (("int4", 128), ("int8", 0), ("fp8", 0), ("fp8", 128)):
        weight = cases.random_weight(kind, columns, kind == "int4", 1024, 512, "cuda")
        limit = 0.05 if kind == "fp8" else 1e-2
        wide = weight.dequantize(torch.float64)
        order = torch.randperm(512, device="cuda")
        shuffled = replace(weight, order_I=order.to(torch.int32))
        norm = torch.rand(512, device="cuda", dtype=torch.bfloat16) + 0.5, 1e-5
        plain, gated, adding = ops.linear(weight, None, norm), ops.gated_linear(weight, None, norm), None
        adding = ops.linear_add(weight if kind == "fp8" else shuffled, None)
        for tokens in (1, 30, 300):
            x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
            y = reference.rms_norm(x.double(), norm[0].double(), norm[1]) @ wide.T
            assert cases.error(plain(x), y) < limit
            assert cases.error(gated(x), reference.silu_and_mul(y)) < limit
            r = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
            z = (x if kind == "fp8" else x[:, order]).double() @ wide.T + r.double()
            assert cases.error(adding(x, r), z) < limit


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (40, 40, 128)])
def test_attention_over_an_fp8_pool(cases, heads: int, kv_heads: int, dim: int) -> None:
    """Decode that turns and writes itself, prefill and shared prefix, against the oracle on what the pool holds."""
    from octavo.attention.base import AttentionShape, KVPool
    from octavo.attention.triton import Sizes, TritonAttention, TritonPlan, cut_for, partials_for
    from octavo.kernels.gpu.rope import Turning
    from tests.kernels_interpret.cases.common import make_case

    device, dtype = torch.device("cuda"), torch.bfloat16
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5)
    scales = torch.rand(1, 2, kv_heads, device=device) / 50 + 0.01
    for decodes, chunks, shared in (
        ([5, 700, 2000], [], 0),
        ([70], [(0, 300), (512, 129)], 0),
        ([512, 600], [], 448),
    ):
        cut = cut_for(shape, dtype, len(decodes), 132)
        case = make_case(decodes, chunks, cut, device="cuda", shared=shared)
        pool = KVPool(1, case.blocks + 1, 16, kv_heads, dim, dtype, device, scales)
        pool.data.copy_((torch.randn(pool.data.shape, device=device) * 40).to(torch.float8_e4m3fn))
        before = pool.data.clone()
        tokens, lanes = sum(case.lengths), case.step.rows_CR.shape[1]
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device, dtype=dtype)
        rope = torch.zeros(3000, dim, device=device, dtype=dtype)
        rope[:, : dim // 2] = 1.0  # no turn
        tiles = sum(-(-n // cut.tile) for _, n in chunks)
        sizes = Sizes(tokens, lanes, cut, tiles, shared > 0)
        partials = partials_for(shape, len(case.step.items_I8), lanes, device)
        plan = TritonPlan(sizes, case.step, case.tables_SM, case.step.slots_T[:tokens], partials)
        got = TritonAttention(shape, dtype).run_qkv(0, qkv, Turning(None, rope), pool, plan)
        slots = case.step.slots_T[:tokens].long()
        keys, values = before[0, 0], before[0, 1]
        reference.write_kv_fp8(keys, qkv[:, heads : heads + kv_heads], slots, scales[0, 0])
        reference.write_kv_fp8(values, qkv[:, heads + kv_heads :], slots, scales[0, 1])
        assert torch.equal(pool.data[:, :, 1:].view(torch.uint8), before[:, :, 1:].view(torch.uint8))
        wide = [reference.read_fp8(before[0, i], scales[0, i]).double() for i in (0, 1)]
        ends = [s + n for s, n in zip(case.starts, case.lengths, strict=True)]
        want = reference.paged_attention(
            qkv[:, :heads].double(), *wide, case.tables_SM[case.rows], case.lengths, ends, shape.scale
        )[0]
        assert cases.error(got, want) < 1e-2
