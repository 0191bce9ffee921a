"""How full the KV cache is, and how much of what is allocated holds no token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.scheduler.slots import DEAD, DECODE, EMPTY, ENDING, PREFILL
from octavo.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks that running sequences hold (shared ones once), slots in them, and slots that hold no token."""

    sequences: int
    blocks: int
    slots: int
    waste: int

    @property
    def waste_ratio(self) -> float:
        """Empty slots for each slot that holds a token."""
        return self.waste / max(self.slots - self.waste, 1)


def usage(state: SchedulerState) -> Usage:
    """Count now; O(running sequences). Only the tail of a sequence's last block is ever empty."""
    slots = state.slots
    rows = np.flatnonzero((slots.state == PREFILL) | (slots.state == DECODE) | (slots.state == ENDING))
    size = state.limits.block_size
    waste = int(np.maximum(slots.blocks[rows] * size - slots.known[rows], 0).sum())
    blocks = state.pool.usable - state.pool.free
    return Usage(len(rows), blocks, blocks * size, waste)


def queued(state: SchedulerState) -> tuple[int, int]:
    """Sequences that are alive, and known tokens of those in the queue; O(rows)."""
    slots = state.slots
    alive = np.count_nonzero((slots.state != EMPTY) & (slots.state != DEAD))
    return int(alive), int(slots.known[state.queue.rows()].sum()) if len(state.queue) else 0


class UsageMeter:
    """Averages and peaks over the steps of a run; call it after every step."""

    def __init__(self) -> None:
        self.steps = 0
        self.peak_blocks = 0
        self.peak_sequences = 0
        self._waste = 0
        self._used = 0

    def __call__(self, state: SchedulerState) -> None:
        """Take in one step."""
        now = usage(state)
        self.steps += 1
        self.peak_blocks = max(self.peak_blocks, now.blocks)
        self.peak_sequences = max(self.peak_sequences, now.sequences)
        self._waste += now.waste
        self._used += now.slots - now.waste

    @property
    def waste_ratio(self) -> float:
        """Mean over the steps, weighted by tokens."""
        return self._waste / max(self._used, 1)
