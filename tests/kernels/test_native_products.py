"""Native matrix products: every stored type, every instruction set, odd sizes, against numpy."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

native = pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")

from octavo.quantization import ggml  # noqa: E402

SETS = native.kernel_sets()
GGML = {"Q4_0": 1, "Q4_1": 2, "Q5_0": 1, "Q5_1": 2, "Q8_0": 1, "Q4_K": 2, "Q5_K": 2, "Q6_K": 1}


def dequantized(weights: np.ndarray, kind: str) -> np.ndarray:
    """The values, by the reference of another project."""
    return gguf.quants.dequantize(weights, gguf.GGMLQuantizationType[kind])


def stored_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random bytes with sensible half precision scales: uint8 [rows, row bytes]."""
    rng = np.random.default_rng(seed)
    block, nbytes = ggml.BY_NAME[kind].block, ggml.BY_NAME[kind].nbytes
    out = rng.integers(0, 256, (rows * columns // block, nbytes), dtype=np.uint8)
    at = 208 if kind == "Q6_K" else 0
    for i in range(GGML[kind]):
        scales = rng.uniform(0.001, 0.02, len(out)).astype(np.float16)
        if i == 1 and kind in ("Q4_1", "Q5_1"):
            scales = -8 * scales
        out[:, at + 2 * i : at + 2 * i + 2] = scales.view(np.uint8).reshape(-1, 2)
    return out.reshape(rows, -1)


def quantized(x: np.ndarray) -> np.ndarray:
    """Rows as the kernels see them: 8 bits per block of 32 around zero."""
    padded = np.zeros((len(x), -(-x.shape[1] // 32) * 32), np.float32)
    padded[:, : x.shape[1]] = x
    blocks = padded.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), 0).astype(np.float32)
    scale = largest.astype(np.float64) / 127
    return (np.rint(blocks * inverse) * scale).reshape(len(x), -1)[:, : x.shape[1]]


def product(isa: str, kind: str, fmt: str, weights: np.ndarray, shape: tuple[int, int], x: np.ndarray) -> np.ndarray:
    out = np.empty((len(x), shape[0]), np.float32)
    native.product(isa, kind, fmt, *shape, np.ascontiguousarray(weights).view(np.uint8).ravel(), x, out)
    return out


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", GGML)
def test_stored_types(isa: str, kind: str) -> None:
    columns = 512 if kind.endswith("K") else 96
    for rows, m in ((32, 1), (77, 4), (33, 7), (1, 9), (160, 13)):
        weights = stored_blocks(kind, rows, columns, rows)
        x = np.random.default_rng(m).standard_normal((m, columns)).astype(np.float32)
        wanted = quantized(x) @ dequantized(weights, kind).astype(np.float64).T
        got = product(isa, kind, "", weights, (rows, columns), x)
        # K types: scales rounded to half precision.
        bound = 1e-3 if kind.endswith("_K") else 2e-6
        assert np.abs(got - wanted).max() <= bound * np.abs(wanted).max()


@pytest.mark.parametrize("kind", GGML)
def test_unpacked_equals_dequantized(kind: str) -> None:
    weights = stored_blocks(kind, 45, 512, 3)
    out = np.empty((45, 512), np.float32)
    native.unpack(kind, "", 45, 512, weights.ravel(), out)
    wanted = dequantized(weights, kind)
    if kind.endswith("_K"):
        np.testing.assert_allclose(out, wanted, atol=1e-3 * np.abs(wanted).max())
    else:
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("isa", SETS)
def test_plain_types(isa: str) -> None:
    for rows, columns, m in ((32, 32, 1), (50, 70, 8), (3, 1, 13), (65, 129, 5)):
        rng = np.random.default_rng(rows)
        weights = rng.standard_normal((rows, columns)).astype(np.float32)
        x = rng.standard_normal((m, columns)).astype(np.float32)
        got = product(isa, "F32", "", weights, (rows, columns), x)
        np.testing.assert_allclose(got, x @ weights.T, rtol=1e-5, atol=1e-5)

        def narrow(a: np.ndarray) -> np.ndarray:
            bits = a.view(np.uint32).astype(np.uint64)
            return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)

        def widen(a: np.ndarray) -> np.ndarray:
            return (a.astype(np.uint32) << 16).view(np.float32)

        wanted = widen(narrow(x)).astype(np.float64) @ widen(narrow(weights)).astype(np.float64).T
        for kind, data in (("BF16", narrow(weights)), ("F32", weights)):
            got = product(isa, kind, "bf16", data, (rows, columns), x)
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fmt,bound", [("g8", 0.01), ("q4m", 0.12)])
def test_quantizing_plain_weights(fmt: str, bound: float) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((64, 320)).astype(np.float32)
    x = rng.standard_normal((6, 320)).astype(np.float32)
    got = product("", "F32", fmt, weights, weights.shape, x)
    wanted = x @ weights.T
    assert np.sqrt(np.square(got - wanted).mean() / np.square(wanted).mean()) < bound


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F32"])
def test_a_row_does_not_depend_on_the_others(isa: str, kind: str) -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((96, 64)).astype(np.float32) if kind == "F32" else stored_blocks(kind, 96, 64, 2)
    x = rng.standard_normal((17, 64)).astype(np.float32)
    together = product(isa, kind, "", weights, (96, 64), x)
    for m in (1, 2, 3, 5, 8, 11):
        np.testing.assert_array_equal(product(isa, kind, "", weights, (96, 64), x[:m]), together[:m])


@pytest.mark.parametrize("isa", SETS)
def test_numbers_that_are_not_finite_stay_in_their_row(isa: str) -> None:
    x = np.ones((5, 64), np.float32)
    x[1, 40], x[3, 2] = np.nan, np.inf
    got = product(isa, "Q8_0", "", stored_blocks("Q8_0", 32, 64, 0), (32, 64), x)
    assert np.isnan(got[[1, 3]]).all() and np.isfinite(got[[0, 2, 4]]).all()


def test_wrong_sizes_are_refused() -> None:
    x, out = np.zeros((1, 64), np.float32), np.zeros((1, 32), np.float32)
    with pytest.raises(ValueError, match="wrong number of bytes"):
        native.product("", "Q8_0", "", 32, 64, np.zeros(100, np.uint8), x, out)
    with pytest.raises(ValueError, match="whole blocks"):
        native.product("", "Q8_0", "", 32, 63, np.zeros(100, np.uint8), x, out)
    with pytest.raises(ValueError, match="unknown stored type"):
        native.product("", "Q9", "", 32, 64, np.zeros(100, np.uint8), x, out)
