"""PrefixIndex: which block holds which prefix of a text, as runs of blocks that were published together.

Keys are chained (`octavo.scheduler.keys`), so a key names the whole prefix and not only its own block. Blocks that a
plan fills one after the other are entered as one *run*, and only the run's first key is looked up: matching a prompt
walks from run to run, comparing bytes in bulk. A run that continues another is found by its own first key, so runs
are never split; a text that leaves a run in the middle starts a run of its own there.

What a sequence generated is entered without keys when it ends (`defer`): hashing would be a large part of a step's
cost, and most texts never go on. The keys are made when somebody's prompt gets to that place.

The index is closed: no block is published without its parent. Blocks are evicted from the tail of their chain
(`octavo.scheduler.blocks` sees to the order), so what is left of a run is always its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.errors import invariant
from octavo.scheduler.keys import KEY_BYTES, chain_keys

I64 = NDArray[np.int64]

NO_BLOCKS = np.empty(0, np.int64)
Place = tuple["Run", int]


class Run:
    """`keys[: KEY_BYTES * valid]` stand for `blocks[:valid]`. parent: place of the block before the first, if any.

    ids: while the keys are not made, the blocks' token ids. root: the key before the first block of the text.
    """

    __slots__ = ("blocks", "ids", "keys", "number", "parent", "root", "valid")

    def __init__(self, number: int, keys: bytes, blocks: I64, parent: Place | None) -> None:
        self.number, self.keys, self.blocks, self.parent = number, keys, blocks, parent
        self.valid = len(blocks)
        self.ids = self.root = b""

    def chain(self) -> list[bytes]:
        """The keys that belong to `ids`."""
        before = self.parent[0].key(self.parent[1]) if self.parent else self.root
        size = len(self.ids) // 4 // len(self.blocks)
        return chain_keys(before, np.frombuffer(self.ids, np.int32)[: size * self.valid], size)

    def key(self, at: int) -> bytes:
        """The key of the block at a place."""
        return self.keys[KEY_BYTES * at : KEY_BYTES * (at + 1)]


class PrefixIndex:
    """The published blocks of a pool of `blocks`. `len` counts them.

    filled_at: number of the step whose plan fills a published block.
    """

    def __init__(self, blocks: int) -> None:
        self.filled_at = np.full(blocks, -1)
        self._size = 0
        self._heads: dict[bytes, Run] = {}
        self._deferred: dict[object, list[Run]] = {}  # runs without keys, by the place that they continue
        self._runs: list[Run | None] = [None]  # by number; 0 is nobody's
        self._numbers: list[int] = []  # to be used again
        self._run_of = np.zeros(blocks, np.int64)
        self._place = np.zeros(blocks, np.int64)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return bool(self._run_of[block])

    def entries(self) -> dict[bytes, int]:
        """All keys that there are and their blocks; O(index)."""
        out = {}
        for run in self._heads.values():
            for at, block in enumerate(run.blocks[: run.valid].tolist()):
                out[run.key(at)] = block
        return out

    def deferred(self) -> list[tuple[bytes, int]]:
        """Blocks whose keys are not made yet, with the keys that they would get. For checks; slow."""
        runs = [run for group in self._deferred.values() for run in group]
        return [pair for run in runs for pair in zip(run.chain(), run.blocks[: run.valid].tolist(), strict=True)]

    def blocks(self) -> list[int]:
        """All published blocks; O(blocks)."""
        out: list[int] = np.flatnonzero(self._run_of).tolist()
        return out

    def _where(self, block: int) -> Place:
        run = self._runs[self._run_of[block]]
        if run is None:
            raise KeyError(block)
        return run, int(self._place[block])

    def match(self, keys: bytes, root: bytes) -> I64:
        """The blocks that hold the longest beginning of a chain of keys after `root`."""
        found, at = [], 0
        place: object = root
        while at < len(keys):
            if place in self._deferred:
                self._make_keys(place)
            run = self._heads.get(keys[at : at + KEY_BYTES])
            if run is None or not run.valid:
                break
            size = min(KEY_BYTES * run.valid, len(keys) - at)
            if run.keys[:size] != keys[at : at + size]:
                size = _common(run.keys, keys[at : at + size])
            found.append(run.blocks[: size // KEY_BYTES])
            at += size
            place = (run.number, size // KEY_BYTES - 1)
        return found[0] if len(found) == 1 else np.concatenate(found) if found else NO_BLOCKS

    def publish(self, blocks: I64, keys: bytes, parent: int, root: bytes, step: int, ref: I64) -> I64:
        """Enter held, full blocks that follow each other in one table; returns those that stand for their keys now.

        `parent` is the block before the first in that table, 0 at its start; when it is not published, nothing is.
        `root` is the key before the first block of the text.
        Where the index keeps another held block (`ref` has the counts) for a key, the rest of the table stays
        unpublished: its chain goes through the other block. A *free* block that holds the same content hands its
        place over, so that a chain can go on in the table of a running sequence.
        """
        before: Place | None = None
        if parent:
            if not self._run_of[parent]:
                return NO_BLOCKS
            before = self._where(parent)
        place_of = (before[0].number, before[1]) if before else root
        if place_of in self._deferred:
            self._make_keys(place_of)
        done = 0
        while done < len(blocks) and (place := self._find(before, keys[KEY_BYTES * done : KEY_BYTES * (done + 1)])):
            other = int(place[0].blocks[place[1]])
            if other != blocks[done]:
                if ref[other]:
                    return blocks[:done]
                self._hand_over(place, other, int(blocks[done]), step)
            before = place
            done += 1
        if done < len(blocks):
            self._enter(blocks[done:].copy(), keys[KEY_BYTES * done :], before, step)
        return blocks

    def _find(self, before: Place | None, key: bytes) -> Place | None:
        """Where the index has a key whose parent is at `before`."""
        if before is not None:
            run, at = before
            if at + 1 < run.valid and run.key(at + 1) == key:
                return run, at + 1
        head = self._heads.get(key)
        return None if head is None else (head, 0)

    def defer(self, blocks: I64, ids: bytes, parent: int, root: bytes, step: int) -> None:
        """Enter held, full blocks with token ids `ids` (int32), whose keys are made when a prompt gets there."""
        if parent and not self._run_of[parent]:
            return
        before = self._where(parent) if parent else None
        run = self._new_run(blocks.copy(), b"", before, step)
        run.ids, run.root = ids, root
        self._deferred.setdefault((before[0].number, before[1]) if before else root, []).append(run)

    def _make_keys(self, place: object) -> None:
        """Keys for the runs that continue a place; those that bring nothing new leave the index."""
        for run in self._deferred.pop(place):
            keys = b"".join(run.chain())
            if self._find(run.parent, keys[:KEY_BYTES]) is None:
                run.keys, run.ids = keys, b""
                self._heads[run.key(0)] = run
            else:
                self._run_of[run.blocks[: run.valid]] = 0
                self._size -= run.valid
                self._forget(run)

    def _enter(self, blocks: I64, keys: bytes, parent: Place | None, step: int) -> None:
        run = self._new_run(blocks, keys, parent, step)
        self._heads[run.key(0)] = run

    def _new_run(self, blocks: I64, keys: bytes, parent: Place | None, step: int) -> Run:
        if parent is not None and not parent[0].keys:
            invariant(False, "a text goes on from keys that are made")
        number = self._numbers.pop() if self._numbers else len(self._runs)
        if number == len(self._runs):
            self._runs.append(None)
        run = self._runs[number] = Run(number, keys, blocks, parent)
        self._run_of[blocks] = number
        self._place[blocks] = np.arange(len(blocks))
        self.filled_at[blocks] = step
        self._size += len(blocks)
        return run

    def _hand_over(self, place: Place, other: int, block: int, step: int) -> None:
        run, at = place
        self._run_of[other] = 0
        run.blocks[at] = block
        self._run_of[block], self._place[block] = run.number, at
        self.filled_at[block] = step

    def evict(self, blocks: I64) -> int:
        """Forget blocks that are handed out for something else; returns how many were published."""
        numbers = self._run_of[blocks]
        if not np.count_nonzero(numbers):
            return 0
        places: list[int] = self._place[blocks].tolist()
        ends = (numbers[1:] != numbers[:-1]).nonzero()[0].tolist()
        count = first = 0
        for last in (*ends, len(places) - 1):  # stretches of one run, mostly long
            run = self._runs[numbers[first]]
            if run is not None:
                at = places[last]
                if places[first] != run.valid - 1 or places[first] - at != last - first:
                    invariant(False, "a chain is evicted from its tail")
                count += run.valid - at
                run.valid = at
                if not at:
                    self._remove(run)
            first = last + 1
        self._run_of[blocks] = 0
        self._size -= count
        return count

    def _remove(self, run: Run) -> None:
        """A run of which nothing is left goes."""
        if run.ids:
            place: object = (run.parent[0].number, run.parent[1]) if run.parent else run.root
            group = self._deferred[place]
            group.remove(run)
            if not group:
                del self._deferred[place]
        else:
            del self._heads[run.key(0)]
        self._forget(run)

    def _forget(self, run: Run) -> None:
        self._runs[run.number] = None
        self._numbers.append(run.number)

    def unpublish(self, blocks: Iterable[int]) -> set[int]:
        """Take publications back, because what the blocks hold is not what their keys say (a failed step).

        Whatever follows them in the index goes too: it was computed from them. Returns all blocks concerned, those
        given and those that followed. O(index), for rare use.
        """
        gone = set(blocks)
        following: dict[int, list[tuple[int, Run]]] = {}
        for run in self._runs:
            if run is not None and run.parent is not None:
                following.setdefault(run.parent[0].number, []).append((run.parent[1], run))
        todo = [self._where(block) for block in gone if self._run_of[block]]
        while todo:
            run, at = todo.pop()
            if at < run.valid:
                lost = run.blocks[at : run.valid]
                gone.update(lost.tolist())
                self._run_of[lost] = 0
                todo += [(child, 0) for place, child in following.get(run.number, ()) if place >= at]
                self._size -= run.valid - at
                run.valid = at
                if not at:
                    self._remove(run)
        return gone


def _common(first: bytes, second: bytes) -> int:
    """Bytes of the longest common beginning in whole keys; `second` is not longer, and differs."""
    low, high = 0, len(second) // KEY_BYTES  # low keys are equal, not all high are
    while high - low > 1:
        middle = (low + high) // 2
        if first[KEY_BYTES * low : KEY_BYTES * middle] == second[KEY_BYTES * low : KEY_BYTES * middle]:
            low = middle
        else:
            high = middle
    return KEY_BYTES * low
