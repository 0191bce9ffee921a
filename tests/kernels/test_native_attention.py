"""Native paged attention against a float64 reference: head sizes, block sizes, chunks, windows, KV types."""

from __future__ import annotations

import numpy as np
import pytest

native = pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")

SETS = native.kernel_sets()
BOUNDS = {"float32": 2e-6, "bfloat16": 1.5e-2, "int8": 3e-2}


class Case:
    """Rows with random queries, keys and values, and block tables in random order."""

    def __init__(self, heads: int, kv_heads: int, dim: int, block: int, rows: list[tuple[int, int]]) -> None:
        rng = np.random.default_rng(0)
        self.sizes = (heads, kv_heads, dim, block)
        self.start = np.array([s for s, _ in rows], np.int32)
        self.length = np.array([n for _, n in rows], np.int32)
        totals = [s + n for s, n in rows]
        columns = -(-max(totals) // block)
        self.blocks = 1 + columns * len(rows)
        self.tables = (1 + rng.permutation(self.blocks - 1)).astype(np.int32).reshape(len(rows), columns)
        self.k = [rng.standard_normal((t, kv_heads, dim)).astype(np.float32) for t in totals]
        self.v = [rng.standard_normal((t, kv_heads, dim)).astype(np.float32) for t in totals]
        self.q = [rng.standard_normal((n, heads, dim)).astype(np.float32) for _, n in rows]

    def run(self, isa: str, kv: str, softcap: float = 0.0, window: int = 0) -> list[np.ndarray]:
        heads, kv_heads, dim, block = self.sizes

        def flat(parts: list[np.ndarray]) -> np.ndarray:
            return np.concatenate([p.ravel() for p in parts])

        out = np.empty(sum(q.size for q in self.q), np.float32)
        sizes, factors = [heads, kv_heads, dim, block, self.blocks, window], [dim**-0.5, softcap]
        lengths = (self.start, self.length, self.tables)
        native.attention(isa, kv, sizes, factors, *lengths, flat(self.q), flat(self.k), flat(self.v), out)
        ends = np.cumsum([q.size for q in self.q])[:-1]
        return [part.reshape(q.shape) for part, q in zip(np.split(out, ends), self.q, strict=True)]

    def wanted(self, softcap: float = 0.0, window: int = 0) -> list[np.ndarray]:
        heads, kv_heads, dim, _ = self.sizes
        results = []
        for q, k, v, start in zip(self.q, self.k, self.v, self.start, strict=True):
            k, v = (np.repeat(x.astype(np.float64), heads // kv_heads, axis=1) for x in (k, v))
            scores = np.einsum("thd,uhd->htu", q.astype(np.float64), k) * dim**-0.5
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            at, key = start + np.arange(len(q))[:, None], np.arange(len(k))
            hidden = (key > at) | ((key <= at - window) if window else False)
            scores = np.where(hidden, -np.inf, scores)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            results.append(np.einsum("htu,uhd->thd", weights / weights.sum(-1, keepdims=True), v))
        return results

    def check(self, isa: str, kv: str, softcap: float = 0.0, window: int = 0) -> None:
        for got, wanted in zip(self.run(isa, kv, softcap, window), self.wanted(softcap, window), strict=True):
            assert np.abs(got - wanted).max() <= BOUNDS[kv] * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kv", BOUNDS)
def test_rows_of_all_lengths(isa: str, kv: str) -> None:
    rows = [(0, 1), (0, 5), (15, 1), (63, 1), (64, 2), (100, 30), (130, 1), (7, 90)]
    Case(9, 3, 64, 16, rows).check(isa, kv)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize(
    "heads,kv_heads,dim", [(4, 1, 256), (8, 8, 128), (6, 1, 32), (14, 2, 64), (3, 3, 16), (4, 2, 80)]
)
def test_head_sizes(isa: str, heads: int, kv_heads: int, dim: int) -> None:
    for kv in BOUNDS:
        Case(heads, kv_heads, dim, 16, [(40, 3), (70, 1)]).check(isa, kv)


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("kv", BOUNDS)
def test_block_sizes(block: int, kv: str) -> None:
    case = Case(4, 2, 64, block, [(200, 1), (3, 140), (7, 1), (8, 1)])
    case.check(SETS[0], kv)
    same = Case(4, 2, 64, 16, [(200, 1), (3, 140), (7, 1), (8, 1)])
    same.q, same.k, same.v = case.q, case.k, case.v
    for got, wanted in zip(case.run(SETS[0], kv), same.run(SETS[0], kv), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("window", [1, 16, 50, 64, 100])
def test_windows(window: int) -> None:
    case = Case(4, 2, 64, 16, [(200, 1), (0, 150), (90, 40)])
    case.check(SETS[0], "float32", window=window)
    case.check(SETS[0], "bfloat16", window=window)


def test_softcap() -> None:
    Case(4, 2, 64, 16, [(200, 1), (0, 50)]).check(SETS[0], "float32", softcap=5.0)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kv", BOUNDS)
def test_a_query_does_not_depend_on_the_chunk(isa: str, kv: str) -> None:
    whole = Case(6, 2, 64, 16, [(0, 150)])
    together = whole.run(isa, kv)[0]
    for start, n in ((0, 1), (149, 1), (60, 10), (64, 64)):
        part = Case(6, 2, 64, 16, [(start, n)])
        part.k, part.v = [whole.k[0][: start + n]], [whole.v[0][: start + n]]
        part.q = [whole.q[0][start : start + n]]
        np.testing.assert_array_equal(part.run(isa, kv)[0], together[start : start + n])
