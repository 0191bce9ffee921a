"""From a growing list of token ids to a growing text, and the search for stop strings in it.

One `Detokenizer` and, when stop strings are given, one `StopChecker` serve one output:

    delta = detokenizer.push(ids)            # and once, at the end: detokenizer.finish()
    text, stop = checker.push(delta)         # and once, when nothing stopped it: checker.finish()

The joined results depend on the text alone, never on how it was cut into tokens or pushes. Cost per token does
not grow with the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from octavo.errors import RequestError
from octavo.text.tokenizer import Tokenizer, leading_spaces

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one output, as it grows. The joined deltas equal `Tokenizer.decode` of all ids.

    An unfinished character waits for its last byte; `finish` gives U+FFFD for one that never came.
    Options as in `Tokenizer.decode`.
    """

    __slots__ = ("_tokenizer", "_hidden", "_utf8", "_spaces", "_token_text", "_inside")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, after_prompt: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._token_text = tokenizer.token_text
        self._inside = False  # some bytes of a character are there
        self._hidden: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _utf8("replace")
        self._spaces = 0 if after_prompt else tokenizer.strip_start

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; may be empty."""
        token_bytes, hidden = self._tokenizer.token_bytes, self._hidden
        data = b"".join([token_bytes(index) for index in ids if index not in hidden])
        text = self._utf8.decode(data)
        self._inside = bool(self._utf8.getstate()[0])
        return self._strip(text)

    def push_one(self, index: int) -> str:
        """`push` of one id; most ids are whole characters and cost little."""
        if self._inside or self._spaces or index in self._hidden:
            return self.push((index,))
        text = self._token_text(index)
        return self.push((index,)) if text is None else text

    def finish(self) -> str:
        """What is left at the end of the output: U+FFFD for an unfinished character, else nothing."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._spaces and text:
            count = leading_spaces(text, self._spaces)
            # Only an unbroken run at the very start is dropped.
            self._spaces = self._spaces - count if count == len(text) else 0
            return text[count:]
        return text


class StopChecker:
    """Finds the first stop string in a growing text and holds back what may become one.

    The text is searched character by character, with one Knuth-Morris-Pratt automaton per stop string, so the
    string that ends first wins, and the longest of those that end together. The held-back tail is never longer
    than the longest stop string, and never holds text that cannot be part of a match.
    """

    __slots__ = ("_stops", "_failures", "_firsts", "_states", "_held", "_include")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: the stop string stays in the text. RequestError for an empty stop string."""
        if not all(stops):
            raise RequestError("A stop string is empty.", "Leave it out.", param="stop")
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self._include = include_stop

    def push(self, delta: str, armed: bool = True) -> tuple[str, str | None]:
        """Text that may be sent now, and the stop string that was found (the output ends there) or None.

        `armed` False lets `delta` pass unsearched (before `min_tokens`); no match can begin in it.
        """
        if not armed:
            self._states = [0] * len(self._stops)
            return self.finish() + delta, None
        if not self._held and self._firsts.isdisjoint(delta):
            return delta, None
        text = self._held + delta
        for position in range(len(self._held), len(text)):
            found = self._step(text[position])
            if found is not None:
                self._held = ""
                end = position + 1
                return text[: end if self._include else end - len(found)], found
        keep = max(self._states)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """The held-back text, when the output ends without a match."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Advances every automaton by one character; the longest stop string that ends here, or None."""
        found: str | None = None
        for index, stop in enumerate(self._stops):
            state, failure = self._states[index], self._failures[index]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                state = failure[state - 1]
            self._states[index] = state
        return found


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = table[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        table[position] = length
    return table
