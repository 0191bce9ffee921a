"""Native sampling: the same tokens as the torch sampler for the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

native = pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")

from octavo.runner.sampler import SamplingRows, draw  # noqa: E402
from octavo.scheduler.plan import (  # noqa: E402
    P_CHILD,
    P_MIN_P,
    P_SEED_HIGH,
    P_SEED_LOW,
    P_TEMPERATURE,
    P_TOP_K,
    P_TOP_P,
    PARAM_WORDS,
    float_bits,
)

SETS = native.kernel_sets()


def native_token(
    isa: str, logits: np.ndarray, t: float, k: int, p: float, m: float, seed: int, child: int, at: int
) -> int:
    words = np.zeros(PARAM_WORDS, np.int32)
    words[P_TEMPERATURE], words[P_TOP_P], words[P_MIN_P] = float_bits(t), float_bits(p), float_bits(m)
    words[P_TOP_K], words[P_SEED_LOW], words[P_SEED_HIGH], words[P_CHILD] = k, seed, seed >> 7, child
    return int(native.sample(isa, logits, words, at))


def torch_token(logits: np.ndarray, t: float, k: int, p: float, m: float, seed: int, child: int, at: int) -> int:
    def one(x: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([x], dtype=dtype)

    f, i = torch.float32, torch.int64
    rows = SamplingRows(
        one(t, f), one(k, i), one(p, f), one(m, f), one(seed, i), one(seed >> 7, i), one(child, i), one(at, i)
    )
    return int(draw(torch.from_numpy(logits)[None], rows, filters=k > 0 or p < 1 or m > 0))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize(
    "t,k,p,m",
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (0.9, 0, 0.9, 0.0), (1.3, 20, 0.8, 0.0),
     (1.0, 0, 1.0, 0.05), (1.5, 100, 0.95, 0.02), (2.0, 1, 1.0, 0.0), (1.0, 0, 0.01, 0.0), (5.0, 0, 0.999, 0.0)],
)  # fmt: skip
def test_same_tokens_as_torch(isa: str, t: float, k: int, p: float, m: float) -> None:
    rng = np.random.default_rng(5)
    for vocab, spread in ((1000, 3.0), (5003, 0.5), (49152, 3.0)):
        for draw_number in range(4):
            logits = (rng.standard_normal(vocab) * spread).astype(np.float32)
            args = (t, k, p, m, int(rng.integers(1 << 31)), draw_number, 17 * draw_number)
            assert native_token(isa, logits, *args) == torch_token(logits, *args)


@pytest.mark.parametrize("isa", SETS)
def test_equal_logits(isa: str) -> None:
    logits = np.repeat(np.float32([2.0, 1.0, 0.0]), 50)
    for seed in range(40):
        for k, p in ((3, 1.0), (60, 1.0), (0, 0.3), (70, 0.5)):
            args = (1.0, k, p, 0.0, seed, 0, seed)
            assert native_token(isa, logits, *args) == torch_token(logits, *args)
    assert native_token(isa, logits, 0.0, 0, 1.0, 0.0, 0, 0, 0) == 0


@pytest.mark.parametrize("isa", SETS)
def test_banned_ids_are_never_drawn(isa: str) -> None:
    logits = np.zeros(130, np.float32)
    logits[:100] = -np.inf
    for seed in range(30):
        assert native_token(isa, logits, 1.0, 0, 1.0, 0.0, seed, 0, 3) >= 100
        assert 100 <= native_token(isa, logits, 0.5, 0, 0.9, 0.0, seed, 0, 3) < 130
    assert native_token(isa, logits, 0.0, 0, 1.0, 0.0, 0, 0, 0) == 100


def test_frequencies_follow_the_softmax() -> None:
    logits = np.log(np.float32([0.5, 0.25, 0.125, 0.125]))
    counts = np.bincount([native_token("", logits, 1.0, 0, 1.0, 0.0, s, 0, 0) for s in range(20000)], minlength=4)
    np.testing.assert_allclose(counts / 20000, [0.5, 0.25, 0.125, 0.125], atol=0.012)
