"""The loop between scheduler and runner, and the only one.

One call of `step`: make a plan, launch it, and take in the results of the oldest steps until no more than `depth`
are in flight. Depth 0 waits for every step; 1 plans the next one while the device computes.

Errors: a step that raises fails the sequences in it and nobody else. `EngineError`, and three failed steps in a row,
end the engine.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from octavo.errors import EngineError, invariant
from octavo.runner.base import Runner
from octavo.scheduler.records import Step, TokenBatch
from octavo.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)

FAILURES = 3  # failed steps in a row that end the engine


class EngineLoop:
    """Drives one scheduler and one runner. Owner of both while it lives; one thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self.observer: Callable[[Scheduler], None] | None = None  # called after every step
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._failures = 0
        self._idle_plans = 0

    def step(self) -> list[TokenBatch]:
        """Plan and launch one step, take in those that are due; returns what is new, oldest first."""
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
