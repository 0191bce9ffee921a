"""Growing text equals the text decoded at once; stop strings are found wherever the tokens are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.text.detokenizer import Detokenizer, StopChecker
from octavo.text.tokenizer import Tokenizer

TEXTS = ["😀 😀 😀 😀 😀 😀 😀 😀", "日本語、日本語、日本語、日本語、", "naïve — 👩‍👩‍👧‍👦 e\u0301", "plain text"]


def grown(tokenizer: Tokenizer, ids: list[int], skip: bool = True, after_prompt: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip, after_prompt)
    return [*(detokenizer.push([index]) for index in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_no_delta_holds_half_a_character(smollm2: Tokenizer, text: str) -> None:
    """Case B-01."""
    deltas = grown(smollm2, smollm2.encode(text))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_cut_in_mid_character_ends_with_one_replacement(smollm2: Tokenizer) -> None:
    """Case B-01."""
    ids = smollm2.encode("ok 😀")
    deltas = grown(smollm2, ids[:-1])
    assert "".join(deltas) == "ok \ufffd" == smollm2.decode(ids[:-1])
    assert "\ufffd" not in "".join(deltas[:-1])


@settings(max_examples=300)
@given(st.lists(st.integers(0, 49300), max_size=40), st.booleans())
def test_joined_deltas_equal_decode(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(grown(smollm2, ids, skip)) == smollm2.decode(ids, skip)


@settings(max_examples=100)
@given(st.text(alphabet="😀日本é\u0301👩‍👧a \n", max_size=30))
def test_joined_deltas_of_emoji_and_cjk(smollm2: Tokenizer, text: str) -> None:
    deltas = grown(smollm2, smollm2.encode(text))
    assert "".join(deltas) == text and not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=300)
@given(st.data())
def test_sentencepiece_deltas_for_all_prefixes(llama2: Tokenizer, data: st.DataObject) -> None:
    """Case B-55."""
    ids = data.draw(st.lists(st.integers(0, llama2.vocab_size + 5), max_size=20))
    for skip in (True, False):
        for after_prompt in (True, False):
            detokenizer, text = Detokenizer(llama2, skip, after_prompt), ""
            for index in ids:
                text += detokenizer.push([index])
            assert text + detokenizer.finish() == llama2.decode(ids, skip, after_prompt)


def test_sentencepiece_text_for_all_prefixes(llama2: Tokenizer) -> None:
    """Case B-55."""
    ids = llama2.encode("Hello world, it's 5 o'clock — naïve 😀")
    for end in range(len(ids) + 1):
        assert "".join(grown(llama2, ids[:end])) == llama2.decode(ids[:end])


def run_checker(text: str, stops: list[str], cuts: list[int], include: bool = False) -> tuple[str, str | None]:
    """Feeds `text` in pieces; returns the joined deltas and the stop found."""
    checker = StopChecker(stops, include)
    joined = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        delta, stop = checker.push(text[start:end])
        joined += delta
        if stop is not None:
            return joined, stop
    return joined + checker.finish(), None


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first end of any stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500)
@given(
    st.text(alphabet="ab c", max_size=30),
    st.lists(st.text(alphabet="ab c", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=12),
    st.booleans(),
)
def test_stop_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    joined, stop = run_checker(text, stops, cuts, include)
    expected_text, expected = oracle(text, stops, include)
    assert (joined, stop and len(stop)) == (expected_text, expected and len(expected))


@pytest.mark.parametrize("start", [4, 9, 17])
def test_stop_over_tokens_leaks_nothing(smollm2: Tokenizer, start: int) -> None:
    """Case B-02."""
    text = "The quick brown fox jumps over the lazy dog again and again."
    stop = text[start : start + 12]
    detokenizer, checker = Detokenizer(smollm2), StopChecker([stop])
    sent = ""
    for index in smollm2.encode(text):
        delta, found = checker.push(detokenizer.push([index]))
        sent += delta
        assert text[:start].startswith(sent)
        if found is not None:
            break
    assert found == stop and sent == text[:start]


@pytest.mark.parametrize("count", [1, 5, 12])
def test_held_text_comes_out_at_the_end(smollm2: Tokenizer, count: int) -> None:
    """Case B-03."""
    ids = smollm2.encode("a @@never@@nev and @@@@never then @@never@")[:count]
    detokenizer, checker = Detokenizer(smollm2), StopChecker(["@@never@@never@@"])
    text = ""
    for index in ids:
        text += checker.push(detokenizer.push([index]))[0]
    assert text + checker.push(detokenizer.finish())[0] + checker.finish() == smollm2.decode(ids)


def test_stop_included_on_request() -> None:
    assert run_checker("one END two", ["END"], [5], include=True) == ("one END", "END")
    assert run_checker("one END two", ["END"], [5]) == ("one ", "END")


def test_first_end_wins() -> None:
    assert run_checker("abcd", ["bcd", "c"], []) == ("ab", "c")
    assert run_checker("xabc", ["bc", "abc"], []) == ("x", "abc")


def test_no_longer_held_than_needed() -> None:
    checker = StopChecker(["stop"])
    assert checker.push("we st") == ("we ", None)
    assert checker.push("art") == ("start", None)
    assert checker.push("no prefix") == ("no prefix", None)


def test_unarmed_text_passes() -> None:
    checker = StopChecker(["END"])
    assert checker.push("END EN", armed=False) == ("END EN", None)
    assert checker.push("D") == ("D", None)
    assert checker.push(" EN") == (" ", None)
    assert checker.push("x", armed=False) == ("ENx", None)
    assert checker.push("END") == ("", "END")


def test_empty_stop_string_is_refused() -> None:
    """Case B-23."""
    with pytest.raises(RequestError, match="empty"):
        StopChecker(["END", ""])


def test_long_repetitive_stop() -> None:
    checker = StopChecker(["a" * 20_000 + "b"])
    for _ in range(500):
        checker.push("a" * 100)
    assert checker.push("b") == ("", "a" * 20_000 + "b")
