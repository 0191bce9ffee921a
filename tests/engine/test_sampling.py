"""Everything that changes what is sampled, through the whole engine: exact in float64, under every schedule."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import RequestError
from octavo.types import SamplingParams
from tests.engine.tiny import EOS, VOCAB, TinyEngine, tiny_decoder
from tests.model.driver import Sequences

BAD = ((5,), (7, 8), (9, 9, 9), (20, 30))


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def penalised_requests() -> list[tuple[list[int], SamplingParams, tuple[tuple[int, ...], ...]]]:
    """Requests with every kind of change to their logits, some of them sampled with a seed, some with n = 3."""
    rng = random.Random(3)
    head = [rng.randrange(3, VOCAB) for _ in range(40)]
    out = []
    for i in range(24):
        ids = head[: rng.choice((0, 16, 33, 40))] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))]
        fields: dict[str, Any] = {"max_tokens": rng.randrange(20, 60), "ignore_eos": True, "temperature": 0}
        kind = i % 8
        if kind == 0:
            fields |= {"repetition_penalty": 1.4}
        elif kind == 1:
            fields |= {"presence_penalty": 1.1, "frequency_penalty": 0.3}
        elif kind == 2:
            fields |= {"repetition_penalty": 0.8, "frequency_penalty": -0.2, "temperature": 0.7, "seed": i, "n": 3}
        elif kind == 3:
            bias = {rng.randrange(VOCAB): 2.5, rng.randrange(VOCAB): -4}
            fields |= {"logit_bias": bias, "temperature": 1, "seed": 1}
        elif kind == 4:
            fields |= {"allowed_token_ids": [3, 5, 8, 13, 21, 34], "temperature": 1.5, "seed": i, "top_p": 0.9}
        elif kind == 5:
            fields |= {"temperature": 1.3, "seed": i, "logprobs": 2}
        elif kind == 6:
            fields |= {"min_tokens": 12, "ignore_eos": False, "stop_token_ids": list(range(40, 90)), "logprobs": 1}
        out.append((ids, SamplingParams(**fields), BAD if kind in (5, 7) else ()))
    return out


def run(decoder, **options) -> TinyEngine:
    engine = TinyEngine(decoder, **options)
    for i, (ids, params, bad) in enumerate(penalised_requests()):
        engine.submit(i, ids, params, bad=bad)
    engine.run()
    return engine


@pytest.fixture(scope="module")
def together(decoder):
    return run(decoder)


def test_greedy_tokens_equal_the_formulas(decoder, together) -> None:
    """An oracle without cache or batch: logits of the whole text, the published formulas, argmax."""
    for i, (ids, params, bad) in enumerate(penalised_requests()):
        if params.temperature:
            continue
        text = list(ids)
        for token in together.tokens[i, 0]:
            logits = Sequences(decoder, 1, max_len=256).prefill([text], 256)[0][-1].numpy().copy()
            assert int(expected(logits, text, len(ids), params, bad).argmax()) == token
            text.append(token)


def expected(
    logits: np.ndarray, text: list[int], prompt: int, params: SamplingParams, bad: tuple[tuple[int, ...], ...]
) -> np.ndarray:
    for word in bad:
        if text[len(text) - len(word) + 1 :] == list(word[:-1]):
            logits[word[-1]] = -np.inf
    if len(text) - prompt < params.min_tokens:
        logits[[EOS, *(params.stop_token_ids or ())]] = -np.inf
    output = text[prompt:]
    for token in set(text):
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
        count = output.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 2, "budget": 16},
        {"budget": 64, "block_size": 8, "cache": False},
        {"blocks": 20, "block_size": 8, "depth": 1, "max_len": 160},
        {"seqs": 3, "budget": 24},
    ],
    ids=str,
)
def test_same_under_every_schedule(decoder, together, options) -> None:
    engine = run(decoder, **options)
    assert engine.tokens == together.tokens
    if "blocks" in options:
        assert engine.scheduler.stats.preemptions > 20


def test_alone_and_together(decoder, together) -> None:
    for i, (ids, params, bad) in enumerate(penalised_requests()):
        engine = TinyEngine(decoder)
        engine.submit(i, ids, params, bad=bad)
        engine.run()
        assert engine.tokens == {key: value for key, value in together.tokens.items() if key[0] == i}


def test_bans_hold(together) -> None:
    for i, (ids, params, bad) in enumerate(penalised_requests()):
        for child in range(params.n):
            output = together.tokens[i, child]
            text = ids + output
            for word in bad:
                ends = range(len(ids), len(text))
                assert not any(tuple(text[end - len(word) + 1 : end + 1]) == word for end in ends)
            if params.allowed_token_ids:
                assert set(output) <= set(params.allowed_token_ids)
            if params.min_tokens:
                stops = {EOS, *(params.stop_token_ids or ())}
                assert not stops & set(output[: params.min_tokens])
                assert output[-1] in stops or len(output) == params.max_tokens


def test_b12_min_tokens_against_a_bias_to_every_end(decoder) -> None:
    """Exactly `min_tokens` ordinary tokens, then an end id."""
    engine = TinyEngine(decoder)
    bias = {EOS: 100, 9: 100}
    params = SamplingParams(min_tokens=10, max_tokens=20, temperature=0, logit_bias=bias, stop_token_ids=[9])
    engine.submit(1, [4, 5, 6], params)
    engine.run()
    output = engine.tokens[1, 0]
    assert len(output) == 11 and output[-1] in (EOS, 9) and not {EOS, 9} & set(output[:10])


# Log-probabilities of prompts


PROMPT = [random.Random(1).randrange(3, VOCAB) for _ in range(70)]


def log_softmax(decoder) -> torch.Tensor:
    logits = Sequences(decoder, 1, max_len=128).prefill([PROMPT], 128)[0]
    return torch.log_softmax(logits, dim=-1)


def check_prompt(engine: TinyEngine, number: int, logprobs: torch.Tensor, count: int) -> None:
    found = engine.prompts[number]
    assert sorted(found) == list(range(1, len(PROMPT)))
    for position, entry in found.items():
        row = logprobs[position - 1]
        assert entry.chosen == pytest.approx(float(row[PROMPT[position]]), abs=1e-9)
        assert entry.rank == int((row > row[PROMPT[position]]).sum()) + 1
        assert entry.ids.tolist() == row.topk(count).indices.tolist()
        assert entry.values.tolist() == pytest.approx(row.topk(count).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("budget", [7, 64, 2048])
@pytest.mark.parametrize("depth", [0, 2])
def test_b30_prompt_logprobs_cold_and_warm(decoder, budget, depth) -> None:
    logprobs = log_softmax(decoder)
    engine = TinyEngine(decoder, budget=budget, depth=depth)
    asks = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2)
    for number, params in enumerate([asks, asks, asks, SamplingParams(max_tokens=3, temperature=0), asks]):
        ids = PROMPT if number != 3 else PROMPT[:48]
        engine.submit(number, ids, params)
        engine.run()
        if number != 3:
            check_prompt(engine, number, logprobs, 2)
    assert engine.tokens[0, 0] == engine.tokens[4, 0]


def test_prompt_logprobs_beside_others(decoder) -> None:
    """In one batch with plain requests, n = 3, and a pool so small that sequences give way."""
    logprobs = log_softmax(decoder)
    engine = TinyEngine(decoder, blocks=18, block_size=8, budget=24, max_len=144)
    for number in range(9):
        asks = {"prompt_logprobs": 1, "n": 3 if number == 3 else 1} if number % 3 == 0 else {}
        engine.submit(number, PROMPT, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, **asks))
    engine.run()
    assert engine.scheduler.stats.preemptions > 5
    assert sorted(engine.prompts) == [0, 3, 6]
    for number in engine.prompts:
        check_prompt(engine, number, logprobs, 1)
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) == 1


def test_prompt_of_one_token(decoder) -> None:
    engine = TinyEngine(decoder)
    engine.submit(1, [5], SamplingParams(max_tokens=2, prompt_logprobs=0))
    engine.run()
    assert engine.prompts == {}


# What is refused


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": float("nan")},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"presence_penalty": 2.5},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -3},
        {"logit_bias": {-1: 5}},
        {"logit_bias": {"abc": 1}},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": dict.fromkeys(range(2000), 1.0)},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [1.5]},
        {"allowed_token_ids": [-2]},
        {"allowed_token_ids": list(range(5000))},
        {"bad_words": [" "]},
        {"bad_words": ["\n"]},
        {"bad_words": [""]},
        {"bad_words": ["x"] * 5000},
        {"bad_words": "word"},
        {"bad_words": [7]},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 1000},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"top_k": -2},
        {"seed": 1 << 63},
        {"seed": -(1 << 63) - 1},
        {"seed": "7"},
        {"seed": True},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_parameters_out_of_range(fields: dict[str, Any]) -> None:
    """CASES B-10, B-11, B-15, B-18, B-19 for the Python interface."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param in fields


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {VOCAB: 1}}, {"allowed_token_ids": [VOCAB]}, {"stop_token_ids": [VOCAB], "min_tokens": 2}],
    ids=str,
)
def test_ids_outside_the_vocabulary(decoder, fields) -> None:
    """CASES B-11, B-13: the request is refused, the engine goes on."""
    engine = TinyEngine(decoder)
    with pytest.raises(RequestError) as caught:
        engine.submit(1, [3, 4], SamplingParams(**fields))
    assert caught.value.param in fields
    engine.submit(2, [3, 4], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.run()
    assert len(engine.tokens[2, 0]) == 2


def test_biases_are_clamped(decoder) -> None:
    engine = TinyEngine(decoder)
    engine.submit(1, [3, 4], SamplingParams(max_tokens=3, logit_bias={5: 1000}, temperature=0))
    engine.run()
    assert engine.tokens[1, 0] == [5, 5, 5]


@pytest.mark.parametrize("keep", [1, 10, -1])
def test_b26_truncated_prompts(decoder, keep: int) -> None:
    from octavo.engine.client import cut_prompt

    engine = TinyEngine(decoder, max_len=64)
    ids = cut_prompt(PROMPT, SamplingParams(truncate_prompt_tokens=keep), engine.limits)
    assert list(ids) == PROMPT[-(63 if keep == -1 else keep) :]
    engine.submit(1, list(ids), SamplingParams(max_tokens=1))
    engine.run()


def test_b26_more_than_the_limit(decoder) -> None:
    from octavo.engine.client import cut_prompt

    limits = TinyEngine(decoder, max_len=64).limits
    with pytest.raises(RequestError, match="64"):
        cut_prompt(PROMPT, SamplingParams(truncate_prompt_tokens=65), limits)
