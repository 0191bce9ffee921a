"""Sampling draws from the right distribution, and a draw depends on seed, child and position only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.runner.sampler import (
    SamplingRows,
    draw,
    filter_logits,
    gumbel_noise,
    philox,
    philox_words,
    token_logprobs,
)

VOCAB = 50
DRAWS = 20_000


def sampling_rows(count: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, first=0) -> SamplingRows:
    def ints(value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int64)

    def floats(value: float) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.float32)

    return SamplingRows(
        floats(temperature),
        ints(top_k),
        floats(top_p),
        floats(min_p),
        ints(seed),
        ints(7),
        ints(0),
        torch.arange(first, first + count),
    )


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers published with Philox
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    result = philox(*(torch.tensor([value]) for value in counter + key))
    assert [int(word) for word in result] == words


def test_noise_is_finite_at_both_ends():
    noise = gumbel_noise(torch.tensor([[0, 2**32 - 1]]))
    assert torch.isfinite(noise).all()


def test_every_counter_word_changes_the_words():
    base = sampling_rows(1)
    words = philox_words(base, 8)
    for name in ("seed_low_N", "seed_high_N", "child_N", "position_N"):
        other = sampling_rows(1)
        setattr(other, name, getattr(other, name) + 1)
        assert not torch.equal(philox_words(other, 8), words), name
    assert len(set(words[0].tolist())) == 8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 10, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_softmax(options):
    """Chi-square of 20,000 draws against the probabilities computed here by hand, in float64."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, VOCAB))
    expected = _by_hand(logits.numpy(), **options)
    rows = sampling_rows(DRAWS, **options)
    tokens = draw(logits.float().expand(DRAWS, VOCAB), rows, filters=len(options) > 0)
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    big = kept & (expected * DRAWS >= 5)
    chi = ((counts - expected * DRAWS)[big] ** 2 / (expected * DRAWS)[big]).sum()
    degrees = max(int(big.sum()) - 1, 1)
    assert chi < degrees + 4 * np.sqrt(2 * degrees) + 4


def _by_hand(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    probs = np.exp(logits / temperature - (logits / temperature).max())
    probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[(before >= top_p) & (top_p < 1)]] = 0
    return probs / probs.sum()


def test_the_best_token_always_stays():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = sampling_rows(4, top_p=1e-6)
    assert torch.equal(filter_logits(logits, rows).argmax(-1), logits.argmax(-1))
    assert (filter_logits(logits, rows) > -torch.inf).sum() == 4


def test_a_draw_does_not_depend_on_its_batch():
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(1))
    together = draw(logits, sampling_rows(16, top_p=0.9), filters=True)
    for i in range(16):
        assert draw(logits[i : i + 1], sampling_rows(1, top_p=0.9, first=i), filters=True)[0] == together[i]


def test_top_k_off_and_larger_than_the_vocabulary_are_the_same():
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(2))
    plain = draw(logits, sampling_rows(64), filters=False)
    for top_k in (0, -1, VOCAB, 10_000_000):
        assert torch.equal(draw(logits, sampling_rows(64, top_k=top_k), filters=True), plain)
    assert torch.equal(draw(logits, sampling_rows(64, top_k=1), filters=True), logits.argmax(-1))


def test_logprobs_and_rank():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    found = token_logprobs(logits, 3, 2)
    assert found.rank == 2
    assert found.ids.tolist() == [1, 3]
    assert found.chosen == pytest.approx(float(torch.log_softmax(logits, -1)[3]))
