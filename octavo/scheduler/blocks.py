"""BlockPool: reference counts, free order and prefix index of the KV blocks. Blocks are integers.

Owner: the scheduler, one thread. Block 0 is padding and never handed out. A block is *held* (count > 0) or *free*;
a free block may still be in the index and is then *cached*: a hit revives it, `take` evicts it.

Free blocks are reused in the order in which they were freed. `drop` frees a table from its tail, so of a cached
chain the tail always goes first and no cached block outlives its parent.

The free order is a queue of block numbers with lazy deletion: a block that is revived leaves its entry behind and is
noted as stale once; stale entries are the older ones of a block. Every operation is O(1) a block; the queue is
rebuilt when stale entries outnumber the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.errors import invariant
from octavo.scheduler.prefix import NO_BLOCKS, PrefixIndex

I64 = NDArray[np.int64]


class BlockPool:
    """Blocks 1..`blocks - 1`. `evictions` counts cached blocks that were reused for something else."""

    def __init__(self, blocks: int, *, prefix_cache: bool = True) -> None:
        self.blocks = blocks
        self.prefix_cache = prefix_cache
        self.ref = np.zeros(blocks, np.int64)
        self.index = PrefixIndex(blocks)
        self.free = blocks - 1
        self.evictions = 0
        self._queue = deque(range(1, blocks))
        self._stale = [0] * blocks
        self._stale_entries = 0
        self._freed = blocks - 1  # entries that the queue ever had

    @property
    def usable(self) -> int:
        """Blocks that can hold KV: all but the padding block."""
        return self.blocks - 1

    @property
    def mark(self) -> int:
        """The end of the free order now, for `take_freed_before`."""
        return self._freed

    def take(self, count: int) -> I64:
        """Hand out `count` free blocks, oldest first, evicting what they cached. The caller has checked `free`."""
        if count > self.free:
            invariant(False, f"{count} blocks taken of {self.free} free")
        popleft = self._queue.popleft
        out = [popleft() for _ in range(count)]
        if self._stale_entries and any(map(self._stale.__getitem__, out)):
            out = self._skip_stale(out)
        blocks = np.array(out, np.int64)
        self.evictions += self.index.evict(blocks)
        self.free -= count
        self.ref[blocks] = 1
        return blocks

    def _skip_stale(self, entries: list[int]) -> list[int]:
        """As many blocks from the front of the queue as there are `entries`, which were taken from it already."""
        queue, stale = self._queue, self._stale
        queue.extendleft(reversed(entries))
        out: list[int] = []
        while len(out) < len(entries):
            block = queue.popleft()
            if stale[block]:
                stale[block] -= 1
                self._stale_entries -= 1
            else:
                out.append(block)
        return out

    def take_freed_before(self, mark: int) -> int | None:
        """The oldest free block if it was freed before `mark`, for a copy destination; else None.

        What is freed while a plan is made may still be read by a copy or a swap of that plan.
        """
        queue, stale = self._queue, self._stale
        while queue and stale[queue[0]]:
            stale[queue.popleft()] -= 1
            self._stale_entries -= 1
        if not queue or self._freed - len(queue) >= mark:
            return None
        return int(self.take(1)[0])

    def hold(self, blocks: I64) -> None:
        """Add one reference to each block of a table; free (cached) blocks are revived."""
        ref = self.ref[blocks]
        if np.count_nonzero(ref) < len(ref):
            revived, stale = blocks[ref == 0].tolist(), self._stale
            for block in revived:
                stale[block] += 1
            self._stale_entries += len(revived)
            self.free -= len(revived)
        self.ref[blocks] = ref + 1

    def drop(self, blocks: I64) -> None:
        """Give back one reference to each block of a table, tail first; at zero a block is free but keeps its key."""
        if not len(blocks):
            return
        left = self.ref[blocks] - 1
        if np.count_nonzero(left < 0):
            invariant(False, f"a block of {blocks.tolist()} is given back twice")
        self.ref[blocks] = left
        freed = blocks[left == 0][::-1].tolist()
        self._queue.extend(freed)
        self._freed += len(freed)
        self.free += len(freed)
        if len(self._queue) > 2 * self.blocks + 64:
            self._compact()

    def _compact(self) -> None:
        """Rebuild the queue without stale entries."""
        stale, kept = self._stale, deque[int]()
        for block in self._queue:
            if stale[block]:
                stale[block] -= 1
            else:
                kept.append(block)
        self._queue, self._stale_entries = kept, 0

    def free_order(self) -> list[int]:
        """The free blocks in the order in which they will be handed out. For checks; O(blocks)."""
        if not self._stale_entries:
            return list(self._queue)
        skip, out = list(self._stale), []
        for block in self._queue:
            if skip[block]:
                skip[block] -= 1
            else:
                out.append(block)
        return out

    def match(self, keys: bytes, root: bytes) -> I64:
        """The blocks that cache the longest beginning of a chain of keys. Takes no reference."""
        return self.index.match(keys, root)

    def unreferenced(self, blocks: I64) -> int:
        """How many of `blocks` are free now, i.e. would leave the free count when held."""
        return len(blocks) - int(np.count_nonzero(self.ref[blocks]))

    def publish(self, blocks: I64, keys: bytes, parent: int, root: bytes, step: int) -> I64:
        """See `PrefixIndex.publish`."""
        return self.index.publish(blocks, keys, parent, root, step, self.ref) if self.prefix_cache else NO_BLOCKS

    def unpublish(self, blocks: Iterable[int]) -> set[int]:
        """See `PrefixIndex.unpublish`."""
        return self.index.unpublish(blocks)

    def cached(self) -> int:
        """Free blocks that are in the index. O(index)."""
        return int(np.count_nonzero(self.ref[self.index.blocks()] == 0))
