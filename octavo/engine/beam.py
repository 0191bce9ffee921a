"""Beam search: which continuations live on, which are finished, when to stop.

Each turn takes, for every running beam, its best candidates with their log-probabilities, and says how the beams go
on: for each new beam its parent and its token. A beam whose token ends it is kept as finished with its score, which
is the sum of its log-probabilities divided by its length to the power of `length_penalty`.

Options as in `transformers` (its `generate`, version 5): `early_stopping` True stops when `width` beams
are finished; False when the best running beam, scored at its present length, is no better than the worst finished
one; "never" judges by the longest length it could reach. Only the best `width` candidates of a turn may finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.scheduler.records import TokenBatch
from octavo.scheduler.scheduler import Scheduler

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Options of one search. max_tokens: new tokens at most. eos: ids that end a beam."""

    width: int
    max_tokens: int
    eos: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    @property
    def candidates(self) -> int:
        """Candidates that a turn needs: enough that `width` beams go on even if the others all end."""
        return max(2, 1 + len(self.eos)) * self.width


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of new tokens. `score` is the sum of log-probabilities; of a finished beam, its final score."""

    tokens: tuple[int, ...]
    score: float


class BeamSearch:
    """One search over one prompt. Starts with a single running beam without tokens."""

    def __init__(self, params: BeamParams) -> None:
        self.params = params
        self.running = [Beam((), 0.0)]
        self.finished: list[Beam] = []
        self.done = False
        self._can_improve = True

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, int]]:
        """One turn: `candidates[i]` are (token, log-probability) of running beam i, best first.

        Returns (index of the parent among the running beams, token) for each beam that runs on, best first; empty
        when the search is done.
        """
        params = self.params
        pool = [
            (beam.score + logprob, index, token)
            for index, (beam, tokens) in enumerate(zip(self.running, candidates, strict=True))
            for token, logprob in tokens
        ]
        pool.sort(key=lambda item: -item[0])
        pool = pool[: params.candidates]
        length = len(self.running[0].tokens) + 1
        full = length >= params.max_tokens
        ended = [item for item in pool[: params.width] if full or item[2] in params.eos]
        self._finish([Beam(self.running[i].tokens + (t,), s / length**params.length_penalty) for s, i, t in ended])
        chosen = [item for item in pool if not full and item[2] not in params.eos][: params.width]
        self.running = [Beam(self.running[index].tokens + (token,), score) for score, index, token in chosen]
        self.done = full or not chosen or self._stop(length)
        return [] if self.done else [(index, token) for _, index, token in chosen]

    def _finish(self, beams: list[Beam]) -> None:
        """Keep the best `width` of the finished beams."""
        enough = len(self.finished) == self.params.width
        if self._can_improve and not (enough and self.params.early_stopping is True):
            self.finished = sorted(self.finished + beams, key=lambda beam: -beam.score)[: self.params.width]

    def _stop(self, length: int) -> bool:
        """Whether nothing that still runs is worth waiting for. Once judged so, it stays so."""
        params = self.params
        longest = params.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        best = self.running[0].score / longest**params.length_penalty
        enough = len(self.finished) == params.width
        self._can_improve = self._can_improve and (not enough or best > self.finished[-1].score)
        return not self._can_improve or (enough and params.early_stopping is True)

    def results(self) -> list[Beam]:
        """Finished beams, best first."""
        return list(self.finished)


class BeamGroup:
    """A beam search on the scheduler: collects the candidates of one request and tells it how the beams go on."""

    def __init__(self, request_id: int, search: BeamSearch) -> None:
        self.request_id = request_id
        self.search = search
        self.error = False
        self._candidates: dict[int, list[tuple[int, float]]] = {}
        self._places = [0]  # child that holds each running beam

    @property
    def done(self) -> bool:
        """True when the search has ended."""
        return self.search.done or self.error

    def take_in(self, batch: TokenBatch, scheduler: Scheduler) -> None:
        """Look for this request in a batch; regroup when all its running children have their candidates."""
        if any(end.request_id == self.request_id for end in batch.ended):
            self.error = not self.search.done
        for i in (batch.request_id == self.request_id).nonzero()[0].tolist():
            found: Any = batch.logprobs[i]
            pairs = zip(found.ids.tolist(), found.values.tolist(), strict=True)
            self._candidates[int(batch.child[i])] = list(pairs)
        if self.done or len(self._candidates) < len(self._places):
            return
        turns = self.search.advance([self._candidates[child] for child in self._places])
        self._candidates = {}
        if turns:
            scheduler.regroup(self.request_id, [(self._places[parent], token) for parent, token in turns])
            self._places = list(range(len(turns)))
        else:
            scheduler.abort(self.request_id)
