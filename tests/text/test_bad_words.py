"""Bad words: the ways to spell a word, fewest tokens first, and a bound on the work whatever the words are."""

from __future__ import annotations

from itertools import combinations

import pytest

from octavo.errors import RequestError
from octavo.text import bad_words
from octavo.text.bad_words import bad_sequences, spellings


def ids_of(data: bytes) -> list[int]:
    """A vocabulary of all single bytes, of pairs with "a", and of two tokens for "abc"."""
    if len(data) == 1:
        return [data[0]]
    if len(data) == 2 and b"a" in data:
        return [1000 + data[0] * 256 + data[1]]
    return [7, 8] if data == b"abc" else []


def all_spellings(text: bytes) -> set[tuple[int, ...]]:
    """By trying every way to cut the text."""
    found: set[tuple[int, ...]] = set()
    for count in range(len(text)):
        for cuts in combinations(range(1, len(text)), count):
            sequences: list[tuple[int, ...]] = [()]
            for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
                sequences = [(*ids, token) for ids in sequences for token in ids_of(text[begin:end])]
            found.update(sequences)
    return found


@pytest.mark.parametrize("text", [b"a", b"abc", b"abcabc", b"xyaxy", b"aaaaaaa"])
def test_every_spelling_is_found_once_fewest_tokens_first(text: bytes) -> None:
    found = spellings(text, ids_of, 10_000)
    assert len(found) == len(set(found)) and set(found) == all_spellings(text)
    assert list(map(len, found)) == sorted(map(len, found))
    assert spellings(text, ids_of, 3) == found[:3]


def test_no_spelling_is_an_empty_list() -> None:
    assert spellings(b"abc", lambda _: [], 5) == [] and spellings(b"", ids_of, 5) == []


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def ids_of_bytes(self, data: bytes) -> list[int]:
        self.count += 1
        return [len(data)] if len(set(data)) == 1 else [0] if len(data) == 1 else []


@pytest.mark.parametrize(
    "words", [["a" * 64], ["a" * 20] * 64, ["\u20ac" * 64], ["a" * 64] * 64, ["\u20ac" * 64] * 64]
)
def test_the_work_is_bounded(words: list[str]) -> None:
    """Long runs of one character have more spellings than anything else."""
    tokenizer = Counting()
    try:
        assert bad_sequences(words, tokenizer)  # type: ignore[arg-type]
    except RequestError as error:
        assert error.param == "bad_words" and len(words) == 64 and tokenizer.count == 0
    assert tokenizer.count <= bad_words._LOOKUPS
