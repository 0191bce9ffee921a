"""The loop between scheduler and runner, and the only one.

One call of `step`: make a plan, launch it, and take in the results of the oldest steps until no more than `depth`
are in flight. Depth 0 waits for every step; 1 plans the next one while the device computes.

Errors: a step that raises fails the sequences in it and nobody else. `EngineError`, and three failed steps in a row,
end the engine.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from octavo.errors import EngineError, QueueFull, RequestError, invariant
from octavo.runner.base import Runner
from octavo.scheduler.records import TIMEOUT, Step, TokenBatch
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.usage import queued
from octavo.types import EngineRequest

_log = logging.getLogger(__name__)

FAILURES = 3  # failed steps in a row that end the engine


@dataclass(frozen=True, slots=True)
class QueueCaps:
    """How much may wait: sequences beside those that can run at a time, and tokens. None: any number."""

    requests: int | None = None
    tokens: int | None = None


class EngineLoop:
    """Drives one scheduler and one runner. Owner of both while it lives; one thread. `clock`: seconds, monotonic."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        depth: int,
        caps: QueueCaps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self.caps = caps or QueueCaps()
        self.clock = clock
        self._deadlines: list[tuple[float, int]] = []  # a heap of time and request; entries outlive their requests
        self.observer: Callable[[Scheduler], None] | None = None  # called after every step
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._failures = 0
        self._idle_plans = 0

    def submit(self, request: EngineRequest) -> None:
        """Queue a request and watch its deadline. Raises QueueFull when too much waits, RequestError for others."""
        if not 0 <= request.timeout < math.inf:
            raise RequestError(f"The timeout is {request.timeout}.", "Give seconds, or 0 for none.", "timeout_s")
        self._check_queue(request)
        self.scheduler.submit(request)
        if request.timeout:
            heappush(self._deadlines, (self.clock() + request.timeout, request.id))
            live = self.scheduler.state.requests
            if len(self._deadlines) > 64 + 2 * len(live):
                self._deadlines = [entry for entry in self._deadlines if entry[1] in live]
                heapify(self._deadlines)

    def _check_queue(self, request: EngineRequest) -> None:
        caps = self.caps
        if caps.requests is None and caps.tokens is None:
            return
        sequences, tokens = queued(self.scheduler.state)
        running = self.scheduler.state.limits.max_num_seqs
        if caps.requests is not None and sequences + request.n > running + caps.requests:
            raise QueueFull(
                f"{sequences} sequences run or wait, and the request has {request.n}; {running} run at a time and "
                f"{caps.requests} may wait (max_num_queued_reqs).",
                "Try again later, or raise --max-num-queued-reqs.",
            )
        prompt = len(request.prompt) // 4
        if caps.tokens is not None and tokens and tokens + prompt > caps.tokens:
            raise QueueFull(
                f"{tokens} prompt tokens wait, and the request has {prompt}; {caps.tokens} may wait "
                "(max_num_queued_tokens).",
                "Try again later, or raise --max-num-queued-tokens.",
            )

    def _expire(self) -> None:
        """End requests whose deadline has passed."""
        now, deadlines = self.clock(), self._deadlines
        self.scheduler.state.now_us = int(now * 1e6)
        while deadlines and deadlines[0][0] <= now:
            self.scheduler.abort(heappop(deadlines)[1], reason=TIMEOUT)

    def step(self) -> list[TokenBatch]:
        """Plan and launch one step, take in those that are due; returns what is new, oldest first."""
        self._expire()
        step = self.scheduler.plan()
        drain = step is None
        if step is not None:
            ticket = self._launch(step)
            # A step that did not run left table writes undone: nothing may be launched on top before that is known.
            drain = isinstance(ticket, Exception)
            self._in_flight.append((step, ticket))
            self._idle_plans = 0
        elif not self._in_flight:
            # Making room can take a plan of its own; twice nothing with work left means that nothing ever comes.
            self._idle_plans += 1
            invariant(
                self._idle_plans < 3 or not self.scheduler.has_work(), "work is left but nothing can be planned"
            )
        batches = []
        while self._in_flight and (drain or len(self._in_flight) > self.depth):
            batches.append(self._commit(*self._in_flight.popleft()))
        ended = self.scheduler.take_ended()
        if ended:
            batches.append(TokenBatch.of_ends(ended))
        if self.observer is not None:
            self.observer(self.scheduler)
        return batches

    def _launch(self, step: Step) -> Any:
        try:
            return self.runner.launch(step.words)
        except EngineError:
            raise
        except Exception as error:  # reported when the step is due, after the steps before it
            return error

    def _commit(self, step: Step, ticket: Any) -> TokenBatch:
        error: Exception | None = None
        if isinstance(ticket, Exception):
            error = ticket
        else:
            try:
                result = self.runner.collect(ticket)
            except EngineError:
                raise
            except Exception as caught:
                error = caught
        if error is None:
            self._failures = 0
            return self.scheduler.commit(step, result.tokens, result.bad, result.logprobs, result.prompts)
        self._failures += 1
        _log.error("Step %d failed: %s", step.number, error, exc_info=error)
        if self._failures >= FAILURES:
            raise EngineError(f"{FAILURES} steps in a row failed, the last with: {error}", "See the log.") from error
        return TokenBatch.of_ends(self.scheduler.fail(step))
