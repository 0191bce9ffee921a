"""Swap: host memory for the KV of sequences that gave way, and when it is used.

Owner of a `HostPool`: the scheduler. A host block belongs to one sequence from the plan that writes it until the plan
that reads it, or the end of the sequence. All copies are on one stream, in the order of the plans, so a host block
that was given back may be written by any later plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.errors import invariant

I64 = NDArray[np.int64]

class HostPool:
    """`blocks` KV blocks of host memory, numbered from 0."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.used = np.zeros(blocks, np.bool_)
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    def take(self, count: int) -> I64:
        """Hand out `count` free blocks. The caller has checked `free`."""
        if count > len(self._free):
            invariant(False, f"{count} host blocks taken of {len(self._free)} free")
        blocks = np.array([self._free.pop() for _ in range(count)], np.int64)
        self.used[blocks] = True
        return blocks

    def give_back(self, blocks: I64) -> None:
        """Return blocks; what they hold is not needed any more."""
        if not self.used[blocks].all():
            invariant(False, f"a host block of {blocks.tolist()} is given back twice")
        self.used[blocks] = False
        self._free += blocks.tolist()


def should_swap(computed: int, kept: int, blocks: int, free: int, cost: float) -> bool:
    """Whether a sequence gives way by swapping its blocks instead of computing them again.

    computed: tokens whose KV it has. kept: how many of them, from the first, stay in the prefix cache because others
    hold their blocks. blocks: KV blocks to move. free: host blocks that may take them. cost: tokens that
    could be computed while one block goes out and comes back.
    """
    return 0 < blocks <= free and blocks * cost < computed - kept
