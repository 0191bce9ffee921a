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

import numpy as np
from numpy.typing import NDArray

from octavo.scheduler.keys import KEY_BYTES, next_key
from octavo.scheduler.planner import Planner
from octavo.scheduler.records import (
    ABORT,
    ERROR,
    I32,
    LENGTH,
    STOP,
    Ended,
    Limits,
    Stats,
    Step,
    TokenBatch,
)
from octavo.scheduler.slots import DEAD, EMPTY, HAS_STOP_IDS
from octavo.scheduler.state import SchedulerState
from octavo.types import EngineRequest


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
        prompt = np.frombuffer(request.prompt, np.dtype("<i4")).astype(np.int32)
        self.state.check(request, prompt)
        keys = [request.keys[i : i + KEY_BYTES] for i in range(0, len(request.keys), KEY_BYTES)]
        rows = [self.state.new_row(request, prompt, keys, child) for child in range(request.n)]
        self.state.requests[request.id] = rows
        first = self.state.slots.sequence(rows[0])
        first.dormant = [self.state.slots.sequence(row) for row in rows[1:]]
        self.state.queue.push(rows[0], int(self.state.slots.arrival[rows[0]]))

    def abort(self, request_id: int, child: int | None = None) -> None:
        """End every sequence of a request that is still alive, or one child; unknown ids are ignored."""
        slots = self.state.slots
        for row in list(self.state.requests.get(request_id, ())):
            if slots.state[row] in (EMPTY, DEAD):  # the first may have taken the others along
                continue
            if child is None or slots.child[row] == child:
                self.state.end(row, ABORT)

    def has_work(self) -> bool:
        """True while any sequence is alive, or its end has not been reported."""
        return bool(self.state.requests) or bool(self.state.ended)

    def plan(self) -> Step | None:
        """The next step, or None when nothing can be computed now."""
        self.state.step += 1
        return Planner(self.state).make()

    def commit(
        self,
        step: Step,
        tokens: I32,
        bad: NDArray[np.bool_] | None = None,
        logprobs: Mapping[int, object] | None = None,
    ) -> TokenBatch:
        """Take in the tokens of the oldest step in flight, one for each of its `samples`.

        `bad` marks samples whose logits were not finite: those sequences end with an error. `logprobs` maps a
        sample to what the runner returned for it. Tokens of sequences that ended meanwhile are dropped.
        """
        slots = self.state.slots
        rows = step.rows
        slots.in_flight[rows] -= 1
        picked = step.samples
        live = slots.state[rows] != DEAD
        sampled = rows[picked]
        at = step.start[picked] + step.length[picked]
        self.state.history[step.device_rows[picked], at] = tokens
        good = live[picked]
        if bad is not None and bad.any():
            failed = sampled[good & bad].tolist()
            good &= ~bad
            live[picked] &= good
            self._fail_rows(step, failed)
            alive = (slots.state[rows] != DEAD) & (slots.state[rows] != EMPTY)
            live &= alive
            good &= alive[picked]
        stopped = good & (tokens == slots.eos[sampled])
        flagged = good & ((slots.flags[sampled] & HAS_STOP_IDS) != 0)
        for i in np.flatnonzero(flagged).tolist():
            stopped[i] |= int(tokens[i]) in slots.sequence(int(sampled[i])).stop_ids
        done = stopped | (good & (at + 1 >= slots.limit[sampled]))
        if self.state.pool.prefix_cache:
            self._publish_generated(step, live)
        batch = TokenBatch(slots.request_id[sampled[good]], slots.child[sampled[good]], tokens[good])
        self.state.stats.generated_tokens += len(batch.token)
        if logprobs:
            place = np.cumsum(good) - 1
            batch.logprobs = {int(place[i]): value for i, value in logprobs.items() if good[i]}
        for i in np.flatnonzero(done).tolist():
            self.state.end(int(sampled[i]), STOP if stopped[i] else LENGTH)
        self.state.settle(rows)
        batch.ended, self.state.ended = self.state.ended, []
        return batch

    def take_ended(self) -> list[Ended]:
        """Ends that no commit has reported yet, e.g. of requests aborted while nothing was in flight."""
        ended, self.state.ended = self.state.ended, []
        return ended

    def _publish_generated(self, step: Step, live: NDArray[np.bool_]) -> None:
        """Blocks that this step filled with generated tokens get their keys now that the ids are known."""
        end = step.start + step.length
        size = self.state.limits.block_size
        for i in np.flatnonzero(live & ((end & self.state.mask) == 0)).tolist():
            sequence = self.state.slots.sequence(int(step.rows[i]))
            last = int(end[i])
            block = (last >> self.state.shift) - 1
            if block != len(sequence.keys) or block >= len(sequence.blocks):
                continue
            parent = sequence.keys[-1] if sequence.keys else sequence.request.root
            ids = self.state.history[step.device_rows[i], last - size : last]
            sequence.keys.append(next_key(parent, ids))
            self.state.publish(sequence, block, block + 1, [])

    def fail(self, step: Step) -> list[Ended]:
        """The oldest step in flight did not run: every sequence in it ends with an error, the others go on."""
        slots = self.state.slots
        slots.in_flight[step.rows] -= 1
        live = step.rows[slots.state[step.rows] != DEAD]
        self._fail_rows(step, live.tolist())
        self.state.settle(step.rows)
        return self.take_ended()

    def _fail_rows(self, step: Step, failed: list[int]) -> None:
        """End rows whose K and V are rubbish, take their publications of this step back, and end who shares those."""
        slots = self.state.slots
        blocks = {block for row, block in step.published if row in failed}
        for block in blocks:
            self.state.pool.unpublish(block)
        if blocks:
            holders = [r for r, seq in enumerate(slots.sequences) if seq and not blocks.isdisjoint(seq.blocks)]
            failed = sorted({*failed, *holders})
        for row in failed:
            if slots.state[row] not in (EMPTY, DEAD):
                self.state.end(row, ERROR)
