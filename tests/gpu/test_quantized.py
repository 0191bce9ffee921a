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
    from octavo.kernels.gpu.quantized import Parts, pack, quantized_linear, widen

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
