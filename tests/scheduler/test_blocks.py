"""BlockPool: counts, free order and prefix index, by example and as a state machine against a plain model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.errors import EngineError
from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.keys import KEY_BYTES

ROOT = b"r" * KEY_BYTES


def key(*path: int) -> bytes:
    """A key that names its whole path, as chained hashes do."""
    return bytes(path).ljust(KEY_BYTES, b"\0")


def chain(count: int, first: int = 0) -> bytes:
    return b"".join(key(*range(first, first + i + 1)) for i in range(count))


def keys_of(path: list[int]) -> bytes:
    return b"".join(key(*path[: i + 1]) for i in range(len(path)))


def filled(pool: BlockPool, count: int, *, first: int = 0, step: int = 1) -> np.ndarray:
    blocks = pool.take(count)
    assert pool.publish(blocks, chain(count, first), 0, ROOT, step).tolist() == blocks.tolist()
    return blocks


def parent_key(pool: BlockPool, block: int) -> bytes | None:
    """The key before a published block's own; None at the start of a text."""
    run, at = pool.index._where(block)
    if at:
        return run.key(at - 1)
    return run.parent[0].key(run.parent[1]) if run.parent else None


def test_blocks_are_handed_out_oldest_first_and_never_block_0():
    pool = BlockPool(6)
    assert pool.usable == pool.free == 5
    first = pool.take(2)
    assert first.tolist() == [1, 2]
    pool.drop(first)
    assert pool.take(5).tolist() == [3, 4, 5, 2, 1]
    assert pool.free == 0


def test_a_dropped_chain_is_evicted_from_its_tail():
    pool = BlockPool(5)
    blocks = filled(pool, 4)
    pool.drop(blocks)
    assert pool.free == 4 and pool.cached() == 4
    pool.take(2)
    assert pool.match(chain(4), ROOT).tolist() == blocks[:2].tolist()
    assert pool.evictions == 2


def test_a_hit_revives_free_blocks_and_their_old_entries_are_passed_over():
    pool = BlockPool(5)
    blocks = filled(pool, 3)
    pool.drop(blocks)
    hit = pool.match(chain(3), ROOT)
    assert pool.unreferenced(hit) == 3
    pool.hold(hit)
    assert pool.free == 1 and pool.unreferenced(hit) == 0
    assert pool.take(1).tolist() == [4]
    pool.drop(hit)
    pool.drop(np.array([4]))
    assert sorted(pool.free_order()) == [1, 2, 3, 4]
    assert pool.take(4).tolist() == [3, 2, 1, 4]


def test_a_shared_block_is_free_when_its_last_holder_is_gone():
    pool = BlockPool(4)
    blocks = filled(pool, 2)
    pool.hold(blocks)
    pool.drop(blocks)
    assert pool.free == 1
    pool.drop(blocks)
    assert pool.free == 3


def test_what_may_not_happen_is_an_engine_error():
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.drop(blocks)
    with pytest.raises(EngineError, match="given back twice"):
        pool.drop(blocks)
    with pytest.raises(EngineError, match="4 blocks taken of"):
        BlockPool(4).take(4)


def test_a_copy_goes_into_a_block_that_was_free_before_the_plan():
    pool = BlockPool(4)
    held = pool.take(3)
    mark = pool.mark
    pool.drop(held[:1])
    assert pool.take_freed_before(mark) is None
    assert pool.take_freed_before(pool.mark) == held[0]
    assert pool.take_freed_before(pool.mark) is None


def test_the_index_keeps_the_first_of_two_equal_held_blocks():
    pool = BlockPool(8)
    first = filled(pool, 2)
    second = pool.take(2)
    assert pool.publish(second, chain(2), 0, ROOT, 2).tolist() == []
    assert pool.match(chain(2), ROOT).tolist() == first.tolist()
    # What follows an unpublished block has no parent in the index.
    third = pool.take(1)
    assert pool.publish(third, key(0, 1, 2), int(second[1]), ROOT, 3).tolist() == []
    assert pool.publish(third, key(0, 1, 2), int(first[1]), ROOT, 3).tolist() == third.tolist()
    assert pool.match(chain(3), ROOT).tolist() == [*first.tolist(), *third.tolist()]


def test_a_free_block_hands_its_place_to_one_that_is_held():
    pool = BlockPool(8)
    first = filled(pool, 2)
    pool.drop(first)
    second = pool.take(2)
    assert pool.publish(second, chain(2), 0, ROOT, 2).tolist() == second.tolist()
    assert pool.match(chain(2), ROOT).tolist() == second.tolist()
    assert pool.cached() == 0 and pool.free == 5 and len(pool.index) == 2


def test_a_text_may_leave_a_run_in_the_middle():
    pool = BlockPool(12)
    first = filled(pool, 4)
    branch = pool.take(2)
    pool.publish(branch, key(0, 1, 7) + key(0, 1, 7, 8), int(first[1]), ROOT, 2)
    assert pool.match(keys_of([0, 1, 7, 8, 9]), ROOT).tolist() == [*first[:2].tolist(), *branch.tolist()]
    assert pool.match(keys_of([0, 1, 2, 9]), ROOT).tolist() == first[:3].tolist()
    assert pool.match(keys_of([5, 1]), ROOT).tolist() == []
    assert parent_key(pool, int(branch[0])) == key(0, 1)
    assert parent_key(pool, int(first[0])) is None


def test_unpublishing_takes_what_follows_along():
    pool = BlockPool(10)
    trunk = filled(pool, 2)
    left, right = pool.take(1), pool.take(2)
    pool.publish(left, key(0, 1, 7), int(trunk[1]), ROOT, 2)
    pool.publish(right, key(0, 1, 8) + key(0, 1, 8, 9), int(trunk[1]), ROOT, 2)
    assert pool.unpublish([int(right[0])]) == set(right.tolist())
    assert pool.match(keys_of([0, 1, 7]), ROOT).tolist() == [*trunk.tolist(), *left.tolist()]
    assert pool.unpublish([int(trunk[0])]) == {*trunk.tolist(), *left.tolist()}
    assert not len(pool.index) and not pool.index.entries()


def test_without_a_prefix_cache_nothing_is_published():
    pool = BlockPool(4, prefix_cache=False)
    assert not len(pool.publish(pool.take(2), chain(2), 0, ROOT, 1))
    assert not len(pool.index)


def test_the_free_queue_does_not_grow_for_ever():
    pool = BlockPool(8)
    blocks = filled(pool, 5)
    for _ in range(1000):
        pool.drop(blocks)
        pool.hold(blocks)
    assert len(pool._queue) <= 2 * pool.blocks + 64 + len(blocks)
    pool.drop(blocks)
    assert sorted(pool.free_order()) == list(range(1, 8))


class PoolMachine(RuleBasedStateMachine):
    """Tables come, grow, share, fail and go; a plain model says what the pool must look like after every rule.

    Keys name paths of small numbers: block i of a table on path p has the key of p[:i + 1], so equal paths share.
    """

    @initialize(blocks=st.integers(2, 14))
    def start(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.tables: list[tuple[list[int], np.ndarray]] = []
        self.step = 1

    @rule(path=st.lists(st.integers(1, 3), min_size=1, max_size=6))
    def admit(self, path: list[int]) -> None:
        keys = keys_of(path)
        hit = self.pool.match(keys, ROOT)
        need = len(path) - len(hit)
        if need + self.pool.unreferenced(hit) > self.pool.free:
            return
        self.pool.hold(hit)
        table = np.concatenate([hit, self.pool.take(need)])
        self.step += 1
        parent = int(hit[-1]) if len(hit) else 0
        self.pool.publish(table[len(hit) :], keys[KEY_BYTES * len(hit) :], parent, ROOT, self.step)
        self.tables.append((path, table))

    @rule(path=st.lists(st.integers(1, 3), min_size=1, max_size=6))
    def admit_without_looking(self, path: list[int]) -> None:
        """A table that did not match, e.g. because it was computed at the same time."""
        if len(path) > self.pool.free:
            return
        table = self.pool.take(len(path))
        self.step += 1
        self.pool.publish(table, keys_of(path), 0, ROOT, self.step)
        self.tables.append((path, table))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), grown=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def grow(self, which: int, grown: list[int]) -> None:
        if self.pool.free < len(grown):
            return
        at = which % len(self.tables)
        before, table = self.tables[at]
        blocks = self.pool.take(len(grown))
        path = [*before, *grown]
        self.step += 1
        self.pool.publish(blocks, keys_of(path)[KEY_BYTES * len(before) :], int(table[-1]), ROOT, self.step)
        self.tables[at] = (path, np.concatenate([table, blocks]))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def share(self, which: int) -> None:
        path, table = self.tables[which % len(self.tables)]
        self.pool.hold(table)
        self.tables.append((path, table.copy()))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        _, table = self.tables.pop(which % len(self.tables))
        self.pool.drop(table)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), column=st.integers(0, 9))
    def fail(self, which: int, column: int) -> None:
        _, table = self.tables[which % len(self.tables)]
        self.pool.unpublish([int(table[column % len(table)])])

    @rule(fresh=st.booleans())
    def copy(self, fresh: bool) -> None:
        mark = self.pool.mark if fresh else 0
        order = self.pool.free_order()
        block = self.pool.take_freed_before(mark)
        if block is None:
            assert not fresh or not order
            return
        assert block == order[0]
        self.tables.append(([9], np.array([block])))

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "pool"):
            return
        owners = np.zeros(self.pool.blocks, np.int64)
        for _, table in self.tables:
            owners[table] += 1
        assert (owners == self.pool.ref).all()
        order = self.pool.free_order()
        assert sorted(order) == [b for b in range(1, self.pool.blocks) if owners[b] == 0]
        assert self.pool.free == len(order)

    @invariant()
    def index(self) -> None:
        if not hasattr(self, "pool"):
            return
        entries = self.pool.index.entries()
        assert sorted(entries.values()) == self.pool.index.blocks()
        assert len(self.pool.index) == len(entries)
        for own, block in entries.items():
            path = own.rstrip(b"\0")
            parent = parent_key(self.pool, block)
            assert parent is None or parent in entries, "cached without its parent"
            assert parent is None or path.startswith(parent.rstrip(b"\0"))
        for path, table in self.tables:
            for i, block in enumerate(table.tolist()):
                if block in self.pool.index:
                    assert entries[key(*path[: i + 1])] == block, "a block with a key of another text"
            assert self.pool.match(keys_of(path), ROOT).tolist() == self._longest(entries, path)

    def _longest(self, entries: dict[bytes, int], path: list[int]) -> list[int]:
        out = []
        for i in range(len(path)):
            block = entries.get(key(*path[: i + 1]))
            if block is None:
                break
            out.append(block)
        return out


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestPool = PoolMachine.TestCase


@pytest.mark.slow
def test_pool_and_index_at_length():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=2000, stateful_step_count=100, deadline=None, derandomize=True)
    )
