"""An error belongs to one request: it fails alone, gives everything back, and the others go on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.errors import EngineError, RequestError
from octavo.types import SamplingParams
from tests.engine.tiny import EOS, VOCAB, TinyEngine, tiny_decoder

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_logits_that_are_not_finite_end_their_request_only(decoder, depth):
    alone = TinyEngine(decoder)
    alone.submit(0, [5] * 40, GREEDY)
    alone.run()
    engine = TinyEngine(decoder, depth=depth)
    engine.submit(0, [5] * 40, GREEDY)
    engine.submit(1, [9] * 40, GREEDY)
    for _ in range(3):
        engine.step()
    victim = next(s for s in engine.scheduler.state.slots.sequences if s is not None and s.request.id == 1)
    engine.runner.pool.data[:, :, engine.scheduler.state.blocks_of(victim.row)[0]] = torch.nan
    engine.run()
    assert engine.reasons[1, 0] == "error"
    assert engine.tokens[0, 0] == alone.tokens[0, 0]
    assert torch.isfinite(engine.runner.pool.data).all(), "the next owner of a block would read it"
    engine.submit(2, [5] * 40, GREEDY)
    engine.run()
    assert engine.tokens[2, 0] == alone.tokens[0, 0]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_that_raises_fails_its_sequences_and_the_engine_goes_on(decoder, depth):
    engine = TinyEngine(decoder, depth=depth)
    engine.submit(0, [5] * 40, GREEDY)
    engine.step()
    launch = engine.runner.launch

    def broken(words):
        engine.runner.launch = launch
        raise RuntimeError("planted")

    engine.runner.launch = broken
    engine.run()
    assert engine.reasons == {(0, 0): "error"}
    engine.submit(1, [5] * 40, GREEDY)
    engine.run()
    assert engine.reasons[1, 0] == "length"
    alone = TinyEngine(decoder)
    alone.submit(1, [5] * 40, GREEDY)
    alone.run()
    assert engine.tokens[1, 0] == alone.tokens[1, 0], "a failed step left something in the prefix cache"


def test_three_failed_steps_end_the_engine(decoder):
    engine = TinyEngine(decoder)

    def broken(words):
        raise RuntimeError("planted")

    engine.runner.launch = broken
    with pytest.raises(EngineError, match="planted"):
        for i in range(3):
            engine.submit(i, [5], GREEDY)
            engine.step()


@pytest.mark.parametrize(
    ("ids", "params", "words"),
    [
        ([], GREEDY, "empty"),
        ([5] * 2000, GREEDY, "1024"),
        ([VOCAB], GREEDY, f"0 to {VOCAB - 1}"),
        ([-1], GREEDY, "-1"),
        ([True], GREEDY, "True"),
        ([1.5], GREEDY, "1.5"),
        ([5], SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids"),
    ],
    ids=["empty", "too long", "beyond", "negative", "bool", "float", "stop id"],
)
def test_bad_requests_are_refused_with_the_number(decoder, ids, params, words):
    engine = TinyEngine(decoder)
    engine.submit(0, [5] * 8, GREEDY)
    engine.step()
    with pytest.raises(RequestError, match=words):
        engine.submit(1, ids, params)
    engine.run()
    assert engine.reasons == {(0, 0): "length"}


def test_a_request_that_can_never_fit_is_refused_at_once(decoder):
    engine = TinyEngine(decoder, blocks=4, max_len=1024)
    with pytest.raises(RequestError, match="5 KV blocks; the pool has 4"):
        engine.submit(0, [5] * 60, SamplingParams(temperature=0, max_tokens=20))
    engine.submit(1, [5] * 60, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.run()
    assert engine.reasons == {(1, 0): "length"}


@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_a_prompt_above_the_token_budget_is_served(decoder, length):
    """Case B-36: in chunks, with the tokens that a large budget gives."""
    ids = [3 + i * 7 % 100 for i in range(length)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tokens = []
    for budget in (64, 2048):
        engine = TinyEngine(decoder, budget=budget, max_len=512, seqs=4)
        engine.submit(1, ids, params)
        engine.run()
        tokens.append(engine.tokens[1, 0])
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6


def test_token_id_zero_is_a_prompt(decoder):
    engine = TinyEngine(decoder)  # case B-21
    engine.submit(0, [0], GREEDY)
    engine.run()
    assert len(engine.tokens[0, 0]) == 12


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "nan", None, True])
def test_numbers_that_are_no_numbers(field, value):
    with pytest.raises(RequestError, match=field):  # case B-10
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0}, {"n": 1000}, {"n": 1.5}, {"top_k": -2}, {"max_tokens": 0}, {"min_tokens": 20}, {"logprobs": -1},
        {"logprobs": 1000}, {"stop": ""}, {"stop": ["END", ""]}, {"stop": ["x"] * 1000}, {"stop_token_ids": [-5]},
        {"seed": 1 << 63}, {"seed": 1.5}, {"seed": True}, {"temperature": -1}, {"top_p": 0.0}, {"top_p": 1.1},
        {"stop_token_ids": [9223372036854775808]}, {"stop": 5}, {"stop_token_ids": 5}, {"stop_token_ids": "7"},
        {"logit_bias": [5]}, {"bad_words": 3}, {"allowed_token_ids": 3}, {"priority": 10_000},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_parameters_outside_their_range(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_min_tokens_bans_every_end_token(decoder):
    """Case B-12: several end ids, all of them likely."""
    engine = TinyEngine(decoder)
    plain = TinyEngine(decoder)
    plain.submit(0, [5] * 8, SamplingParams(temperature=1.5, seed=3, max_tokens=40, ignore_eos=True))
    plain.run()
    stops = sorted(set(plain.tokens[0, 0][:12]) | {EOS})
    engine.submit(
        0, [5] * 8, SamplingParams(temperature=1.5, seed=3, min_tokens=10, max_tokens=40, stop_token_ids=stops)
    )
    engine.run()
    tokens = engine.tokens[0, 0]
    assert len(tokens) > 10
    assert not set(tokens[:10]) & set(stops)


def test_a_seed_gives_the_same_children_again(decoder):
    """Case B-09."""
    results = []
    for _ in range(2):
        engine = TinyEngine(decoder)
        engine.submit(0, [5, 6, 7], SamplingParams(n=4, seed=7, temperature=1.2, max_tokens=12, ignore_eos=True))
        engine.run()
        results.append(engine.tokens)
    assert results[0] == results[1]
    assert len({tuple(tokens) for tokens in results[0].values()}) >= 3


def test_a_preempted_sequence_goes_on_where_it_was(decoder):
    """Case B-35: KV for about 120 tokens, six requests at once, greedy and seeded."""
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=40, ignore_eos=True, logprobs=1) for i in range(6)
    ]
    prompts = [np.random.default_rng(i).integers(3, VOCAB, 20).tolist() for i in range(6)]
    together = TinyEngine(decoder, blocks=8, depth=1)
    for i in range(6):
        together.submit(i, prompts[i], params[i])
    together.run()
    assert together.scheduler.stats.preemptions > 0
    for i in range(6):
        alone = TinyEngine(decoder)
        alone.submit(i, prompts[i], params[i])
        alone.run()
        assert together.tokens[i, 0] == alone.tokens[i, 0]
        assert together.logprobs[i, 0] == pytest.approx(alone.logprobs[i, 0], abs=1e-9)
