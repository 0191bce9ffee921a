"""The gate: how much may be under way at once, and what is said to those who come too many.

A sequence takes a seat from before its text is looked at until its request is over. There are as many seats as the
engine runs sequences, and `max_num_queued_reqs` more to wait on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.server.problem import Problem

MAX_RETRY_AFTER = 60


class Gate:
    """Counts seats. `closed` is a text when nothing new is let in: the server is about to end."""

    def __init__(self, queue: int, on_refusal: Callable[[str], None]) -> None:
        self.running = 0  # sequences that the engine runs at a time; 0 while there is no engine
        self.queue = queue
        self.taken = 0
        self.closed = ""
        self._on_refusal = on_refusal
        self._seconds = 1.0  # mean time that a seat is taken

    def check(self) -> None:
        """Raise Problem when a request cannot be let in, whatever it is; called before its body is read."""
        self._admit(1)

    def take(self, seats: int) -> None:
        """Take seats, to be given back with `release`. Raises Problem when there are not enough."""
        self._admit(seats)
        self.taken += seats

    @contextmanager
    def seat(self) -> Iterator[None]:
        """One seat for work on text alone. Raises Problem when there is none."""
        self.take(1)
        try:
            yield
        finally:
            self.taken -= 1

    def release(self, seats: int, seconds: float) -> None:
        """Give seats back that were taken for `seconds`."""
        self.taken -= seats
        self._seconds += 0.05 * (seconds - self._seconds)

    def _admit(self, seats: int) -> None:
        if self.closed:
            self._on_refusal("draining")
            raise Problem(503, self.closed, headers={"retry-after": "10", "connection": "close"})
        if not self.running:
            self._on_refusal("not_ready")
            raise Problem(503, "The engine is not running. Try again later.", headers={"retry-after": "5"})
        most = self.running + self.queue
        if seats > most:
            raise Problem(400, f"The request asks for {seats} sequences; at most {most} can be under way.", param="n")
        if self.taken + seats > most:
            raise self.full(f"{self.taken} sequences are under way and at most {most} may be. Try again later.")

    def full(self, message: str) -> Problem:
        """The answer to a request for which there is no room now."""
        self._on_refusal("queue_full")
        return Problem(429, message, code="queue_full", headers={"retry-after": str(self._retry_after())})

    def _retry_after(self) -> int:
        """Seconds until about a tenth of those who wait have been served."""
        waiting = max(self.taken - self.running, 1)
        return min(max(math.ceil(0.1 * waiting * self._seconds / max(self.running, 1)), 1), MAX_RETRY_AFTER)
