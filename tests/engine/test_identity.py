"""The same request gives the same ids whatever else runs: exact in float64."""

from __future__ import annotations

import random

import pytest

from octavo.types import SamplingParams
from tests.engine.tiny import VOCAB, TinyEngine, tiny_decoder

REQUESTS = 64


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy, seeded sampling with every filter, n = 3, logprobs, stop ids; prompts that share beginnings."""
    rng = random.Random(7)
    families = [[rng.randrange(3, VOCAB) for _ in range(rng.choice((16, 33, 64)))] for _ in range(4)]
    out = []
    for i in range(REQUESTS):
        head = families[i % 4][: rng.choice((8, 16, 33, 64))] if i % 3 else []
        ids = head + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 48))]
        kind = i % 6
        common = {"max_tokens": rng.randrange(4, 100), "ignore_eos": bool(i % 2)}
        if kind == 0:
            params = SamplingParams(temperature=0, **common)
        elif kind == 1:
            params = SamplingParams(temperature=0.8, seed=i, top_k=20, top_p=0.9, **common)
        elif kind == 2:
            params = SamplingParams(temperature=1.0, seed=i, n=3, min_p=0.02, **common)
        elif kind == 3:
            params = SamplingParams(temperature=0, logprobs=3, **common)
        elif kind == 4:
            params = SamplingParams(temperature=1.2, seed=i, n=3, logprobs=0, **common)
        else:
            params = SamplingParams(temperature=0.5, seed=i, stop_token_ids=[5, 6, 7, 8, 9], **common)
        out.append((ids, params))
    return out


@pytest.fixture(scope="module")
def alone(decoder):
    """Every request in an engine of its own."""
    tokens, logprobs, reasons = {}, {}, {}
    for i, (ids, params) in enumerate(mixed_requests()):
        engine = TinyEngine(decoder, blocks=64)
        engine.submit(i, ids, params)
        engine.run()
        tokens |= engine.tokens
        logprobs |= engine.logprobs
        reasons |= engine.reasons
    return tokens, logprobs, reasons


def run_together(decoder, **options) -> TinyEngine:
    engine = TinyEngine(decoder, **options)
    for i, (ids, params) in enumerate(mixed_requests()):
        engine.submit(i, ids, params)
    engine.run()
    return engine


def assert_same(engine: TinyEngine, alone) -> None:
    tokens, logprobs, reasons = alone
    assert engine.tokens == tokens
    assert engine.reasons == reasons
    for key, values in logprobs.items():
        assert engine.logprobs[key] == pytest.approx(values, abs=1e-9)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_block_size(decoder, alone, block_size):
    assert_same(run_together(decoder, block_size=block_size), alone)


@pytest.mark.parametrize("budget", [16, 64])
def test_token_budget(decoder, alone, budget):
    assert_same(run_together(decoder, budget=budget), alone)


@pytest.mark.parametrize("depth", [1, 2])
def test_depth(decoder, alone, depth):
    assert_same(run_together(decoder, depth=depth), alone)


def test_prefix_cache_off(decoder, alone):
    engine = run_together(decoder, cache=False)
    assert_same(engine, alone)
    assert engine.scheduler.stats.prefix_hit_tokens == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tiny_pool_preempts_all_the_time(decoder, alone, depth):
    engine = run_together(decoder, blocks=27, block_size=8, depth=depth, budget=64, max_len=216)
    assert_same(engine, alone)
    assert engine.scheduler.stats.preemptions > 100


def test_neighbours_aborted(decoder, alone):
    tokens, _, _ = alone
    engine = TinyEngine(decoder, depth=1, budget=64)
    requests = mixed_requests()
    rng = random.Random(3)
    for i, (ids, params) in enumerate(requests):
        engine.submit(i, ids, params)
        engine.submit(1000 + i, ids[: rng.randrange(1, len(ids) + 1)], params)
    aborts = list(range(1000, 1000 + REQUESTS))
    rng.shuffle(aborts)
    while engine.scheduler.has_work():
        engine.step()
        if aborts and rng.random() < 0.7:
            engine.scheduler.abort(aborts.pop())
    assert {key: value for key, value in engine.tokens.items() if key[0] < 1000} == tokens
    assert engine.scheduler.state.pool.free == engine.scheduler.state.pool.usable
    assert "abort" in engine.reasons.values()
