"""The loop guard: notices that an output repeats the same few tokens over and over.

Small models fall into loops and would go on to the token limit. The guard ends such an output with the finish reason
"repetition". It is off unless `SamplingParams.repetition_detection` asks for it.
"""

from __future__ import annotations

from octavo.types import RepetitionDetection


class LoopGuard:
    """Watches one output. For every period it keeps how many tokens in a row equal the token one period earlier."""

    __slots__ = ("_count", "_history", "_periods", "_runs")

    def __init__(self, wish: RepetitionDetection) -> None:
        self._periods = range(wish.min_pattern_size, wish.max_pattern_size + 1)
        self._count = wish.min_count
        self._runs = [0] * len(self._periods)
        self._history: list[int] = []

    def push(self, token: int) -> bool:
        """Add a token; True when a pattern now stands `min_count` times in a row. O(patterns) a token."""
        history, looped = self._history, False
        history.append(token)
        last = len(history) - 1
        for i, period in enumerate(self._periods):
            if last >= period and history[last - period] == token:
                self._runs[i] += 1
                looped |= self._runs[i] >= period * (self._count - 1)
            else:
                self._runs[i] = 0
        if last > 4 * self._periods[-1]:
            del history[: last - self._periods[-1]]
        return looped
