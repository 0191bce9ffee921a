"""The last samples of the engine's numbers, for the page and for rates."""

from __future__ import annotations

import numpy as np

COLUMNS = (
    "time",
    "running",
    "waiting",
    "used_blocks",
    "cached_blocks",
    "generated",
    "prompt",
    "hits",
    "step_seconds",
)


class Ring:
    """`size` rows of `COLUMNS`, the oldest overwritten."""

    def __init__(self, size: int = 1200) -> None:
        self._rows = np.zeros((size, len(COLUMNS)))
        self._count = 0

    def add(self, *values: float) -> None:
        """Add a sample, in the order of `COLUMNS`."""
        self._rows[self._count % len(self._rows)] = values
        self._count += 1

    def last(self, seconds: float) -> np.ndarray:
        """Samples of the last `seconds` before the newest, oldest first; [n, columns]."""
        size = len(self._rows)
        start = self._count % size if self._count > size else 0
        rows = np.roll(self._rows, -start, axis=0)[: min(self._count, size)]
        return rows[rows[:, 0] >= rows[-1, 0] - seconds] if len(rows) else rows

    def rate(self, column: str, seconds: float) -> float:
        """Growth of a counter's column a second, over the last `seconds`; 0 when that is unknown."""
        rows = self.last(seconds)
        if len(rows) < 2 or rows[-1, 0] <= rows[0, 0]:
            return 0.0
        at = COLUMNS.index(column)
        return float(max(rows[-1, at] - rows[0, at], 0.0) / (rows[-1, 0] - rows[0, 0]))
