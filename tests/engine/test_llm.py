"""The offline front end on the embedded model: prompts in every form, vLLM's results, refusals that lose nothing."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ModelError, RequestError
from octavo.types import BeamSearchParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module", params=["cpu", "torch-cpu"])
def llm(request):
    return LLM(max_model_len=512, num_gpu_blocks_override=200, dtype="float32", device=request.param)


def test_prompts_in_every_form(llm):
    text = "The three laws of thermodynamics are"
    ids = llm.tokenizer.encode(text)
    forms = [text, {"prompt": text}, {"prompt_token_ids": ids}, ids]
    outputs = llm.generate(forms, GREEDY)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, text, None, None]
    first = outputs[0]
    assert first.finished and first.prompt_token_ids == ids
    assert first.outputs[0].finish_reason == "length"
    assert len(first.outputs[0].token_ids) == 8
    assert llm.generate(text, GREEDY)[0].outputs[0].text == first.outputs[0].text
    assert llm.generate(ids, GREEDY)[0].outputs[0].text == first.outputs[0].text


def test_chat_ends_at_the_end_token(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32))
    completion = output.outputs[0]
    assert completion.text == PARIS
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.token_ids[-1] == llm.tokenizer.eos_id
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_a_stream_grows_to_what_generate_returns(llm):
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=16, logprobs=1)
    whole = llm.generate("Once upon a time,", params)[0].outputs[0]
    seen = list(llm.stream("Once upon a time,", params))
    texts = [output.outputs[0].text for output in seen]
    assert all(after.startswith(before) for before, after in zip(texts, texts[1:], strict=False))
    assert texts[-1] == whole.text and seen[-1].finished and len(seen) == 16
    assert seen[-1].outputs[0].token_ids == whole.token_ids
    assert len(seen[-1].outputs[0].logprobs) == 16


def test_tokens_without_text(llm):
    params = {"temperature": 0.7, "seed": 3, "max_tokens": 6}
    plain, bare = llm.generate(
        ["Once upon a time,"] * 2, [SamplingParams(**params), SamplingParams(**params, detokenize=False)]
    )
    assert bare.outputs[0].token_ids == plain.outputs[0].token_ids and len(bare.outputs[0].token_ids) == 6
    assert plain.outputs[0].text and not bare.outputs[0].text
    times = bare.metrics
    assert times.arrival_time <= times.first_token_time < times.last_token_time <= times.finished_time
    assert times.num_generation_tokens == 6


def test_prompts_that_are_cached_come_in_faster(llm, monkeypatch):
    head = llm.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 20)[:192]
    budget = llm.engine.facts.max_num_batched_tokens
    prompts = [[*head, i] for i in range(4 * budget // len(head))]
    known = []
    step = llm.engine.loop.step

    def counted():
        known.append(len(llm.engine.scheduler.state.requests))
        return step()

    monkeypatch.setattr(llm.engine.loop, "step", counted)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert known[0] == -(-budget // len(prompts[0])), "one step's worth, while nothing is cached"
    assert known[1] >= len(prompts) - 1, "what is cached costs no room"


def test_leaving_a_stream_aborts_it(llm):
    for _ in llm.stream("Once upon a time,", SamplingParams(max_tokens=200, ignore_eos=True)):
        break
    assert llm.generate("Hello", GREEDY)[0].finished
    pool = llm.engine.scheduler.state.pool
    assert pool.free == pool.usable


def test_one_set_of_parameters_each(llm):
    outputs = llm.generate(["Hello", "Hello"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5, n=2)])
    assert [len(output.outputs) for output in outputs] == [1, 2]
    assert [len(completion.token_ids) for completion in outputs[1].outputs] == [5, 5]
    with pytest.raises(RequestError, match="2 prompts and 1"):
        llm.generate(["Hello", "Hello"], [GREEDY])


def test_a_stop_string_ends_one_child(llm):
    params = SamplingParams(temperature=0, max_tokens=40, stop=["Paris"])
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    assert output.outputs[0].text == "The capital of France is "
    assert output.outputs[0].stop_reason == "Paris"
    pool = llm.engine.scheduler.state.pool
    assert pool.free == pool.usable


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ([49152], "49152"),
        ("word " * 600, "512"),
        ({"prompt_token_ids": "text"}, "str"),
        ({}, "empty"),
        ("\ud800", "Unicode"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_runs(llm, prompt, words):
    before = llm.stats.generated_tokens
    with pytest.raises(RequestError, match=words) as caught:
        llm.generate(["Hello", prompt], GREEDY)
    assert "Prompt 1" in str(caught.value)
    assert llm.stats.generated_tokens == before
    assert llm.generate("Hello", GREEDY)[0].finished


def test_cached_tokens_are_reported(llm):
    ids = list(range(100, 180))
    assert llm.generate(ids, GREEDY, cache_salt="x")[0].num_cached_tokens == 0
    assert llm.generate(ids, GREEDY, cache_salt="x")[0].num_cached_tokens == 79
    assert llm.generate(ids, GREEDY, cache_salt="y")[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": "/no/such/folder"}, ModelError, "/no/such/folder"),
        ({"block_size": 24}, ConfigError, "24"),
        ({"dtype": "int3"}, ConfigError, "int3"),
        ({"device": "tpu"}, ConfigError, "tpu"),
        ({"max_model_len": 100_000}, ConfigError, "100000.*8192"),
        ({"gpu_memory": 1}, ConfigError, "gpu_memory"),
        ({"load_format": "pickle"}, ConfigError, "pickle"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options, error, words):
    with pytest.raises(error, match=words):
        LLM(**options)


@pytest.mark.parametrize(("length_penalty", "early_stopping"), [(1.0, False), (2.0, True), (0.0, "never")])
def test_beam_search_equals_transformers(llm, transformers_model, length_penalty, early_stopping):
    import torch

    params = BeamSearchParams(
        beam_width=4, max_tokens=12, length_penalty=length_penalty, early_stopping=early_stopping
    )
    for text in ("The capital of France is", "Once upon a time, in a village by the river,"):
        ids = llm.tokenizer.encode(text)
        (output,) = llm.beam_search([text], params)
        expected = transformers_model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=12,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            do_sample=False,
            eos_token_id=llm.tokenizer.eos_id,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for beam, tokens, score in zip(output.sequences, expected.sequences, expected.sequences_scores, strict=True):
            assert beam.tokens == tokens[len(ids) : len(ids) + len(beam.tokens)].tolist()
            assert beam.score == pytest.approx(float(score), abs=1e-3)
        assert output.sequences[0].text


@pytest.fixture(scope="module")
def transformers_model():
    from octavo.bench.peer import load_transformers

    return load_transformers(None, "float32", "auto")
