"""Invariants of the scheduler, recounted from scratch after every step. Nothing here trusts a counter.

The numbers are those of the design: (I1) every block in exactly one state; (I2) a reference count is the number of
tables that hold the block; (I3) who shares a block has the same content there; (I4) nobody writes a shared block;
(I5) index, keys and block contents agree, salts never mix; (I6) budget, rows and sections within their limits; (I7)
computed <= known <= limit, blocks cover what is computed; (I8) what ended owns nothing; (I9) one end each; (I10)
output as alone; (I11) counters equal a recount; (I12) no key in the index without its parent's. I9 and I10 are
checked where results arrive, in `world`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from octavo.bench.sim.oracle import Ledger, Violation
from octavo.runner.fake import FakeRunner
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.slots import COLUMNS, DEAD, DECODE, ENDING, PREEMPTED, PREFILL, STATES, WAITING, Sequence

_INDEX = {name: i for i, name in enumerate(COLUMNS)}


@dataclass(slots=True)
class Seen:
    """One live sequence as found in the tables."""

    row: int
    sequence: Sequence
    columns: list[int]
    blocks: list[int]

    def __getitem__(self, name: str) -> int:
        return self.columns[_INDEX[name]]

    def __str__(self) -> str:
        return f"request {self['request_id']}.{self['child']} ({STATES[self['state']]}, row {self.row})"


def ensure(condition: object, message: str) -> None:
    """Raise Violation unless the condition holds."""
    if not condition:
        raise Violation(message)


def look(scheduler: Scheduler) -> list[Seen]:
    """Every live sequence with its columns and blocks."""
    state = scheduler.state
    columns = state.slots.columns().T.tolist()
    out = []
    for row, sequence in enumerate(state.slots.sequences):
        if sequence is not None:
            out.append(Seen(row, sequence, columns[row], state.blocks_of(row).tolist()))
        elif any(columns[row]):
            raise Violation(f"I8: row {row} is empty, but not all zeros: {columns[row]}")
    return out


def check_blocks(scheduler: Scheduler, seen: list[Seen]) -> list[int]:
    """I1, I2. Returns the reference counts."""
    pool = scheduler.state.pool
    ref: list[int] = pool.ref.tolist()
    owners = [0] * pool.blocks
    for one in seen:
        for block in one.blocks:
            owners[block] += 1
        ensure(len(set(one.blocks)) == len(one.blocks), f"I2: {one} holds a block twice: {one.blocks}")
    if owners != ref:
        wrong = [(b, ref[b], owners[b]) for b in range(pool.blocks) if ref[b] != owners[b]]
        raise Violation(f"I2: (block, count, tables that hold it): {wrong[:5]}")
    order = pool.free_order()
    free = ref.count(0) - 1
    ensure(ref[0] == 0 and 0 not in order, "I1: the padding block is in use")
    ensure(len(order) == len(set(order)) == free == pool.free, f"I1: {len(order)} in order, {pool.free}, {free} free")
    ensure(not any(ref[block] for block in order), "I1: a held block is in the free order")
    return ref


def check_index(scheduler: Scheduler, runner: FakeRunner, ledger: Ledger, *, contents: bool) -> None:
    """I5, I12. contents: compare with the device (not while a lost step waits to be reported)."""
    pool = scheduler.state.pool
    ensure(len(pool.index) == len(pool.key) - pool.key.count(None), "I5: keys outside the index")
    index, kv = pool.index, runner.kv
    for key, block in index.items():
        known = ledger.contents.get(key)
        if pool.key[block] != key or known is None:
            raise Violation(f"I5: block {block} has a key that belongs to no text, or to another block")
        if contents and kv[block] != known[1]:
            raise Violation(f"I5: block {block} does not hold what its key says")
        parent = ledger.parents[key]
        if parent not in index and parent not in ledger.roots:
            raise Violation(f"I12: block {block} is cached without its parent")


def check_sharing(scheduler: Scheduler, seen: list[Seen], ref: list[int]) -> None:
    """I3."""
    limits = scheduler.state.limits
    holders: dict[int, list[tuple[int, Seen]]] = {}
    for one in seen:
        for column, block in enumerate(one.blocks):
            if ref[block] > 1:
                holders.setdefault(block, []).append((column, one))
    for block, group in holders.items():
        ensure(len({column for column, _ in group}) == 1, f"I3: block {block} is at two places of two texts")
        column = group[0][0]
        full = [one for _, one in group if one["computed"] >= (column + 1) * limits.block_size]
        keys = {one.sequence.keys[column] for one in full if column < len(one.sequence.keys)}
        requests = {one["request_id"] for _, one in group}
        ensure(len(requests) == 1 or (len(keys) == 1 and len(full) == len(group)), f"I3: block {block} is shared")


def check_writes(scheduler: Scheduler, runner: FakeRunner) -> None:
    """I4, for the step that was just launched. Who was forked by this very plan shares what it writes now."""
    state = scheduler.state
    shared = {block for block in runner.written if state.pool.ref[block] > 1}
    if not shared:
        return
    seen = [one for one in look(scheduler) if one["state"] != WAITING or one["last_step"] != state.step]
    for block in shared:
        holders = [str(one) for one in seen if block in one.blocks]
        ensure(len(holders) < 2, f"I4: block {block} was written while {holders} hold it")


def check_rows(scheduler: Scheduler, seen: list[Seen]) -> None:
    """I7, I8 and the consistency of queue, device rows and the list of requests."""
    state = scheduler.state
    size = state.limits.block_size
    queued = set(state.queue.rows())
    dormant = {child.row for one in seen for child in one.sequence.dormant}
    in_flight = Counter(row for step in state.in_flight for row in step.rows.tolist())
    requests: dict[int, list[int]] = {}
    used = []
    for one in seen:
        now, known, computed, limit = one["state"], one["known"], one["computed"], one["limit"]
        device_row, blocks = one["device_row"], one.blocks
        requests.setdefault(one["request_id"], []).append(one.row)
        ensure(0 <= computed <= known <= limit, f"I7: {one} has computed {computed}, known {known}, limit {limit}")
        ensure(one["in_flight"] == in_flight[one.row], f"I11: {one} counts {one['in_flight']} steps in flight")
        if device_row:
            used.append(device_row)
        running = now in (PREFILL, DECODE, ENDING)
        ensure(bool(device_row) or not (running or now == PREEMPTED), f"I8: {one} has no device row")
        ensure(not device_row or now != WAITING, f"I8: {one} waits with device row {device_row}")
        if running:
            ensure(len(blocks) * size >= computed, f"I7: {one} has {len(blocks)} blocks for {computed} tokens")
            ensure((len(blocks) - 1) * size < known, f"I7: {one} has {len(blocks)} blocks for {known} known tokens")
            gap = {PREFILL: known > computed, DECODE: known == computed + 1 < limit + 1, ENDING: known == limit}
            ensure(gap[now], f"I7: {one} has computed {computed} of {known}")
        elif now == WAITING:
            ensure((one.row in queued) != (one.row in dormant), f"I8: {one} waits nowhere, or twice")
            ensure(len(one.sequence.ids) == known, f"I7: {one} keeps {len(one.sequence.ids)} of {known} tokens")
            ensure(blocks or not computed, f"I7: {one} has computed {computed} without a block")
        else:
            ensure(not blocks and one["in_flight"] > 0, f"I8: {one} is not given back")
    waiting = {one.row for one in seen if one["state"] == WAITING}
    ensure(queued | dormant == waiting, "I8: the queue holds rows that do not wait")
    rows = sorted(used + list(state.device_rows))
    ensure(rows == list(range(1, state.limits.max_num_seqs + 1)), f"I8: device rows {rows}")
    ensure({r: sorted(rows) for r, rows in state.requests.items()} == requests, "I8: requests and rows differ")


def check_plan(scheduler: Scheduler, words: list[int]) -> None:
    """I6, on the words of the plan that was just made."""
    limits = scheduler.state.limits
    rows, tokens = words[3], words[4]
    ensure(0 <= tokens <= limits.max_num_batched_tokens, f"I6: {tokens} tokens in one step")
    ensure(rows <= limits.max_num_seqs, f"I6: {rows} rows, {limits.max_num_seqs} allowed")
    ensure(words[11] <= limits.table_capacity, f"I6: {words[11]} table writes, {limits.table_capacity} allowed")
    ensure(words[19] <= limits.max_num_seqs, f"I6: {words[19]} parameter blocks")


def check_idle(scheduler: Scheduler) -> None:
    """Nothing is left: all blocks and rows are free."""
    state = scheduler.state
    ensure(not state.requests and not state.ended and not state.in_flight, "work is left")
    ensure(state.pool.free == state.pool.usable, f"{state.pool.usable - state.pool.free} blocks leaked")
    ensure(len(state.device_rows) == state.limits.max_num_seqs, "device rows leaked")
    ensure(not len(state.queue), "the queue is not empty")


def alive(one: Seen) -> bool:
    """Whether the sequence has not ended."""
    return one["state"] != DEAD
