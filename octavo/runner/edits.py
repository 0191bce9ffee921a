"""What a request wants changed in its logits before a token is chosen: bans, biases, penalties.

An `Edits` belongs to one device row; it is made from the EXTRAS of the plan that sets the row up, which carry what
is known of the tokens so far, and then told of every token that the row samples. It works in place on a row of
logits of either kind, numpy or torch: the caller gives the function that turns an index or value array into one
that fits the logits.

Order, as in vLLM: allowed ids, bad words, end ids below `min_tokens`, bias, penalties.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.scheduler.plan import (
    P_ROW,
    X_ALLOWED,
    X_BAD_WORDS,
    X_BAN_UNTIL,
    X_BIAS,
    X_PENALTIES,
    X_PROMPT_LOGPROBS,
    PlanView,
)

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Put = Callable[[NDArray[Any]], Any]
"""numpy indices (int64) or values (float32) -> the same for the kind of logits at hand"""

NONE = np.empty(0, np.int64)


class Penalties:
    """Repetition (prompt and output), frequency and presence (output only), by the counts of a row's tokens."""

    def __init__(self, payload: NDArray[np.int32]) -> None:
        self.repetition, self.presence, self.frequency = payload[:3].view(np.float32).tolist()
        count = int(payload[3])
        self._place = {int(token): i for i, token in enumerate(payload[4 : 4 + count])}  # prompt first, then output
        self._counts = [0] * count
        for token in payload[4 + count :].tolist():
            self.took(token)

    def took(self, token: int) -> None:
        """One more output token."""
        place = self._place.setdefault(token, len(self._counts))
        if place == len(self._counts):
            self._counts.append(0)
        self._counts[place] += 1

    def apply(self, logits_V: Any, put: Put) -> None:
        """Change the logits of the tokens that there were."""
        if not self._counts:
            return
        ids = np.fromiter(self._place, np.int64, len(self._place))
        counts = np.array(self._counts, np.float32)
        index = put(ids)
        values = logits_V[index]
        if self.repetition != 1.0:
            values = values.clip(0, None) / self.repetition + values.clip(None, 0) * self.repetition
        logits_V[index] = values - put(self.frequency * counts + self.presence * (counts > 0).astype(np.float32))


class BadWords:
    """Token sequences that must not come up: the last token of one is banned while those before it are there."""

    def __init__(self, payload: NDArray[np.int32]) -> None:
        words = payload.tolist()
        known, words = words[1 : 1 + words[0]], words[1 + words[0] :]
        self._last: dict[tuple[int, ...], list[int]] = {}
        self._longest = 0
        while words:
            *before, last = words[1 : 1 + words[0]]
            self._last.setdefault(tuple(before), []).append(last)
            self._longest = max(self._longest, len(before))
            words = words[1 + words[0] :]
        self._tail = known[max(len(known) - self._longest, 0) :]

    def took(self, token: int) -> None:
        """One more token."""
        self._tail = [*self._tail, token][-self._longest :] if self._longest else []

    def banned(self) -> I64:
        """Ids that would complete a sequence now."""
        ids: list[int] = []
        for length in range(min(self._longest, len(self._tail)) + 1):
            ids += self._last.get(tuple(self._tail[len(self._tail) - length :]), ())
        return np.array(ids, np.int64)


class Edits:
    """All changes of one row."""

    def __init__(self) -> None:
        self.until = 0  # position before which `ends` may not be sampled
        self.ends = NONE
        self.allowed = NONE
        self.bias: tuple[I64, F32] | None = None
        self.bad_words: BadWords | None = None
        self.penalties: Penalties | None = None

    def add(self, kind: int, payload: NDArray[np.int32]) -> None:
        """Take in one of the row's EXTRAS."""
        if kind == X_BAN_UNTIL:
            self.until, self.ends = int(payload[0]), payload[1:].astype(np.int64)
        elif kind == X_ALLOWED:
            self.allowed = payload.astype(np.int64)
        elif kind == X_BIAS:
            half = len(payload) // 2
            self.bias = payload[:half].astype(np.int64), payload[half:].copy().view(np.float32)
        elif kind == X_BAD_WORDS:
            self.bad_words = BadWords(payload)
        elif kind == X_PENALTIES:
            self.penalties = Penalties(payload)

    def apply(self, logits_V: Any, position: int, put: Put) -> None:
        """Change a row of logits in place; `position` is that of the token they are for."""
        if len(self.allowed):
            index = put(self.allowed)
            kept = logits_V[index] + 0.0  # a copy in either kind
            logits_V[:] = -np.inf
            logits_V[index] = kept
        if self.bad_words is not None and len(ids := self.bad_words.banned()):
            logits_V[put(ids)] = -np.inf
        if position < self.until and len(self.ends):
            logits_V[put(self.ends)] = -np.inf
        if self.bias is not None:
            index = put(self.bias[0])
            logits_V[index] = logits_V[index] + put(self.bias[1])
        if self.penalties is not None:
            self.penalties.apply(logits_V, put)

    def took(self, token: int) -> None:
        """The row sampled `token`."""
        if self.bad_words is not None:
            self.bad_words.took(token)
        if self.penalties is not None:
            self.penalties.took(token)


def note_edits(edits: dict[int, Edits], view: PlanView) -> None:
    """Bring `edits` (by device row) up to date with the rows that a plan sets up."""
    if not len(view.params):
        return
    for row in view.params[:, P_ROW].tolist():
        edits.pop(row, None)
    for row, kind, payload in view.extra_items():
        if kind in (X_BAN_UNTIL, X_ALLOWED, X_BIAS, X_BAD_WORDS, X_PENALTIES):
            edits.setdefault(row, Edits()).add(kind, payload)


class PromptChunk(NamedTuple):
    """A chunk of prompt whose request wants log-probabilities: the token after each of its tokens but the last.

    row: its place in the plan. first: position of the first token reported on. targets: the tokens reported on.
    best: how many of the best ids to report for each.
    """

    row: int
    first: int
    targets: I64
    best: int


def prompt_chunks(view: PlanView) -> list[PromptChunk]:
    """The chunks of a plan that want log-probabilities of prompt tokens."""
    wanted = [(row, payload) for row, kind, payload in view.extra_items() if kind == X_PROMPT_LOGPROBS]
    if not wanted:
        return []
    place = {row: i for i, row in enumerate(view.device_rows.tolist())}
    first_R = np.cumsum(view.length) - view.length - view.decode_rows  # into TOKENS
    chunks = []
    for device_row, (count, targets, after) in wanted:
        i = place[device_row]
        ids = view.tokens[int(first_R[i]) :][: view.length[i]]
        tokens = np.append(ids[1:], after)[:targets].astype(np.int64)
        chunks.append(PromptChunk(i, int(view.start[i]) + 1, tokens, int(count)))
    return chunks
