"""Blocks are shared by reference, copied on the first write, and never leak into another output."""

from __future__ import annotations

import random

import pytest

from octavo.types import SamplingParams
from tests.engine.tiny import VOCAB, TinyEngine, tiny_decoder

PROMPT = 2000
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 32, "ignore_eos": True}


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def prompt_ids(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def forked(decoder, n: int, prompt: int = PROMPT, **options) -> TinyEngine:
    engine = TinyEngine(decoder, max_len=4096, **options)
    engine.submit(0, prompt_ids(prompt), SamplingParams(n=n, **SAMPLED))
    return engine


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT + 5])
def test_four_children_use_hardly_more_blocks_than_one(decoder, prompt):
    one, four = forked(decoder, 1, prompt), forked(decoder, 4, prompt)
    one.run()
    four.run()
    assert four.scheduler.stats.peak_blocks <= 1.1 * one.scheduler.stats.peak_blocks
    assert four.scheduler.stats.block_copies > 0
    assert four.scheduler.stats.prompt_tokens_computed <= prompt + 3
    assert len({tuple(tokens) for tokens in four.tokens.values()}) == 4
    assert four.tokens[0, 0] == one.tokens[0, 0]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT + 5])
def test_corrupting_one_copy_changes_one_output(decoder, prompt):
    clean = forked(decoder, 4, prompt)
    clean.run()
    engine = forked(decoder, 4, prompt)
    while engine.scheduler.stats.block_copies == 0:
        engine.step()
    engine.step()
    copied = (prompt - 1) // 16
    state = engine.scheduler.state
    tables = {seq.row: state.blocks_of(seq.row).tolist() for seq in state.slots.sequences if seq is not None}
    block = tables[max(tables)][copied]
    assert sum(table[copied] == block for table in tables.values()) == 1
    engine.runner.pool.data[:, :, block] += 3.0
    engine.run()
    different = [key for key in clean.tokens if clean.tokens[key] != engine.tokens[key]]
    assert len(different) == 1


@pytest.mark.parametrize("budget", [256, 8192])
def test_a_shared_prefix_sent_together_is_computed_once(decoder, budget):
    head = prompt_ids(1024)
    engine = TinyEngine(decoder, blocks=2000, budget=budget, max_len=2048)
    for i in range(32):
        engine.submit(i, head + prompt_ids(32, seed=100 + i), SamplingParams(temperature=0, max_tokens=4))
    engine.run()
    stats = engine.scheduler.stats
    assert stats.prompt_tokens_computed == 1024 + 32 * 32
    assert stats.prefix_hit_tokens == 31 * 1024


def test_salts_keep_prefixes_apart(decoder):
    ids = prompt_ids(96)
    engine = TinyEngine(decoder)
    hits = []
    for i, salt in enumerate(["a", "a", "b", "", "a"]):  # case B-31
        before = engine.scheduler.stats.prefix_hit_tokens
        engine.submit(i, ids, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), salt)
        engine.run()
        hits.append(engine.scheduler.stats.prefix_hit_tokens - before)
    assert hits[0] == hits[2] == hits[3] == 0
    assert hits[1] == hits[4] == 95  # all but the last token
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) == 1


@pytest.mark.parametrize("depth", [0, 2])
def test_a_prompt_that_is_cached_as_a_whole_computes_one_token(decoder, depth):
    """Its last block is copied: nobody waits, and the cached block is never written."""
    ids = prompt_ids(256)
    engine, alone = TinyEngine(decoder, depth=depth), TinyEngine(decoder, cache=False)
    for one in (engine, alone):
        one.submit(0, ids, SamplingParams(temperature=0, max_tokens=1))
        one.run()
    stats, pool = engine.scheduler.stats, engine.scheduler.state.pool
    blocks = sorted(pool.index.blocks())
    kept = engine.runner.pool.data[:, :, blocks].clone()
    for i in range(1, 21):
        for one in (engine, alone):
            one.submit(i, ids, SamplingParams(temperature=1.0, seed=i, max_tokens=24, ignore_eos=True))
    engine.step()
    assert stats.prompt_tokens_computed == 256 + 20 and stats.block_copies == 20
    assert stats.prefix_hit_tokens == 20 * 255
    assert pool.usable - pool.free == 15 + 20  # what they share, and a block each
    engine.run()
    alone.run()
    assert engine.tokens == alone.tokens
    assert (engine.runner.pool.data[:, :, blocks] == kept).all()
    assert len(pool.index.entries()) == 16 and len(pool.index.deferred()) == 1  # one answer can be gone on from
    engine.submit(99, ids + engine.tokens[1, 0][:16] + [5], SamplingParams(temperature=0, max_tokens=1))
    engine.run()
    assert stats.prefix_hit_tokens == 20 * 255 + 272


def test_a_prompt_that_is_cached_as_a_whole_without_room_for_a_copy(decoder):
    ids = prompt_ids(64)
    engine = TinyEngine(decoder, blocks=5)
    engine.submit(0, ids, SamplingParams(temperature=0, max_tokens=1))
    engine.run()
    engine.submit(1, [7], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    engine.step()
    engine.submit(2, ids, SamplingParams(temperature=0, max_tokens=1))
    engine.run()
    assert engine.tokens[2, 0] == engine.tokens[0, 0]
    assert engine.scheduler.stats.prefix_hit_tokens == 48 and engine.scheduler.stats.block_copies == 0


def test_a_block_is_matched_by_its_whole_prefix(decoder):
    """Case B-32: the same block after another beginning is another block."""
    x, other, third = (prompt_ids(32, seed) for seed in (1, 2, 3))
    shared, tail = prompt_ids(64, 4), prompt_ids(5, 5)
    prompts = [x + shared + tail, other + shared + tail, third + shared, x + shared + tail, other + shared + tail]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine, alone = TinyEngine(decoder), TinyEngine(decoder, cache=False)
    for i, ids in enumerate(prompts):
        before = engine.scheduler.stats.prefix_hit_tokens
        engine.submit(i, ids, params)
        engine.run()
        assert engine.scheduler.stats.prefix_hit_tokens - before == (0 if i < 3 else 96)
        alone.submit(i, ids, params)
        alone.run()
    assert engine.tokens == alone.tokens


def test_a_recycled_block_loses_its_key(decoder):
    """Case B-34: a tiny pool, prompts that often end on a block border, repeats."""
    rng = random.Random(0)
    prompts = [prompt_ids(rng.choice((16, 32, 48, 64, rng.randrange(16, 97))), seed=i) for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected: dict[int, list[int]] = {}
    engine = TinyEngine(decoder, blocks=8, max_len=112)
    for turn in range(300):
        which = rng.randrange(40)
        engine.submit(turn, prompts[which], params)
        engine.run()
        if which not in expected:
            alone = TinyEngine(decoder, blocks=8, max_len=112, cache=False)
            alone.submit(0, prompts[which], params)
            alone.run()
            expected[which] = alone.tokens[0, 0]
        assert engine.tokens[turn, 0] == expected[which]
    assert engine.scheduler.state.pool.evictions > 0
