"""Beam search on a made-up model equals `transformers`, for every way to stop."""

from __future__ import annotations

import pytest
import torch

from octavo.engine.beam import BeamParams, BeamSearch

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
