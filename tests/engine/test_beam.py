"""Beam search on a made-up model equals `transformers`, for every way to stop."""

from __future__ import annotations

import pytest
import torch

from octavo.engine.beam import BeamGroup, BeamParams, BeamSearch
from octavo.engine.client import build_beam_request
from octavo.types import SamplingParams
from tests.engine.tiny import TinyEngine, tiny_decoder

VOCAB, EOS = 24, 3


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.6,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().double()


@torch.inference_mode()
def search(model, prompt, params):
    run = BeamSearch(params)
    while not run.done:
        ids = torch.tensor([prompt + list(beam.tokens) for beam in run.running])
        best = torch.log_softmax(model(ids).logits[:, -1], -1).topk(min(params.candidates, VOCAB))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        run.advance([list(zip(ids, values, strict=True)) for ids, values in rows])
    return run.results()


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_equal_to_transformers(model, early_stopping, length_penalty, width):
    if width == 1:
        early_stopping = False  # transformers runs greedy search then; nothing to stop early
    for prompt in ([1, 5, 9], [1, 7], [2, 4, 6, 8]):
        params = BeamParams(width, 12, frozenset({EOS}), length_penalty, early_stopping)
        results = search(model, prompt, params)
        if width == 1:
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
            assert list(results[0].tokens) == expected[0, len(prompt) :].tolist()
            continue
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_new_tokens=12,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for i, beam in enumerate(results):
            theirs = expected.sequences[i, len(prompt) :].tolist()
            assert list(beam.tokens) == theirs[: len(beam.tokens)]
            assert beam.score == pytest.approx(float(expected.sequences_scores[i]), abs=1e-3)


def test_on_the_engine_it_equals_the_same_search_without_a_cache():
    """Forks, copies and regrouping change nothing: beams of a tiny model, alone and beside other requests."""
    decoder = tiny_decoder()
    params = BeamParams(4, 24, frozenset({EOS}), 0.7, False)
    prompts = [[5 + i % 100 for i in range(length)] for length in (7, 16, 33, 200)]
    alone = []
    for ids in prompts:
        (beams, stats) = beams_of(TinyEngine(decoder), [ids], params)
        alone.append(beams[0])
        assert stats.block_copies > 0
        scored = BeamSearch(params)
        engine = TinyEngine(decoder, cache=False)
        while not scored.done:  # every beam recomputed from nothing
            candidates = []
            for number, beam in enumerate(scored.running):
                key = len(scored.running[0].tokens) * 100 + number
                greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=params.candidates, ignore_eos=True)
                engine.submit(key, ids + list(beam.tokens), greedy)
                engine.run()
                best = engine.best[key, 0][0]
                candidates.append(list(zip(best.ids.tolist(), best.values.tolist(), strict=True)))
            scored.advance(candidates)
        assert [b.tokens for b in scored.results()] == [b.tokens for b in beams[0]]
        assert [b.score for b in scored.results()] == pytest.approx([b.score for b in beams[0]], abs=1e-4)
    for options in ({}, {"depth": 1}, {"block_size": 8, "budget": 16}, {"blocks": 40, "max_len": 640}):
        together, _ = beams_of(TinyEngine(decoder, **options), prompts, params)
        assert [[b.tokens for b in beams] for beams in together] == [[b.tokens for b in beams] for beams in alone]


def beams_of(engine: TinyEngine, prompts: list[list[int]], params: BeamParams):
    groups = []
    for number, ids in enumerate(prompts):
        engine.scheduler.submit(build_beam_request(number, ids, params, engine.limits))
        groups.append(BeamGroup(number, BeamSearch(params)))
    while not all(group.done for group in groups):
        for batch in engine.loop.step():
            for group in groups:
                group.take_in(batch, engine.scheduler)
    while engine.scheduler.has_work():
        engine.step()
    pool = engine.scheduler.state.pool
    assert pool.free == pool.usable
    return [group.search.results() for group in groups], engine.scheduler.stats


def test_width_costs_few_blocks():
    decoder = tiny_decoder()
    ids = list(range(3, 103)) * 10
    peaks = []
    for width in (1, 4):
        engine = TinyEngine(decoder, max_len=2048)
        _, stats = beams_of(engine, [ids], BeamParams(width, 64))
        peaks.append(stats.peak_blocks)
    assert peaks[1] < 1.3 * peaks[0]
