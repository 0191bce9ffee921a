"""Who is served next, and who gives way: the waiting queue and the order of preemption.

An order key is fixed when a sequence is submitted and kept through preemption, so the queue is a heap and a
preempted sequence comes back to its old place. Smaller keys are served first; the victim of a preemption is the
running sequence with the largest. First come first served: the key is the arrival number.
"""

from __future__ import annotations

from heapq import heappop, heappush


class WaitingQueue:
    """Rows that wait for a device row, smallest order key first. Removal is lazy."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._keys: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, row: int) -> bool:
        return row in self._keys

    def push(self, row: int, key: int) -> None:
        """Add a row; `key` is unique."""
        self._keys[row] = key
        heappush(self._heap, (key, row))

    def pop(self) -> int | None:
        """Take out the first row, None when nothing waits."""
        while self._heap:
            key, row = heappop(self._heap)
            if self._keys.get(row) == key:
                del self._keys[row]
                return row
        return None

    def remove(self, row: int) -> None:
        """Take out a row that waits."""
        del self._keys[row]

    def rows(self) -> list[int]:
        """The rows that wait, in any order."""
        return list(self._keys)
