"""BlockPool: reference counts, free order and prefix index of the KV blocks. Blocks are integers.

Owner: the scheduler, one thread. Block 0 is padding and never handed out. A block is *held* (count > 0) or *free*;
a free block may still carry the key of its content and is then *cached*: a hit revives it, `take` evicts it.

Free blocks are reused in the order in which they were freed. `drop` frees a table from its tail, so of a cached
chain the tail always goes first and no cached block outlives its parent. `publish` keeps that order: a key is only
entered when its parent's key stands for the block before it in the same table.

The free order is a queue with lazy deletion: an entry is stale when the block's stamp has moved on (a revived block
leaves its entry behind). Every operation is O(1) a block; the queue is rebuilt when stale entries outnumber the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.errors import invariant


class BlockPool:
    """Blocks 1..`blocks - 1`. `evictions` counts cached blocks that were reused for something else."""

    def __init__(self, blocks: int, *, prefix_cache: bool = True) -> None:
        self.blocks = blocks
        self.prefix_cache = prefix_cache
        self.ref = [0] * blocks
        self.key: list[bytes | None] = [None] * blocks
        self.filled_at = [-1] * blocks  # step whose plan fills a published block
        self.index: dict[bytes, int] = {}
        self.free = blocks - 1
        self.evictions = 0
        self.clock = 0
        self._stamp = [0] * blocks
        self._queue: deque[tuple[int, int]] = deque((block, 0) for block in range(1, blocks))

    @property
    def usable(self) -> int:
        """Blocks that can hold KV: all but the padding block."""
        return self.blocks - 1

    def take(self, count: int) -> list[int]:
        """Hand out `count` free blocks, oldest first, evicting what they cached. The caller has checked `free`."""
        invariant(count <= self.free, f"{count} blocks taken of {self.free} free")
        out: list[int] = []
        while len(out) < count:
            block, stamp = self._queue.popleft()
            if self.ref[block] or self._stamp[block] != stamp:
                continue
            self._hand_out(block)
            out.append(block)
        self.free -= count
        return out

    def take_freed_before(self, clock: int) -> int | None:
        """One free block that was freed before `clock`, for a copy destination; None when there is none.

        What is freed while a plan is made may still be read by a copy or a swap of that plan.
        """
        while self._queue:
            block, stamp = self._queue[0]
            if self.ref[block] or self._stamp[block] != stamp:
                self._queue.popleft()
                continue
            if stamp > clock:
                return None
            self._queue.popleft()
            self._hand_out(block)
            self.free -= 1
            return block
        return None

    def _hand_out(self, block: int) -> None:
        key = self.key[block]
        if key is not None:
            del self.index[key]
            self.key[block] = None
            self.evictions += 1
        self.ref[block] = 1

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block; free (cached) blocks are revived."""
        for block in blocks:
            if self.ref[block] == 0:
                self.free -= 1
            self.ref[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a table, tail first; at zero a block is free but keeps its key."""
        self.clock += 1
        clock = self.clock
        for block in reversed(blocks):
            self.ref[block] -= 1
            invariant(self.ref[block] >= 0, f"block {block} given back twice")
            if self.ref[block] == 0:
                self._stamp[block] = clock
                self._queue.append((block, clock))
                self.free += 1
        if len(self._queue) > 2 * self.blocks + 64:
            self._compact()

    def _compact(self) -> None:
        self._queue = deque(
            (block, stamp) for block, stamp in self._queue if not self.ref[block] and self._stamp[block] == stamp
        )

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks that cache the longest run of `keys` from the start. Takes no reference."""
        index, out = self.index, []
        for key in keys:
            block = index.get(key)
            if block is None:
                break
            out.append(block)
        return out

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are free now, i.e. would leave the free count when held."""
        return sum(1 for block in blocks if self.ref[block] == 0)

    def publish(self, block: int, key: bytes, parent: tuple[int, bytes] | None, step: int) -> bool:
        """Enter a held, full block under `key`; False when the index keeps another block for it.

        `parent` is the block before it in the same table with that block's key, None for the first block. A block
        whose parent is known under another block stays unpublished. A *free* block that holds the same content
        hands its key over, so that a chain can go on in the table of a running sequence.
        """
        if not self.prefix_cache or self.key[block] is not None:
            return False
        if parent is not None and self.index.get(parent[1]) != parent[0]:
            return False
        other = self.index.get(key)
        if other is not None:
            if self.ref[other]:
                return False
            self.key[other] = None
        self.index[key] = block
        self.key[block] = key
        self.filled_at[block] = step
        return True

    def unpublish(self, block: int) -> None:
        """Take a publication back: what the block holds is not what its key says (a failed step)."""
        key = self.key[block]
        if key is not None:
            del self.index[key]
            self.key[block] = None

    def cached(self) -> int:
        """Free blocks that still carry a key."""
        return sum(1 for block, key in enumerate(self.key) if key is not None and self.ref[block] == 0)
