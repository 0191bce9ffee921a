"""The scheduler: decides what every step computes. Numpy only, one thread, no clock, no model.

`submit` and `abort` bring requests in and out; `plan` and `commit` are the only other mutations. A plan may be made
while earlier ones are in flight; plans are committed in the order in which they were made.

There are no phases. A sequence has known tokens and computed tokens, and a step spends a token budget to close
gaps: rows whose gap is one token that the device sampled itself first (decode), then chunks that the host feeds.
Prefix hits, chunked prefill and preemption by recompute are this one rule.

Liveness: what can never fit is refused by `submit`; the running sequence with the smallest order key is never a
victim of a later one; nothing is admitted in a step in which someone had to give way or sit out.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from octavo.errors import invariant
from octavo.scheduler import beam
from octavo.scheduler.planner import Planner
from octavo.scheduler.records import (
    ABORT,
    I32,
    I64,
    LENGTH,
    STOP,
    Ended,
    Limits,
    Stats,
    Step,
    TokenBatch,
)
from octavo.scheduler.slots import DEAD, EMPTY, ENDING, PREEMPTED
from octavo.scheduler.state import SchedulerState
from octavo.types import EngineRequest

TokenEntries = Items[object]
"""log-probabilities of successive tokens, as the runner makes them"""


class Scheduler:
    """See the module's contract. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self.state = SchedulerState(limits)

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        return self.state.stats

    def submit(self, request: EngineRequest) -> None:
        """Queue a request: one sequence for each of its `n` children. Raises RequestError when it can never run."""
        prompt = np.frombuffer(request.prompt, np.dtype("<i4"), len(request.prompt) // 4).astype(np.int32)
        self.state.check(request, prompt)
        self.state.new_rows(request, prompt)

    def cached(self, request: EngineRequest) -> int:
        """Tokens of a request's prompt that the prefix cache would spare it now."""
        if request.prompt_logprobs >= 0:
            return 0  # these need every prompt token computed
        return len(self.state.pool.match(request.keys, request.root)) * self.state.limits.block_size

    def check_room(self, request: EngineRequest) -> None:
        """Raise RequestError when the pool could never hold a request; `submit` does it, too."""
        self.state.check_room(request)

    def abort(self, request_id: int, child: int | None = None, reason: int = ABORT) -> None:
        """End every sequence of a request that is still alive, or one child; unknown ids are ignored."""
        slots = self.state.slots
        for row in list(self.state.requests.get(request_id, ())):
            if slots.state[row] not in (EMPTY, DEAD) and child in (None, slots.child[row]):
                self.state.end(row, reason)

    def has_work(self) -> bool:
        """True while any sequence is alive, or its end has not been reported."""
        return bool(self.state.requests) or bool(self.state.ended)

    def plan(self) -> Step | None:
        """The next step, or None when nothing can be computed now."""
        self.state.step += 1
        step = Planner(self.state).make()
        if step is not None:
            self.state.in_flight.append(step)
        return step

    def commit(
        self,
        step: Step,
        tokens: I32,
        bad: NDArray[np.bool_] | None = None,
        logprobs: Mapping[int, object] | None = None,
        prompts: Mapping[int, tuple[int, TokenEntries]] | None = None,
    ) -> TokenBatch:
        """Take in the tokens of the oldest step in flight, one for each of its `samples`.

        `bad` marks samples whose logits were not finite: their requests end with an error, as do those whose token
        is outside the vocabulary. `logprobs` maps a sample to what the runner returned for it. Tokens of sequences
        that ended meanwhile are dropped. `prompts` maps a row of the step to what the runner returned for its chunk
        of prompt: the position of the first token reported on, and the reports.
        """
        state, slots, rows, picked = self.state, self.state.slots, step.rows, step.samples
        told = self._told(step, prompts) if prompts else []
        self._landed(step)
        invariant(len(tokens) == len(picked), "as many tokens come back as rows sampled")
        sampled, at, device_rows = rows, step.end, step.device_rows
        if len(picked) < len(rows):
            sampled, at, device_rows = rows[picked], at[picked], device_rows[picked]
        state.history[device_rows, at] = tokens
        now = slots.state[sampled]
        wrong = None
        try:
            ends = state.is_end[tokens.view(np.uint32)]
        except IndexError:  # a token outside the vocabulary
            wrong = tokens.view(np.uint32) >= state.limits.vocab_size
            ends = state.is_end[np.where(wrong, 0, tokens)]
        if bad is not None:
            wrong = bad if wrong is None else wrong | bad
        if wrong is not None:
            state.fail_rows(step, sampled[wrong].tolist(), lost=False)
            now = slots.state[sampled]
        late = (now >= ENDING).nonzero()[0]
        latest = int(now[late].max()) if len(late) else EMPTY
        good = (now != DEAD) & (now != EMPTY) if latest == DEAD or wrong is not None else None
        batch = self._batch(sampled, tokens, good, logprobs)
        batch.prompts = told
        for i in sorted({*late.tolist(), *ends.nonzero()[0].tolist()}):
            if good is not None and not good[i]:
                continue
            row = int(sampled[i])
            if int(tokens[i]) in slots.sequence(row).end_ids:
                state.end(row, STOP)
            elif at[i] + 1 >= slots.limit[row]:
                state.end(row, LENGTH)
        if len(sampled) < len(rows) or latest >= PREEMPTED:
            state.settle(rows)
        batch.ended = self.take_ended()
        return batch

    def _told(
        self, step: Step, prompts: Mapping[int, tuple[int, TokenEntries]]
    ) -> list[tuple[int, int, TokenEntries]]:
        """What the runner says about chunks of prompts, by request, of rows that are alive."""
        slots, rows = self.state.slots, step.rows
        return [
            (int(slots.request_id[rows[i]]), first, entries)
            for i, (first, entries) in prompts.items()
            if slots.state[rows[i]] != DEAD
        ]

    def _landed(self, step: Step) -> None:
        """The oldest step in flight came back."""
        invariant(self.state.in_flight and self.state.in_flight[0] is step, "steps come back in the order of plans")
        self.state.in_flight.popleft()
        self.state.slots.in_flight[step.rows] -= 1

    def _batch(
        self, rows: I64, tokens: I32, good: NDArray[np.bool_] | None, logprobs: Mapping[int, object] | None
    ) -> TokenBatch:
        """The tokens that count (all where `good` is None), with their logprobs."""
        slots = self.state.slots
        if good is None:
            good = np.ones(len(rows), np.bool_) if logprobs else None
        else:
            rows, tokens = rows[good], tokens[good]
        batch = TokenBatch(slots.request_id[rows], slots.child[rows], tokens)
        self.state.stats.generated_tokens += len(rows)
        if logprobs and good is not None:
            place = np.cumsum(good) - 1
            batch.logprobs = {int(place[i]): value for i, value in logprobs.items() if good[i]}
        return batch

    def regroup(self, request_id: int, choices: Items[tuple[int, int]]) -> None:
        """How the beams of a request go on; see `octavo.scheduler.beam`."""
        beam.regroup(self.state, request_id, choices)

    def take_ended(self) -> list[Ended]:
        """Ends that no commit has reported yet, e.g. of requests aborted while nothing was in flight."""
        ended, self.state.ended = self.state.ended, []
        return ended

    def fail(self, step: Step) -> list[Ended]:
        """The oldest step in flight did not run: every request in it ends with an error, the others go on."""
        self._landed(step)
        self.state.fail_rows(step, step.rows.tolist(), lost=True)
        self.state.settle(step.rows)
        return self.take_ended()
