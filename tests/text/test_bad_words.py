"""Ways to spell a word in a vocabulary: complete for short words, bounded for long ones."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

import pytest

from octavo.errors import RequestError
from octavo.text.bad_words import bad_sequences, spellings
from octavo.text.tokenizer import Tokenizer
from octavo.weights.gguf import GgufCheckpoint
from tests.text.test_gguf_spm import vocabulary


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GgufCheckpoint(smollm2_gguf).metadata)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(vocabulary(True))


def test_all_ways_and_no_other() -> None:
    """Against brute force over all sequences of a tiny vocabulary."""
    vocabulary = {b"a": [0], b"b": [1, 2], b"ab": [3], b"ba": [4], b"aba": [5]}
    lengths = [(bytes_, i) for bytes_, ids in vocabulary.items() for i in ids]
    brute = {
        tuple(i for _, i in way)
        for count in range(1, 5)
        for way in product(lengths, repeat=count)
        if b"".join(part for part, _ in way) == b"abab"
    }
    found = spellings(b"abab", lambda data: vocabulary.get(data, []), 1000)
    assert set(found) == brute and len(found) == len(brute)
    assert [len(ids) for ids in found] == sorted(len(ids) for ids in found)


@pytest.mark.parametrize("word", ["Paris", "naïve", "日本", "don't", "  cat ", "x"])
def test_every_sequence_spells_the_word(smollm2: Tokenizer, sentencepiece: Tokenizer, word: str) -> None:
    for tokenizer in (smollm2, sentencepiece):
        found = bad_sequences([word], tokenizer)
        plain = word.strip().encode()
        assert {b"".join(map(tokenizer.token_bytes, ids)) for ids in found} == {plain, b" " + plain}
        own = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word.strip(), " " + word.strip())]
        assert not set(own).isdisjoint(found)


def test_the_number_is_bounded(smollm2: Tokenizer) -> None:
    begin = time.monotonic()
    found = bad_sequences(["internationalisation", *(f"incomprehensibility{i}" for i in range(63))], smollm2)
    assert len(found) <= 1024 and time.monotonic() - begin < 5
    assert sum(map(len, found)) < 16384 - 4096


def test_without_a_tokenizer() -> None:
    assert bad_sequences([], None) == ()
    with pytest.raises(RequestError, match="tokenizer"):
        bad_sequences(["x"], None)
