"""Bad words as token sequences: every way, within reason, in which a vocabulary can spell a word.

Banning only the way in which the tokenizer itself would write a word leaves the model all others, and a greedy one
takes the next best at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.errors import RequestError
from octavo.text.tokenizer import Tokenizer

_SPELLINGS = 1024  # of one request, over all its words, at most
_PER_WORD = 128
_PIECE_BYTES = 64
_LOOKUPS = 1 << 15  # in the vocabulary, for one request


def bad_sequences(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell one of `words`, alone and after a space.

    RequestError without a tokenizer, and for words that are too much work. Takes up to a tenth of a second.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer.", "Use logit_bias or allowed_token_ids.", "bad_words")
    most = max(min(_PER_WORD, _SPELLINGS // (2 * len(words))), 1)
    texts = [text for word in words for plain in (word.strip().encode(),) for text in (plain, b" " + plain)]
    lookups = sum(len(text) * min(len(text), 2 * _PIECE_BYTES) // 2 for text in texts)
    if lookups > _LOOKUPS:
        raise RequestError(
            f"bad_words are too many or too long: they need {lookups} look-ups, and {_LOOKUPS} are allowed.",
            "Give fewer or shorter words.",
            "bad_words",
        )
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        found |= dict.fromkeys(spellings(text, tokenizer.ids_of_bytes, most))
    if not found:
        raise RequestError("bad_words cannot be written in this vocabulary.", "Leave them out.", "bad_words")
    return tuple(found)


def spellings(text: bytes, ids_of: Callable[[bytes], list[int]], most: int) -> list[tuple[int, ...]]:
    """Up to `most` token sequences whose bytes are `text`, those with the fewest tokens first.

    First, from the end: which tokens can come where, and with how many tokens the rest can be spelled. The walk over
    sequences of one length then takes no step that leads nowhere.
    """
    size = len(text)
    pieces: list[list[tuple[int, int]]] = [[] for _ in text]  # by position: token, and where it ends
    lengths = [0] * size + [1]  # by position: bit k is set when k tokens can spell the rest
    for at in reversed(range(size)):
        for end in range(min(size, at + _PIECE_BYTES), at, -1):
            if lengths[end] and (ids := ids_of(text[at:end])):
                pieces[at] += [(token, end) for token in ids]
                lengths[at] |= lengths[end] << 1
    found: list[tuple[int, ...]] = []
    for length in range(1, size + 1):
        open_: list[tuple[tuple[int, ...], int]] = [((), 0)] if lengths[0] >> length & 1 else []
        while open_ and len(found) < most:
            begun, at = open_.pop()
            if at == size:
                found.append(begun)
                continue
            left = length - len(begun) - 1
            open_ += [((*begun, token), end) for token, end in reversed(pieces[at]) if lengths[end] >> left & 1]
    return found
