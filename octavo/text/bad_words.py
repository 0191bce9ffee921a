"""Bad words as token sequences: every way, within reason, in which a vocabulary can spell a word.

Banning only the way in which the tokenizer itself would write a word leaves the model all others, and a greedy one
takes the next best at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from octavo.errors import RequestError
from octavo.text.tokenizer import Tokenizer

_SPELLINGS = 1024  # of one request, over all its words, at most
_PER_WORD = 128
_PIECE_BYTES = 64
_OPEN = 4096


def bad_sequences(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell one of `words`, alone and after a space. RequestError without a tokenizer."""
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer.", "Use logit_bias or allowed_token_ids.", "bad_words")
    most = max(min(_PER_WORD, _SPELLINGS // (2 * len(words))), 1)
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = word.strip().encode()
        for text in (plain, b" " + plain):
            found |= dict.fromkeys(spellings(text, tokenizer.ids_of_bytes, most))
    if not found:
        raise RequestError("bad_words cannot be written in this vocabulary.", "Leave them out.", "bad_words")
    return tuple(found)


def spellings(text: bytes, ids_of: Callable[[bytes], list[int]], most: int) -> list[tuple[int, ...]]:
    """Up to `most` token sequences whose bytes are `text`, those with the fewest tokens first."""
    pieces = cache(ids_of)
    found: list[tuple[int, ...]] = []
    open_: list[tuple[tuple[int, ...], int]] = [((), 0)]  # sequences so far, and how much of the text they cover
    while open_ and len(found) < most:
        longer: list[tuple[tuple[int, ...], int]] = []
        for ids, at in open_:
            for end in range(min(len(text), at + _PIECE_BYTES), at, -1):
                for token in pieces(text[at:end]):
                    if end == len(text):
                        found.append((*ids, token))
                    else:
                        longer.append(((*ids, token), end))
        open_ = longer[:_OPEN]
    return found[:most]
