"""A pool of 8 blocks and 64 requests: all end with the tokens that each has alone, by recompute and by swap."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.errors import RequestError
from octavo.types import SamplingParams
from tests.engine.smollm2 import SmolEngine, smollm2_decoder
from tests.engine.tiny import VOCAB, TinyEngine, tiny_decoder

REQUESTS, BLOCKS, BLOCK = 64, 8, 16
POOL = {"blocks": BLOCKS, "block_size": BLOCK, "max_len": BLOCKS * BLOCK}


def requests(vocab: int, new_tokens: int) -> list[tuple[list[int], SamplingParams]]:
    """Short prompts with long answers, so that the pool overflows; greedy and seeded, every fourth with n = 2."""
    rng = random.Random(5)
    out = []
    for i in range(REQUESTS):
        ids = [rng.randrange(3, vocab) for _ in range(rng.randrange(1, 24))]
        temperature, n = (0.0, 1) if i % 2 else (0.9, 1 + (i % 4 == 0))
        many = new_tokens // 2 + rng.randrange(new_tokens)
        params = SamplingParams(temperature=temperature, seed=i, n=n, max_tokens=many, ignore_eos=True, logprobs=0)
        out.append((ids, params))
    return out


def run(engine: TinyEngine, which: list[tuple[list[int], SamplingParams]]) -> TinyEngine:
    for i, (ids, params) in enumerate(which):
        engine.submit(i, ids, params)
    engine.run()
    return engine


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="module")
def alone(decoder):
    tokens, logprobs = {}, {}
    for i, (ids, params) in enumerate(requests(VOCAB, 40)):
        engine = TinyEngine(decoder, blocks=64)
        engine.submit(i, ids, params)
        engine.run()
        tokens |= engine.tokens
        logprobs |= engine.logprobs
    return tokens, logprobs


@pytest.mark.parametrize(
    ("depth", "cache", "swap_blocks"),
    [(0, True, 0), (1, False, 0), (0, True, 3), (0, True, 100), (1, True, 100), (2, False, 100)],
)
def test_all_end_as_alone(decoder, alone, depth, cache, swap_blocks):
    engine = TinyEngine(decoder, depth=depth, cache=cache, budget=64, swap_blocks=swap_blocks, **POOL)
    run(engine, requests(VOCAB, 40))
    tokens, logprobs = alone
    assert engine.tokens == tokens
    for key, values in logprobs.items():
        assert engine.logprobs[key] == pytest.approx(values, abs=1e-9)
    stats = engine.scheduler.stats
    assert stats.preemptions > 20
    assert (stats.swapped_in_tokens > 0) == (swap_blocks > 0)
    assert (stats.recomputed_tokens == 0) == (swap_blocks == 100)
    assert engine.scheduler.state.host.free == swap_blocks


def test_what_can_never_run_is_refused_at_once(decoder):
    engine = TinyEngine(decoder, swap_blocks=100, blocks=BLOCKS, max_len=1024)
    with pytest.raises(RequestError, match="9 KV blocks; the pool has 8"):
        engine.submit(1, [5] * 100, SamplingParams(max_tokens=29))
    assert not engine.scheduler.has_work()


def run_with_a_flipped_byte(engine: TinyEngine, which: list[tuple[list[int], SamplingParams]]) -> int:
    """Flip the sign of one value that lies on the host; returns whose it is."""
    for i, (ids, params) in enumerate(which):
        engine.submit(i, ids, params)
    state, victim = engine.scheduler.state, -1
    while engine.scheduler.has_work():
        engine.step()
        waiting = [one for one in state.slots.sequences if one is not None and one.host is not None]
        if victim < 0 and waiting:
            victim = waiting[0].request.id
            value = engine.runner.host[0, 1, int(waiting[0].host[0]), 0, 0, :1].view(dtype=torch.uint8)
            value[-1] ^= 0x80
    return victim


def changed(engine: TinyEngine, other: TinyEngine) -> set[int]:
    return {
        key[0]
        for key, values in other.logprobs.items()
        if engine.tokens[key] != other.tokens[key] or engine.logprobs[key] != pytest.approx(values, abs=1e-9)
    }


def test_a_flipped_byte_on_the_host_changes_the_output_of_its_owner_only(decoder):
    which = requests(VOCAB, 40)[:24]
    sound = run(TinyEngine(decoder, cache=False, swap_blocks=100, **POOL), which)
    engine = TinyEngine(decoder, cache=False, swap_blocks=100, **POOL)
    victim = run_with_a_flipped_byte(engine, which)
    assert victim >= 0 and changed(engine, sound) == {victim}


# The real model.


@pytest.fixture(scope="module")
def native(smollm2_gguf):
    pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")
    from tests.runner.native import load_smollm2

    return load_smollm2(smollm2_gguf, blocks=128)


def test_the_real_model_by_recompute_and_by_swap(native):
    from tests.runner.native import NativeEngine

    which = requests(5000, 24)
    tokens = {}
    for i, (ids, params) in enumerate(which):
        engine = NativeEngine(*native, blocks=64)
        engine.submit(i, ids, params)
        engine.run()
        tokens |= engine.tokens
    for swap_blocks in (0, 60):
        engine = NativeEngine(*native, budget=64, swap_blocks=swap_blocks, **POOL)
        run(engine, which)
        stats = engine.scheduler.stats
        assert engine.tokens == tokens
        assert stats.preemptions > 5
        assert (stats.swapped_in_tokens > 0) == (stats.recomputed_tokens == 0) == (swap_blocks > 0)


def test_a_flipped_byte_changes_the_output_of_the_real_model(smollm2_gguf):
    decoder = smollm2_decoder(smollm2_gguf)
    which = requests(5000, 24)[:8]
    sound = run(SmolEngine(decoder, budget=64, swap_blocks=100, **POOL), which)
    engine = SmolEngine(decoder, budget=64, swap_blocks=100, **POOL)
    victim = run_with_a_flipped_byte(engine, which)
    assert victim in changed(engine, sound)
