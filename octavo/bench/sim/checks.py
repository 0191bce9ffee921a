"""Invariants of the scheduler, recounted from scratch after every step. Nothing here trusts a counter.

The numbers are those of the design: (I1) every block in exactly one state, on the device and on the host; (I2) a
reference count is the number of tables that hold the block; (I3) who shares a block has the same content there; (I4)
nobody writes a shared block; (I5) index, keys and block contents agree, salts never mix; (I6) budget, rows and
sections within their limits; (I7) computed <= known <= limit, blocks cover what is computed; (I8) what ended owns
nothing; (I9) one end each; (I10) output as alone; (I11) counters equal a recount; (I12) no key in the index without
its parent's. I9 and I10 are checked where results arrive, in `world`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from octavo.bench.sim.oracle import Ledger, Violation
from octavo.runner.fake import FakeRunner
from octavo.scheduler.keys import KEY_BYTES
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.slots import DEAD, DECODE, ENDING, PREEMPTED, PREFILL, STATES, WAITING, Sequence


@dataclass(slots=True, eq=False)
class Seen:
    """One live sequence as found in the tables; the columns in the order of `octavo.scheduler.slots.COLUMNS`."""

    row: int
    sequence: Sequence
    blocks: list[int]
    state: int
    known: int
    computed: int
    limit: int
    flags: int
    in_flight: int
    device_row: int
    columns: int
    order: int
    last_step: int
    request_id: int
    child: int
    tenant: int

    def __str__(self) -> str:
        return f"request {self.request_id}.{self.child} ({STATES[self.state]}, row {self.row})"


def ensure(condition: object, message: str) -> None:
    """Raise Violation unless the condition holds. Where it matters for speed, the caller tests it itself."""
    if not condition:
        raise Violation(message)


def look(scheduler: Scheduler) -> list[Seen]:
    """Every live sequence with its columns and blocks."""
    state = scheduler.state
    data = state.slots.columns()
    live = [row for row, sequence in enumerate(state.slots.sequences) if sequence is not None]
    dirty = np.flatnonzero(data.any(axis=0)).tolist()
    if dirty != live:
        raise Violation(f"I8: rows {sorted(set(dirty) ^ set(live))} are empty, but not all zeros")
    sequences = state.slots.sequence
    return [
        Seen(row, sequences(row), state.blocks_of(row).tolist(), *columns)
        for row, columns in zip(live, data[:, live].T.tolist(), strict=True)
    ]


def check_blocks(scheduler: Scheduler, seen: list[Seen]) -> list[int]:
    """I1, I2. Returns the reference counts."""
    pool = scheduler.state.pool
    ref: list[int] = pool.ref.tolist()
    owners = [0] * pool.blocks
    for one in seen:
        for block in one.blocks:
            owners[block] += 1
        if len(set(one.blocks)) != len(one.blocks):
            raise Violation(f"I2: {one} holds a block twice: {one.blocks}")
    if owners != ref:
        wrong = [(b, ref[b], owners[b]) for b in range(pool.blocks) if ref[b] != owners[b]]
        raise Violation(f"I2: (block, count, tables that hold it): {wrong[:5]}")
    order = pool.free_order()
    free = ref.count(0) - 1
    ensure(ref[0] == 0 and 0 not in order, "I1: the padding block is in use")
    ensure(len(order) == len(set(order)) == free == pool.free, f"I1: {len(order)} in order, {pool.free}, {free} free")
    ensure(sum(map(ref.__getitem__, order)) == 0, "I1: a held block is in the free order")
    return ref


def check_index(scheduler: Scheduler, runner: FakeRunner, ledger: Ledger, *, contents: bool) -> None:
    """I5, I12. contents: compare with the device (not while a lost step waits to be reported)."""
    index = scheduler.state.pool.index.entries()
    keys, blocks = list(index), list(index.values())
    for key, block in scheduler.state.pool.index.deferred():
        keys.append(key)
        blocks.append(block)
    published = scheduler.state.pool.index.blocks()
    ensure(sorted(blocks) == published, "I5: a block is in the index twice, or thinks that it is in it")
    ensure(len(scheduler.state.pool.index) == len(published), "I11: the size of the index")
    known: list[object] = list(map(ledger.contents.get, keys))
    ensure(None not in known, "I5: a key that belongs to no text")
    if contents and list[object](map(runner.kv.__getitem__, blocks)) != known:
        wrong = [b for b, content in zip(blocks, known, strict=True) if runner.kv[b] != content]
        raise Violation(f"I5: blocks {wrong[:5]} do not hold what their keys say")
    orphans = set(map(ledger.parents.__getitem__, keys)) - set(keys) - ledger.roots.keys()
    ensure(not orphans, "I12: a block is cached without its parent")


def check_host(scheduler: Scheduler, runner: FakeRunner, ledger: Ledger, seen: list[Seen], *, contents: bool) -> None:
    """I1, I5, I7 for host blocks: each belongs to one sequence that waits, and holds what that had computed."""
    host, size = scheduler.state.host, scheduler.state.limits.block_size
    owned: list[int] = []
    for one in seen:
        if one.sequence.host is None:
            continue
        blocks = one.sequence.host.tolist()
        owned += blocks
        if one.state not in (WAITING, PREEMPTED) or len(blocks) != -(-one.computed // size):
            raise Violation(f"I7: {one} has {len(blocks)} host blocks for {one.computed} tokens")
        keys = [one.sequence.keys[i : i + KEY_BYTES] for i in range(0, len(one.sequence.keys), KEY_BYTES)]
        for key, block in zip(keys[: one.computed // size], blocks, strict=False):
            if contents and runner.host[block] != ledger.contents.get(key):
                raise Violation(f"I5: host block {block} does not hold what {one} had computed")
    if len(set(owned)) != len(owned) or sorted(owned) != host.used.nonzero()[0].tolist():
        raise Violation(f"I1: host blocks {sorted(owned)} have owners, {host.used.nonzero()[0].tolist()} are in use")
    ensure(host.free == host.blocks - len(owned), f"I1: {host.free} host blocks are free")


def check_sharing(scheduler: Scheduler, seen: list[Seen], ref: list[int]) -> None:
    """I3."""
    size = scheduler.state.limits.block_size
    holders: dict[int, list[tuple[int, Seen]]] = {}
    for one in seen:
        for column, block in enumerate(one.blocks):
            if ref[block] > 1:
                holders.setdefault(block, []).append((column, one))
    for block, group in holders.items():
        column = group[0][0]
        full = [one for at, one in group if _written(one) >= (column + 1) * size and at == column]
        keys = {one.sequence.keys[KEY_BYTES * column : KEY_BYTES * (column + 1)] for one in full}
        requests = {one.request_id for _, one in group}
        if any(at != column for at, _ in group):
            raise Violation(f"I3: block {block} is at two places of two texts")
        if len(requests) > 1 and (len(keys) != 1 or not min(keys) or len(full) != len(group)):
            raise Violation(f"I3: requests {sorted(requests)} share block {block}, but not what it holds")


def _written(one: Seen) -> int:
    """Positions that are there in the blocks of a sequence: of a fork, all that its parent had computed."""
    return one.known if one.sequence.forked is not None else one.computed


def check_writes(scheduler: Scheduler, runner: FakeRunner) -> None:
    """I4, for the step that was just launched. Who was forked by this very plan shares what it writes now."""
    state = scheduler.state
    shared = {block for block in runner.written if state.pool.ref[block] > 1}
    if not shared:
        return
    seen = [one for one in look(scheduler) if one.state != WAITING or one.last_step != state.step]
    for block in shared:
        holders = [str(one) for one in seen if block in one.blocks]
        ensure(len(holders) < 2, f"I4: block {block} was written while {holders} hold it")


def check_rows(scheduler: Scheduler, seen: list[Seen]) -> None:
    """I7, I8 and the consistency of queue, device rows and the list of requests."""
    state = scheduler.state
    queued = set(state.queue.rows())
    dormant = {child.row for one in seen for child in one.sequence.dormant}
    in_flight = Counter(row for step in state.in_flight for row in step.rows.tolist())
    requests: dict[int, list[int]] = {}
    waiting = set()
    for one in seen:
        requests.setdefault(one.request_id, []).append(one.row)
        if one.in_flight != in_flight[one.row]:
            raise Violation(f"I11: {one} counts {one.in_flight} steps in flight")
        problem = row_problem(one, state.limits.block_size)
        if problem:
            raise Violation(f"{one} {problem}: {one.computed} computed, {one.known} known, {one.blocks}")
        if one.state == WAITING:
            waiting.add(one.row)
    ensure(queued | dormant == waiting and not queued & dormant, "I8: somebody waits nowhere, or twice")
    rows = sorted([one.device_row for one in seen if one.device_row] + list(state.device_rows))
    ensure(rows == list(range(1, state.limits.max_num_seqs + 1)), "I8: a device row is lost, or used twice")
    ensure({r: sorted(rows) for r, rows in state.requests.items()} == requests, "I8: requests and rows differ")


def row_problem(one: Seen, block_size: int) -> str:
    """What is wrong with a sequence taken by itself; empty when nothing is."""
    now, known, computed, held = one.state, one.known, one.computed, len(one.blocks)
    if not 0 <= computed <= known <= one.limit:
        return "I7: does not count right"
    if now == WAITING:
        if one.device_row or len(one.sequence.ids) != known:
            return "I7: waits with the wrong things"
        if computed and not held and one.sequence.host is None:
            return "I7: waits with the wrong things"
    elif not one.device_row and now != DEAD:
        return "I8: has no device row"
    elif now in (PREEMPTED, DEAD):
        if held or not one.in_flight:
            return "I8: is not given back"
    elif not (held - 1) * block_size < known or held * block_size < computed:
        return "I7: has too many blocks, or too few"
    elif now == PREFILL and computed == known:
        return "I7: has nothing to feed"
    elif now == DECODE and (computed + 1 != known or known == one.limit):
        return "I7: has no token of its own to compute"
    elif now == ENDING and known != one.limit:
        return "I7: does not end"
    return ""


def check_plan(scheduler: Scheduler, words: list[int]) -> None:
    """I6, on the words of the plan that was just made."""
    limits = scheduler.state.limits
    rows, tokens = words[3], words[4]
    ensure(0 <= tokens <= limits.max_num_batched_tokens, "I6: more tokens in a step than allowed")
    ensure(rows <= limits.max_num_seqs, "I6: more rows in a step than allowed")
    ensure(words[11] <= limits.table_capacity, "I6: more table writes in a step than allowed")
    ensure(max(words[15], words[17]) <= limits.swap_capacity, "I6: more blocks swapped in a step than allowed")
    ensure(words[19] <= limits.max_num_seqs, "I6: more parameter blocks in a step than allowed")


def check_idle(scheduler: Scheduler) -> None:
    """Nothing is left: all blocks and rows are free."""
    state = scheduler.state
    ensure(not state.requests and not state.ended and not state.in_flight, "work is left")
    ensure(state.pool.free == state.pool.usable, f"{state.pool.usable - state.pool.free} blocks leaked")
    ensure(state.host.free == state.host.blocks, f"{state.host.blocks - state.host.free} host blocks leaked")
    ensure(len(state.device_rows) == state.limits.max_num_seqs, "device rows leaked")
    ensure(not len(state.queue), "the queue is not empty")


def alive(one: Seen) -> bool:
    """Whether the sequence has not ended."""
    return one.state != DEAD
