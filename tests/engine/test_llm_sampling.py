"""Sampling through `LLM` on the real model, with the native engine and with torch: texts, bans, log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import RequestError

PROMPT = "The sky above the harbour was"
ANIMAL = "My favourite animal is"


@pytest.fixture(scope="module", params=["cpu", "torch-cpu"])
def llm(request: pytest.FixtureRequest, smollm2_gguf) -> Iterator[LLM]:
    llm = LLM(device=request.param, dtype="float32", max_model_len=256, max_num_seqs=8, num_gpu_blocks_override=64)
    yield llm
    llm.engine.close()


def text_of(llm: LLM, prompt: object = PROMPT, **fields: object) -> str:
    fields = {"temperature": 0, "max_tokens": 24, "ignore_eos": True} | fields
    (output,) = llm.generate([prompt], SamplingParams(**fields), use_tqdm=False)
    return output.outputs[0].text


def test_b14_bad_words_do_not_come_up(llm: LLM) -> None:
    """Three words of the greedy text, banned together and one by one, with and without the space before them."""
    words = re.findall(r"(?<= )[a-z]{3,}", text_of(llm))[:3]
    assert len(set(words)) == 3
    for banned in ([words[0]], [words[1]], [words[2]], words):
        text = text_of(llm, bad_words=banned)
        assert not [word for word in banned if re.search(rf"(^|\W){word}(\W|$)", text)], (banned, text)


def test_b09_n_and_seed(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, temperature=1.2, max_tokens=12, ignore_eos=True)
    lists = [[c.text for c in llm.generate([ANIMAL], params, use_tqdm=False)[0].outputs] for _ in range(2)]
    assert lists[0] == lists[1]
    assert len(set(lists[0])) >= 3


def test_b18_top_k(llm: LLM) -> None:
    def text(top_k: int) -> str:
        return text_of(llm, "I like", temperature=1.5, seed=11, max_tokens=16, top_k=top_k)

    assert text(-1) == text(0) == text(10_000_000)
    assert text(1) == text_of(llm, "I like", max_tokens=16)
    assert text(-1) != text(1)


def test_repetition_penalty_breaks_a_loop(llm: LLM) -> None:
    loop = "one two one two one two one two one two"
    assert text_of(llm, loop, max_tokens=16).count("two") > 6
    assert text_of(llm, loop, max_tokens=16, repetition_penalty=2.0).count("two") < 3


def test_allowed_ids_and_bias(llm: LLM) -> None:
    yes, no = (llm.tokenizer.encode(word)[0] for word in (" yes", " no"))
    assert set(text_of(llm, allowed_token_ids=[yes, no]).split()) <= {"yes", "no"}
    assert text_of(llm, logit_bias={yes: 100}, max_tokens=3) == " yes yes yes"


def test_b30_prompt_logprobs(llm: LLM) -> None:
    """Every entry holds the prompt's own token; the same cold and warm; a likely continuation scores higher."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    prompt = "The capital of France is"
    cold, warm, twin = (
        llm.generate([f"{prompt} {city}"], params, use_tqdm=False)[0] for city in ("Paris", "Paris", "Rome")
    )
    ids, first, second = cold.prompt_token_ids, cold.prompt_logprobs, warm.prompt_logprobs
    assert first is not None and second is not None and first[0] is None and len(first) == len(ids)
    for token, one, two in zip(ids[1:], first[1:], second[1:], strict=True):
        assert one is not None and two is not None and token in one and list(one) == list(two)
        assert one[token].logprob == pytest.approx(two[token].logprob, abs=1e-3)
        assert one[token].logprob <= 0 and (one[token].rank == 1) == (len(one) == 1)
    paris, rome = (o.prompt_logprobs[-1][o.prompt_token_ids[-1]].logprob for o in (cold, twin))
    assert paris > rome + 1
    assert text_of(llm, prompt_logprobs=0) == text_of(llm)


def test_logprobs_of_several_completions(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, temperature=1, max_tokens=5, logprobs=2, top_k=1, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    for completion in output.outputs:
        assert completion.logprobs is not None and len(completion.logprobs) == 5
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert entry[token].rank == 1 and all(value.logprob > -1e4 for value in entry.values())
        total = sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total)


def test_b26_truncation(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT * 10)
    params = SamplingParams(max_tokens=4, temperature=0, truncate_prompt_tokens=10, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert output.prompt_token_ids == ids[-10:]
    assert output.outputs[0].text == text_of(llm, ids[-10:], max_tokens=4)
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        llm.generate([PROMPT], SamplingParams(truncate_prompt_tokens=257), use_tqdm=False)


def test_special_tokens_are_hidden_unless_asked_for(llm: LLM) -> None:
    end = llm.tokenizer.token_to_id("<|im_end|>")
    fields = {"logit_bias": {end: 100}, "max_tokens": 2}
    assert text_of(llm, **fields) == ""
    assert text_of(llm, skip_special_tokens=False, **fields) == "<|im_end|><|im_end|>"


def test_b17_logprobs_zero_is_on(llm: LLM) -> None:
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=3, logprobs=0, temperature=0), use_tqdm=False)
    assert [len(entry) for entry in output.outputs[0].logprobs or []] == [1, 1, 1]


def test_one_refusal_leaves_the_others(llm: LLM) -> None:
    for fields in ({"logit_bias": {9_999_999: 5}}, {"allowed_token_ids": [49152]}, {"stop_token_ids": [10_000_000]}):
        with pytest.raises(RequestError):
            llm.generate([PROMPT], SamplingParams(**fields), use_tqdm=False)
    assert text_of(llm, max_tokens=2)
