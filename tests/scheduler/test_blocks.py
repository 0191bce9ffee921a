"""BlockPool: counts, free order and prefix index, by example and as a state machine against a plain model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.errors import EngineError
from octavo.scheduler.blocks import BlockPool


def key(*path: int) -> bytes:
    return bytes(path)


def chain(count: int, first: int = 0) -> list[bytes]:
    return [key(*range(first, first + i + 1)) for i in range(count)]


def filled(pool: BlockPool, count: int, *, first: int = 0, step: int = 1) -> np.ndarray:
    blocks = pool.take(count)
    assert pool.publish(blocks, chain(count, first), None, step) == blocks.tolist()
    return blocks


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
    assert pool.match(chain(4)).tolist() == blocks[:2].tolist()
    assert pool.evictions == 2


def test_a_hit_revives_free_blocks_and_their_old_entries_are_passed_over():
    pool = BlockPool(5)
    blocks = filled(pool, 3)
    pool.drop(blocks)
    hit = pool.match(chain(3))
    assert pool.unreferenced(hit) == 3
    pool.hold(hit)
    assert pool.free == 1 and pool.unreferenced(hit) == 0
    assert pool.take(1).tolist() == [4]
    pool.drop(hit)
    pool.drop(np.array([4], np.int32))
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
    assert pool.publish(second, chain(2), None, 2) == []
    assert pool.match(chain(2)).tolist() == first.tolist()
    # What follows an unpublished block has no parent in the index.
    third = pool.take(1)
    assert pool.publish(third, chain(3)[2:], (int(second[1]), chain(2)[1]), 3) == []
    assert pool.publish(third, chain(3)[2:], (int(first[1]), chain(2)[1]), 3) == third.tolist()


def test_a_free_block_hands_its_key_to_one_that_is_held():
    pool = BlockPool(8)
    first = filled(pool, 2)
    pool.drop(first)
    second = pool.take(2)
    assert pool.publish(second, chain(2), None, 2) == second.tolist()
    assert pool.match(chain(2)).tolist() == second.tolist()
    assert pool.cached() == 0 and pool.free == 5


def test_unpublishing_takes_what_follows_along():
    pool = BlockPool(10)
    trunk = filled(pool, 2)
    left, right = pool.take(1), pool.take(2)
    pool.publish(left, [key(0, 1, 7)], (int(trunk[1]), chain(2)[1]), 2)
    pool.publish(right, [key(0, 1, 8), key(0, 1, 8, 9)], (int(trunk[1]), chain(2)[1]), 2)
    assert set(pool.unpublish([int(right[0])])) == set(right.tolist())
    assert pool.match([*chain(2), key(0, 1, 7)]).tolist() == [*trunk.tolist(), *left.tolist()]
    assert set(pool.unpublish(trunk.tolist())) == {*trunk.tolist(), *left.tolist()}
    assert not pool.index


def test_without_a_prefix_cache_nothing_is_published():
    pool = BlockPool(4, prefix_cache=False)
    assert pool.publish(pool.take(2), chain(2), None, 1) == []
    assert not pool.index


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

    Keys are paths of small numbers: block i of a table on path p has key p[:i + 1], so equal paths share blocks.
    """

    @initialize(blocks=st.integers(2, 14))
    def start(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.tables: list[tuple[list[int], np.ndarray]] = []
        self.step = 1

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def admit(self, path: list[int]) -> None:
        keys = [key(*path[: i + 1]) for i in range(len(path))]
        hit = self.pool.match(keys)
        need = len(path) - len(hit)
        if need + self.pool.unreferenced(hit) > self.pool.free:
            return
        self.pool.hold(hit)
        table = np.concatenate([hit, self.pool.take(need)])
        parent = (int(hit[-1]), keys[len(hit) - 1]) if len(hit) else None
        self.step += 1
        self.pool.publish(table[len(hit) :], keys[len(hit) :], parent, self.step)
        self.tables.append((path, table))

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def admit_without_looking(self, path: list[int]) -> None:
        """A table that did not match, e.g. because it was computed at the same time."""
        if len(path) > self.pool.free:
            return
        table = self.pool.take(len(path))
        self.step += 1
        self.pool.publish(table, [key(*path[: i + 1]) for i in range(len(path))], None, self.step)
        self.tables.append((path, table))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), grown=st.integers(0, 2))
    def grow(self, which: int, grown: int) -> None:
        if not self.pool.free:
            return
        at = which % len(self.tables)
        path, table = self.tables[at]
        block = self.pool.take(1)
        before, path = path, [*path, grown]
        self.step += 1
        self.pool.publish(block, [key(*path)], (int(table[-1]), key(*before)), self.step)
        self.tables[at] = (path, np.concatenate([table, block]))

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
        self.tables.append(([9], np.array([block], np.int32)))

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "pool"):
            return
        owners = np.zeros(self.pool.blocks, np.int32)
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
        pool = self.pool
        assert pool.index == {k: b for b, k in enumerate(pool.key) if k is not None}
        for own, block in pool.index.items():
            assert len(own) == 1 or own[:-1] in pool.index, "cached without its parent"
            assert pool.parent[block] == (own[:-1] or None)
        for path, table in self.tables:
            for i, block in enumerate(table.tolist()):
                assert pool.key[block] in (None, key(*path[: i + 1])), "a block with a key of another text"


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestPool = PoolMachine.TestCase


@pytest.mark.slow
def test_pool_and_index_at_length():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=2000, stateful_step_count=100, deadline=None, derandomize=True)
    )
