"""The text of a request: stop strings across tokens, end tokens without text, logprobs, several children."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.text.loop_guard import LoopGuard
from octavo.text.outputs import RequestText
from octavo.text.tokenizer import Tokenizer
from octavo.types import RepetitionDetection, SamplingParams
from octavo.weights.gguf import GgufCheckpoint

TEXT = "The quick brown fox 😀 jumps over 日本語 the lazy dog."


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GgufCheckpoint(smollm2_gguf).metadata)


def feed(tokenizer: Tokenizer, text: str, reason: str = "length", **options) -> tuple[RequestText, list[str]]:
    """Push the tokens of `text` one by one; returns the state and the text after each token."""
    request = RequestText("0", None, [1], SamplingParams(max_tokens=200, **options), tokenizer)
    seen = []
    for token in tokenizer.encode(text):
        stopped = request.push(0, token, None, ends=False)
        seen.append(request.output.outputs[0].text)
        if stopped:
            break
    request.end(0, reason)
    return request, seen


def test_text_only_grows_and_ends_whole(tokenizer):
    request, seen = feed(tokenizer, TEXT)
    assert request.output.outputs[0].text == TEXT
    assert all(TEXT.startswith(text) and "\ufffd" not in text for text in seen)
    assert request.finished and request.output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("start", [4, 10, 21, 30])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens(tokenizer, start, include):
    stop = TEXT[start : start + 9]  # case B-02
    request, seen = feed(tokenizer, TEXT, stop=stop, include_stop_str_in_output=include)
    completion = request.output.outputs[0]
    assert completion.text == TEXT[: start + (9 if include else 0)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert all(len(text) <= len(completion.text) for text in seen)


def test_held_back_text_comes_out_at_the_end(tokenizer):
    request, _ = feed(tokenizer, TEXT, stop=[TEXT[-8:] + "@@"])  # case B-03
    assert request.output.outputs[0].text == TEXT
    assert request.output.outputs[0].finish_reason == "length"


def test_tokens_after_a_stop_string_are_dropped(tokenizer):
    request, _ = feed(tokenizer, TEXT, stop="quick")
    before = list(request.output.outputs[0].token_ids)
    assert not request.push(0, 5, None, ends=False)
    request.end(0, "abort")
    assert request.output.outputs[0].token_ids == before
    assert request.output.outputs[0].finish_reason == "stop"


def test_an_end_token_adds_no_text(tokenizer):
    for stop_ids, reason in (((), None), ((7,), 7)):  # case B-08
        params = SamplingParams(stop_token_ids=stop_ids)
        request = RequestText("0", None, [1], params, tokenizer)
        for token in tokenizer.encode("Hello there"):
            request.push(0, token, None, ends=False)
        request.push(0, stop_ids[0] if stop_ids else 2, None, ends=True)
        request.end(0, "stop")
        completion = request.output.outputs[0]
        assert completion.text == "Hello there"
        assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)


def test_children_and_logprobs(tokenizer):
    request = RequestText("0", "Hi", [1], SamplingParams(n=2, logprobs=2), tokenizer)
    found = SimpleNamespace(chosen=-3.0, rank=5, ids=[11, 12], values=[-0.5, -1.0])
    request.push(0, 13, found, ends=False)
    request.push(1, 11, SimpleNamespace(chosen=-0.5, rank=1, ids=[11, 12], values=[-0.5, -1.0]), ends=False)
    request.end(0, "length")
    assert not request.finished
    request.end(1, "abort")
    first, second = request.snapshot().outputs
    assert request.finished
    assert {token: (entry.logprob, entry.rank) for token, entry in first.logprobs[0].items()} == {
        13: (-3.0, 5), 11: (-0.5, 1), 12: (-1.0, 2),
    }  # fmt: skip
    assert len(second.logprobs[0]) == 2
    assert first.cumulative_logprob == -3.0


def test_without_detokenising_there_are_ids_only(tokenizer):
    request, _ = feed(tokenizer, TEXT, detokenize=False)
    assert request.output.outputs[0].text == ""
    assert request.output.outputs[0].token_ids == tokenizer.encode(TEXT)


def test_a_loop_ends_with_its_own_reason(tokenizer):
    """Off by default; a pattern that stands eight times in a row ends the output, and its text is whole."""
    text = "It goes" + " and on" * 40
    plain, _ = feed(tokenizer, text)
    assert plain.output.outputs[0].text == text
    guarded, seen = feed(tokenizer, text, repetition_detection=RepetitionDetection())
    completion = guarded.output.outputs[0]
    assert completion.finish_reason == "repetition" and guarded.finished
    assert completion.text == "It goes" + " and on" * 8
    assert text.startswith(seen[-1])


def test_periods_and_counts_of_the_loop_guard():
    def length(tokens, **wish):
        guard = LoopGuard(RepetitionDetection(**wish))
        return next((i + 1 for i, token in enumerate(tokens) if guard.push(token)), None)

    assert length([7] * 100) == 8
    assert length([1, 2, 3] * 100, min_count=4) == 12
    assert length([1, 2, 3, 4, 5] * 100, max_pattern_size=4) is None
    assert length([7] * 100, min_pattern_size=3, min_count=2) == 6
    assert length(list(range(50)) + [9, 8] * 20, min_count=3) == 56
    assert length(list(range(3000)) + [5] * 9) == 3008


def test_ids_of_the_padded_vocabulary_have_no_text(tokenizer):
    """Case B-57: the head can be wider than the tokenizer; such an id adds nothing, also to log-probabilities."""
    request = RequestText("0", None, [1], SamplingParams(max_tokens=9, logprobs=1), tokenizer)
    entry = SimpleNamespace(chosen=-0.5, rank=1, ids=[60_000], values=[-0.5])
    for token in (*tokenizer.encode("one"), 60_000, *tokenizer.encode(" two"), 49_152):
        entry.ids = [token]
        assert not request.push(0, token, entry, ends=False)
    request.end(0, "length")
    output = request.output.outputs[0]
    assert output.text == "one two" and len(output.token_ids) == len(output.logprobs) == 4
    assert output.logprobs[1][60_000].decoded_token == ""
