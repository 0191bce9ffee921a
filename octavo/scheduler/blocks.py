"""BlockPool: reference counts, free order and prefix index of the KV blocks. Blocks are integers.

Owner: the scheduler, one thread. Block 0 is padding and never handed out. A block is *held* (count > 0) or *free*;
a free block may still carry the key of its content and is then *cached*: a hit revives it, `take` evicts it.

Free blocks are reused in the order in which they were freed. `drop` frees a table from its tail, so of a cached
chain the tail always goes first and no cached block outlives its parent. `publish` keeps that order: a key is only
entered when its parent's key stands for the block before it in the same table.

The free order is a queue of block numbers with lazy deletion: a block that is revived leaves its entry behind and is
noted as stale once; stale entries are the older ones of a block. Every operation is O(1) a block; the queue is
rebuilt when stale entries outnumber the pool. The state fills `ref` in bulk, hence numpy; the rest is walked block
by block, hence lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.errors import invariant

I32 = NDArray[np.int32]


class BlockPool:
    """Blocks 1..`blocks - 1`. `evictions` counts cached blocks that were reused for something else.

    key, parent: what a published block holds, and the key before it in its chain (None: it is the first).
    filled_at: number of the step whose plan fills a published block.
    """

    def __init__(self, blocks: int, *, prefix_cache: bool = True) -> None:
        self.blocks = blocks
        self.prefix_cache = prefix_cache
        self.ref = np.zeros(blocks, np.int32)
        self.key: list[bytes | None] = [None] * blocks
        self.parent: list[bytes | None] = [None] * blocks
        self.filled_at = np.full(blocks, -1)
        self.index: dict[bytes, int] = {}
        self.free = blocks - 1
        self.evictions = 0
        self._queue = deque(range(1, blocks))
        self._stale = [0] * blocks
        self._freed = blocks - 1  # entries that the queue ever had

    @property
    def usable(self) -> int:
        """Blocks that can hold KV: all but the padding block."""
        return self.blocks - 1

    @property
    def mark(self) -> int:
        """The end of the free order now, for `take_freed_before`."""
        return self._freed

    def take(self, count: int) -> I32:
        """Hand out `count` free blocks, oldest first, evicting what they cached. The caller has checked `free`."""
        if count > self.free:
            invariant(False, f"{count} blocks taken of {self.free} free")
        popleft, keys, index = self._queue.popleft, self.key, self.index
        out = [popleft() for _ in range(count)]
        if any(map(self._stale.__getitem__, out)):
            out = self._skip_stale(out)
        before = len(index)
        for block in out:
            key = keys[block]
            if key is not None:
                del index[key]
                keys[block] = None
        self.evictions += before - len(index)
        self.free -= count
        blocks = np.array(out, np.int32)
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
        if not queue or self._freed - len(queue) >= mark:
            return None
        return int(self.take(1)[0])

    def hold(self, blocks: I32) -> None:
        """Add one reference to each block of a table; free (cached) blocks are revived."""
        ref = self.ref[blocks]
        if np.count_nonzero(ref) < len(ref):
            for block in blocks[ref == 0].tolist():
                self._stale[block] += 1
                self.free -= 1
        self.ref[blocks] = ref + 1

    def drop(self, blocks: I32) -> None:
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
        self._queue = kept

    def free_order(self) -> list[int]:
        """The free blocks in the order in which they will be handed out. For checks; O(blocks)."""
        if not any(self._stale):
            return list(self._queue)
        skip, out = list(self._stale), []
        for block in self._queue:
            if skip[block]:
                skip[block] -= 1
            else:
                out.append(block)
        return out

    def match(self, keys: Sequence[bytes]) -> I32:
        """The blocks that cache the longest run of `keys` from the start. Takes no reference."""
        hits = map(self.index.get, keys)
        return np.array(list(iter(hits.__next__, None)), np.int32)  # until the first None

    def unreferenced(self, blocks: I32) -> int:
        """How many of `blocks` are free now, i.e. would leave the free count when held."""
        return len(blocks) - int(np.count_nonzero(self.ref[blocks]))

    def publish(self, blocks: I32, keys: Sequence[bytes], parent: tuple[int, bytes] | None, step: int) -> list[int]:
        """Enter held, full blocks that follow each other in one table; returns those that are new in the index.

        `parent` is the block before the first in the same table with that block's key, None at the start of the
        table. Where the index keeps another held block for a key, the rest of the table stays unpublished: its
        chain goes through the other block. A *free* block that holds the same content hands its key over, so that
        a chain can go on in the table of a running sequence.
        """
        index, own, parents = self.index, self.key, self.parent
        out: list[int] = []
        if not self.prefix_cache or (parent is not None and index.get(parent[1]) != parent[0]):
            return out
        before = None if parent is None else parent[1]
        listed: list[int] = blocks.tolist()
        if keys and keys[0] not in index:  # then nothing after it is: the common case, in bulk
            index.update(zip(keys, listed, strict=True))
            for block, key in zip(listed, keys, strict=True):
                own[block] = key
                parents[block] = before
                before = key
            self.filled_at[blocks] = step
            return listed
        for block, key in zip(listed, keys, strict=True):
            if own[block] is None:
                other = index.get(key)
                if other is not None:
                    if self.ref[other]:
                        break
                    own[other] = None
                index[key] = block
                own[block] = key
                parents[block] = before
                out.append(block)
            before = key
        self.filled_at[out] = step
        return out

    def unpublish(self, blocks: Iterable[int]) -> list[int]:
        """Take publications back, because what the blocks hold is not what their keys say (a failed step).

        Whatever follows them in the index goes too: it was computed from them. Returns all blocks concerned, those
        given and those that followed. O(index), for rare use.
        """
        following: dict[bytes, list[int]] = {}
        for key, block in self.index.items():
            before = self.parent[block]
            if before is not None and self.key[block] == key:
                following.setdefault(before, []).append(block)
        todo, gone = list(blocks), []
        while todo:
            block = todo.pop()
            gone.append(block)
            held = self.key[block]
            if held is not None:
                del self.index[held]
                self.key[block] = None
                todo += following.pop(held, ())
        return gone

    def cached(self) -> int:
        """Free blocks that still carry a key. O(index)."""
        return sum(1 for block in self.index.values() if self.ref[block] == 0)
