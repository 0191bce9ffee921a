"""Native products of codes whose scales lie apart: every group, with and without zeros, against float64."""

from __future__ import annotations

import numpy as np
import pytest

native = pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")

from octavo.quantization.packed import Packed, pack_nibbles  # noqa: E402
from tests.kernels.test_native_products import quantized  # noqa: E402

SETS = native.kernel_sets()
# rows, columns, columns that share a scale, rows of activations; groups of whole rows may end within a block
SHAPES = [
    (32, 32, 32, 1), (77, 192, 64, 4), (33, 384, 128, 7), (1, 96, 32, 9), (160, 128, 128, 13),
    (45, 96, 96, 3), (64, 70, 70, 5), (7, 2, 2, 2), (129, 640, 640, 6),
]  # fmt: skip


def random_weight(kind: str, rows: int, columns: int, group: int, zeros: bool, seed: int = 0) -> Packed:
    rng = np.random.default_rng(seed)
    groups = columns // group
    scales = rng.uniform(0.001, 0.02, (rows, groups)).astype(np.float16)
    if kind == "int4":
        codes = pack_nibbles(rng.integers(0, 16, (rows, columns), dtype=np.uint8))
        zero = rng.integers(0, 16, scales.shape, dtype=np.uint8)
    else:
        codes = rng.integers(-128, 128, (rows, columns), dtype=np.int8)
        zero = rng.integers(-128, 128, scales.shape, dtype=np.int8)
    return Packed(kind, (rows, columns), codes, scales, group, zeros_RG=zero if zeros else None)


def arrays(weight: Packed) -> tuple[str, int, int, int, list[np.ndarray]]:
    zeros = np.empty(0, np.uint8) if weight.zeros_RG is None else weight.zeros_RG
    parts = (weight.codes, weight.scales_RG, zeros)
    raw = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    return weight.kind.upper(), -(-weight.columns // 32) * 32, *weight.shape, raw


def product(isa: str, weight: Packed, x: np.ndarray) -> np.ndarray:
    out = np.empty((len(x), weight.shape[0]), np.float32)
    native.product_grouped(isa, *arrays(weight), x, out)
    return out


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_products(isa: str, kind: str, zeros: bool) -> None:
    for rows, columns, group, m in SHAPES:
        weight = random_weight(kind, rows, columns, group, zeros, rows)
        # Activations off zero, so that an error in what the zeros take away would show.
        x = np.random.default_rng(m).normal(0.5, 1.0, (m, columns)).astype(np.float32)
        wanted = quantized(x) @ weight.dequantize().astype(np.float64).T
        size = np.abs(quantized(x)) @ np.abs(weight.dequantize()).astype(np.float64).T
        assert (np.abs(product(isa, weight, x) - wanted) <= 2e-6 * size.max()).all()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_unpacked_equals_dequantized(kind: str, zeros: bool) -> None:
    for rows, columns, group, _ in SHAPES:
        weight = random_weight(kind, rows, columns, group, zeros)
        out = np.empty(weight.shape, np.float32)
        native.unpack_grouped(*arrays(weight), out)
        np.testing.assert_array_equal(out, weight.dequantize())


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_row_does_not_depend_on_the_others(isa: str, kind: str) -> None:
    weight = random_weight(kind, 96, 256, 64, True)
    x = np.random.default_rng(1).standard_normal((17, 256)).astype(np.float32)
    together = product(isa, weight, x)
    for m in (1, 2, 3, 5, 8, 11):
        np.testing.assert_array_equal(product(isa, weight, x[:m]), together[:m])


@pytest.mark.parametrize("isa", SETS)
def test_numbers_that_are_not_finite_stay_in_their_row(isa: str) -> None:
    x = np.ones((5, 64), np.float32)
    x[1, 40], x[3, 2] = np.nan, np.inf
    got = product(isa, random_weight("int4", 32, 64, 64, True), x)
    assert np.isnan(got[[1, 3]]).all() and np.isfinite(got[[0, 2, 4]]).all()


def test_wrong_sizes_are_refused() -> None:
    kind, group, rows, columns, parts = arrays(random_weight("int4", 32, 128, 64, True))
    x, out = np.zeros((1, columns), np.float32), np.zeros((1, rows), np.float32)
    for changed, words in (
        ((kind, 48, rows, columns, parts), "whole groups"),
        ((kind, 96, rows, columns, parts), "whole groups"),
        ((kind, 0, rows, columns, parts), "whole groups"),
        ((kind, 32, rows, columns, parts), "wrong number of bytes"),
        ((kind, group, rows, columns, [parts[0][1:], *parts[1:]]), "wrong number of bytes"),
        ((kind, group, rows, columns, [*parts[:2], parts[2][1:]]), "wrong number of bytes"),
        ((kind, group, rows, columns, parts[:2]), "codes, scales and zeros"),
        ((kind, group, rows, 127, parts), "whole bytes"),
        (("Q4_0", group, rows, columns, parts), "unknown type of codes"),
    ):
        with pytest.raises(ValueError, match=words):
            native.product_grouped("", *changed, x, out)
    with pytest.raises(ValueError, match="come with their scales"):
        native.product("", "INT4", "", rows, columns, parts[0], x, out)
