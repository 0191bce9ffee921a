"""SchedulerState: what the scheduler knows, and the transitions of a sequence's life.

A sequence is submitted (waiting), admitted to a device row and blocks (running), perhaps preempted (waiting again),
and ends exactly once. Who is planned when is the planner's business; here is what each transition does to rows,
blocks, queue and counters, so that nothing can be forgotten in one place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from octavo.errors import RequestError, invariant
from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.features import edited_ids, numbers_fit, parameter_block, row_flags
from octavo.scheduler.keys import KEY_BYTES, chain_keys
from octavo.scheduler.policy import WaitingQueue, order_key
from octavo.scheduler.prefix import NO_BLOCKS
from octavo.scheduler.records import ERROR, I32, I64, Ended, Limits, Preemption, Stats, Step
from octavo.scheduler.slots import (
    DEAD,
    DECODE,
    EMPTY,
    ENDING,
    PREEMPTED,
    SHARED_TAIL,
    WAITING,
    Sequence,
    SlotTable,
)
from octavo.scheduler.swap import HostPool, should_swap
from octavo.types import MAX_N, MAX_PRIORITY, EngineRequest


class SchedulerState:
    """Rows, blocks, queue, counters. Owner: one `Scheduler`; the planner works on it. Not thread-safe.

    history: known token ids of running sequences, [device row, position]. table: their blocks, [device row, column],
    the host's copy of the device's block table. requests: live rows of each request. ends_at, is_end: how many
    requests end at a token id, and whether any does. in_flight: plans that are not committed, oldest first.
    ended: ends that no token batch has reported yet. now_us: the time in microseconds, as the loop last told it;
    nothing is decided by it. last_preemption: who gave way last. may_sit_out: one step may not have tokens for all
    rows. scratch: room for the rows of the plan that is being made. shift, mask: log2 of the block size, and block
    size - 1.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.shift = limits.block_size.bit_length() - 1
        self.mask = limits.block_size - 1
        invariant(limits.block_size == 1 << self.shift, "the block size is a power of two")
        self.pool = BlockPool(limits.blocks, prefix_cache=limits.prefix_cache)
        self.host = HostPool(limits.swap_blocks)
        self.slots = SlotTable(max(64, 2 * limits.max_num_seqs))
        self.queue = WaitingQueue(fair=limits.policy == "fair")
        self.blocked = 0  # row that was served next and found no room in the last plan
        self.stats = Stats()
        self.history: I32 = np.zeros((limits.max_num_seqs + 1, limits.max_model_len), np.int32)
        self.table: I64 = np.zeros((limits.max_num_seqs + 1, limits.max_blocks_per_seq), np.int64)
        self.scratch: I64 = np.zeros((4, limits.max_num_seqs), np.int64)
        self.columns = np.arange(limits.max_blocks_per_seq)
        self.requests: dict[int, list[int]] = {}
        self.device_rows = deque(range(1, limits.max_num_seqs + 1))
        self.ends_at: dict[int, int] = {}
        self.is_end = np.zeros(limits.vocab_size, np.bool_)
        self.in_flight: deque[Step] = deque()
        self.ended: list[Ended] = []
        self.may_sit_out = limits.max_num_seqs > limits.max_num_batched_tokens
        self.now_us = 0
        self.last_preemption: Preemption | None = None
        self.arrivals = 0
        self.step = 0

    @property
    def busy(self) -> bool:
        """True while any sequence has a device row."""
        return len(self.device_rows) < self.limits.max_num_seqs

    def check(self, request: EngineRequest, prompt: I32) -> None:
        """Refuse with RequestError what is malformed or can never run."""
        limits = self.limits
        if request.id in self.requests:
            raise RequestError(f"Request {request.id} is running already.", "Use a new id.")
        if not len(prompt):
            raise RequestError("The prompt is empty.", "Give at least one token.", "prompt")
        if int(prompt.min()) < 0 or int(prompt.max()) >= limits.vocab_size:
            raise RequestError(
                f"The prompt holds a token id outside 0..{limits.vocab_size - 1}.",
                "Use ids of this model's tokenizer.",
                "prompt",
            )
        if not len(prompt) < request.limit <= limits.max_model_len:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens; with at least one new token it must fit in "
                f"{limits.max_model_len} (max_model_len).",
                "Shorten it or raise --max-model-len.",
                "prompt",
            )
        self.check_room(request)
        keys = len(request.keys)
        ends = (*request.eos, *request.stop_ids)
        if (
            not 1 <= request.n <= MAX_N
            or not 0 <= request.id < 1 << 63
            or len(request.prompt) != 4 * len(prompt)
            or not numbers_fit(request, limits.vocab_size)
            or abs(request.priority) > MAX_PRIORITY
            or keys != len(prompt) // limits.block_size * KEY_BYTES * (keys > 0 or limits.prefix_cache)
            or not all(0 <= token < limits.vocab_size for token in (*ends, *edited_ids(request)))
            or len(request.bias[0]) != len(request.bias[1])
            or not all(request.bad)
        ):
            raise RequestError("The request is malformed.", "Build it with octavo.engine.client.")

    def check_room(self, request: EngineRequest) -> None:
        """Refuse with RequestError what the whole pool could not hold."""
        need = -(-request.limit // self.limits.block_size)
        if need > self.pool.usable:
            raise RequestError(
                f"The request may grow to {request.limit} tokens, which is {need} KV blocks; the pool has "
                f"{self.pool.usable}.",
                "Lower max_tokens, or give the KV cache more memory.",
                "max_tokens",
            )

    def new_rows(self, request: EngineRequest, prompt: I32) -> list[int]:
        """A row in state WAITING for each child of a request; the first is queued, the others lie dormant."""
        slots = self.slots
        params = parameter_block(request)
        end_ids = frozenset(request.stop_ids) | frozenset(request.eos)
        rows = []
        for child in range(request.n):
            row = slots.take()
            self.arrivals += 1
            slots.sequences[row] = Sequence(request, row, prompt, request.keys, params, end_ids)
            slots.state[row] = WAITING
            slots.known[row] = len(prompt)
            slots.limit[row] = request.limit + request.beam  # the search itself ends its beams
            slots.flags[row] = row_flags(request)
            slots.order[row] = order_key(self.limits.policy, self.arrivals, self.rank(request))
            slots.request_id[row] = request.id
            slots.child[row] = child
            slots.tenant[row] = self.queue.number(request.tenant)
            rows.append(row)
        self.requests[request.id] = rows
        for token in end_ids:
            self.ends_at[token] = self.ends_at.get(token, 0) + 1
            self.is_end[token] = True
        if not request.beam:
            slots.sequence(rows[0]).dormant = [slots.sequence(row) for row in rows[1:]]
        self.enqueue(rows[0], fresh=True)
        return rows

    def rank(self, request: EngineRequest) -> int:
        """The priority of a request, larger served earlier whatever the user's direction."""
        return -request.priority if self.limits.low_first else request.priority

    def enqueue(self, row: int, *, fresh: bool = False) -> None:
        """Put a waiting row into the queue, at the place that its order key gives it."""
        slots = self.slots
        self.queue.push(row, int(slots.order[row]), self.queue.names[slots.tenant[row]], fresh=fresh)

    def blocks_of(self, row: int) -> I64:
        """The blocks that a row holds, by column."""
        device_row = self.slots.device_row[row]
        if device_row:
            return self.table[device_row, : self.slots.blocks[row]]
        forked = self.slots.sequence(row).forked
        return NO_BLOCKS if forked is None else forked

    def reclaim_forks(self, shared: int = 0) -> bool:
        """Drop the blocks of waiting forks, last first, until one is free or block `shared` has one owner left.

        The forks start again from the prompt.
        """
        slots = self.slots
        waiting = [row for row in self.queue.rows() if slots.sequence(row).forked is not None]
        for row in sorted(waiting, key=lambda r: -int(slots.order[r])):
            self.pool.drop(self.blocks_of(row))
            slots.sequence(row).forked = None
            slots.computed[row] = 0
            slots.flags[row] &= ~SHARED_TAIL
            if self.pool.free or (shared and self.pool.ref[shared] == 1):
                return True
        return False

    def preempt(self, row: int, to: int, why: str, room: int = 0) -> tuple[I64, I64]:
        """Take a running row's blocks; it goes back to its place in the queue when nothing of it is in flight.

        `to`: the row that it gives way to, maybe itself; `why` is for people. Returns what the plan that is being
        made must swap out: device blocks, at most `room`, and the host blocks that they go to.
        """
        slots = self.slots
        sequence = slots.sequence(row)
        self.publish_generated(row, keys=True)
        computed = int(slots.computed[row])
        self.stats.preemptions += 1
        self.stats.preempted_tokens += computed
        sequence.preemptions += 1
        sequence.reached = max(sequence.reached, computed)
        self.last_preemption = Preemption(
            self.step,
            sequence.request.id,
            int(slots.child[row]),
            computed,
            int(slots.request_id[to]),
            why,
        )
        blocks = self.blocks_of(row)
        sequence.given_up = blocks.copy()
        out, host = self._swap_out(sequence, computed, blocks, room)
        self.pool.drop(blocks)
        slots.blocks[row] = 0
        slots.state[row] = PREEMPTED
        if slots.in_flight[row] == 0:
            self.requeue(row)
        return out, host

    def _swap_out(self, sequence: Sequence, computed: int, blocks: I64, room: int) -> tuple[I64, I64]:
        """Host blocks for a sequence that gives way, if swapping is the cheaper way; else none."""
        room = min(room, self.host.free)
        if not room:
            return NO_BLOCKS, NO_BLOCKS
        blocks = blocks[: -(-computed >> self.shift)].copy()
        alone = (self.pool.ref[blocks] == 1).nonzero()[0]
        kept = int(alone[0]) << self.shift if len(alone) else computed
        if not should_swap(computed, kept, len(blocks), room, self.limits.swap_cost):
            return NO_BLOCKS, NO_BLOCKS
        sequence.host, sequence.swap_step = self.host.take(len(blocks)), self.step
        self.stats.swapped_out_tokens += computed
        return blocks, sequence.host

    def forget_swapped(self, row: int) -> None:
        """Give the host blocks of a sequence back: it computes its tokens again, or has ended."""
        sequence = self.slots.sequence(row)
        if sequence.host is not None:
            self.host.give_back(sequence.host)
            sequence.host = None
            self.slots.computed[row] = 0

    def requeue(self, row: int) -> None:
        """A preempted row of which nothing is in flight goes back to its place in the queue, tokens and all."""
        slots = self.slots
        sequence = slots.sequence(row)
        device_row = int(slots.device_row[row])
        sequence.ids = self.history[device_row, : slots.known[row]].copy()
        sequence.given_up = None
        if self.pool.prefix_cache:
            self.add_keys(sequence, sequence.ids)
        self.device_rows.append(device_row)
        slots.device_row[row] = 0
        if sequence.host is None:
            slots.computed[row] = 0
        slots.flags[row] &= ~SHARED_TAIL
        slots.state[row] = WAITING
        self.enqueue(row)

    def add_keys(self, sequence: Sequence, ids: I32) -> None:
        """Keys for all full blocks of a sequence's tokens that have none yet."""
        done = len(sequence.keys) // KEY_BYTES
        parent = sequence.keys[-KEY_BYTES:] if done else sequence.request.root
        rest = ids[done * self.limits.block_size :]
        sequence.keys += b"".join(chain_keys(parent, rest, self.limits.block_size))

    def end(self, row: int, reason: int) -> None:
        """The one way in which a sequence ends: report it, give its blocks back, and its row when it is idle."""
        slots = self.slots
        now = int(slots.state[row])
        invariant(now not in (EMPTY, DEAD), "a sequence ends once")
        sequence = slots.sequence(row)
        if now == WAITING:
            if row in self.queue:
                self.queue.remove(row)
            else:
                self._wake_not(sequence)
        if sequence.dormant:  # its prompt will not be computed: the next child takes its place
            heir, *rest = sequence.dormant
            heir.dormant, sequence.dormant = rest, []
            self.enqueue(heir.row)
        if reason != ERROR:
            self.publish_generated(row, keys=False)
        request_id, child = int(slots.request_id[row]), int(slots.child[row])
        self.ended.append(
            Ended(
                request_id,
                child,
                reason,
                sequence.cached,
                sequence.preemptions,
                sequence.scheduled_us,
                sequence.recomputed,
                sequence.swapped,
            )
        )
        if slots.in_flight[row] and sequence.given_up is None:
            sequence.given_up = self.blocks_of(row).copy()
        self.pool.drop(self.blocks_of(row))
        self.forget_swapped(row)
        sequence.forked = None
        slots.blocks[row] = 0
        slots.state[row] = DEAD
        if slots.in_flight[row] == 0:
            self.release(row)

    def _wake_not(self, sequence: Sequence) -> None:
        """Take a dormant child from the list of the sibling that would have woken it."""
        for row in self.requests[sequence.request.id]:
            dormant = self.slots.sequence(row).dormant
            if sequence in dormant:
                dormant.remove(sequence)

    def release(self, row: int) -> None:
        """Give the rows of an ended, idle sequence back."""
        slots = self.slots
        request_id = int(slots.request_id[row])
        rows = self.requests[request_id]
        rows.remove(row)
        if not rows:
            del self.requests[request_id]
            for token in slots.sequence(row).end_ids:
                self.ends_at[token] -= 1
                if not self.ends_at[token]:
                    del self.ends_at[token]
                    self.is_end[token] = False
        if slots.device_row[row]:
            self.device_rows.append(int(slots.device_row[row]))
        slots.give_back(row)

    def settle(self, rows: I64) -> None:
        """Rows of which nothing is in flight any more: ended ones are given back, preempted ones queue again."""
        slots = self.slots
        leaving = rows[slots.state[rows] >= PREEMPTED]
        for row in leaving[slots.in_flight[leaving] == 0].tolist():
            if slots.state[row] == PREEMPTED:
                self.requeue(row)
            else:
                self.release(row)

    def by_order(self, rows: I64) -> list[int]:
        """The rows in the order in which they are served."""
        if len(rows) > 1:
            rows = rows[np.argsort(self.slots.order[rows])]
        out: list[int] = rows.tolist()
        return out

    def publish(self, row: int, first: int, last: int) -> I64:
        """Enter blocks first..last-1 of a running row in the prefix index; see `PrefixIndex.publish`."""
        if first >= last:
            return NO_BLOCKS
        sequence = self.slots.sequence(row)
        keys = sequence.keys[KEY_BYTES * first : KEY_BYTES * last]
        table = self.table[self.slots.device_row[row]]
        parent = int(table[first - 1]) if first else 0
        return self.pool.publish(table[first:last], keys, parent, sequence.request.root, self.step)

    def publish_generated(self, row: int, *, keys: bool) -> None:
        """Before a running row leaves its blocks: full ones with generated tokens are published.

        They get their keys at once, or when somebody needs them. Only what committed steps have written counts: what
        is in flight may still fail.
        """
        slots = self.slots
        if not self.pool.prefix_cache or slots.state[row] not in (DECODE, ENDING):
            return
        sequence = slots.sequence(row)
        done = len(sequence.keys) // KEY_BYTES
        count = int(slots.known[row] - slots.in_flight[row] - 1) >> self.shift
        if count <= done:
            return
        device_row = slots.device_row[row]
        if keys:
            self.add_keys(sequence, self.history[device_row, : count << self.shift])
            self.publish(row, done, count)
        else:
            ids = self.history[device_row, done << self.shift : count << self.shift].tobytes()
            table = self.table[device_row]
            parent = int(table[done - 1]) if done else 0
            self.pool.index.defer(table[done:count], ids, parent, sequence.request.root, self.step)

    def fail_rows(self, step: Step, rows: Iterable[int], *, lost: bool) -> None:
        """End the whole requests of some rows of `step` with an error; nothing that they wrote stays in the index.

        Rows that have ended meanwhile count: their siblings and the index have what they wrote.
        lost: the step did not run, so what it was to write is not there, and requests that share or copied it end as
        well. Otherwise their logits were not finite: any block of theirs may be to blame, and who shares or copied
        such a block will find out by itself.
        """
        slots, pool = self.slots, self.pool
        failed = set(rows)
        if lost:
            failed.update(self._lose_swapped(step))
        suspects: set[int] = set()
        wrote: set[int] = set()  # with what others have filled anew since it was copied
        for late in (step, *self.in_flight):  # steps after it went on from what it wrote
            if lost:
                failed.update(row for block in wrote & late.copied.keys() for row in late.copied[block])
            for row, blocks in late.published:
                if row in failed:
                    wrote.update(blocks.tolist())
                    suspects.update(blocks[pool.index.filled_at[blocks] == late.number].tolist())
        if not lost:
            for row in failed:
                given_up = slots.sequence(row).given_up
                suspects.update((self.blocks_of(row) if given_up is None else given_up).tolist())
        gone = pool.unpublish(suspects)
        requests = {int(slots.request_id[row]) for row in failed}
        if lost and gone:
            requests |= {s.request.id for s in slots.sequences if s is not None and self._has_held(s, gone)}
        for request in sorted(requests):
            for row in list(self.requests.get(request, ())):
                if slots.state[row] not in (EMPTY, DEAD):
                    self.end(row, ERROR)

    def _lose_swapped(self, step: Step) -> list[int]:
        """What `step` was to swap out is not there: who waits with it computes again. Returns rows that went on."""
        went_on = []
        for sequence in self.slots.sequences:
            if sequence is not None and sequence.swap_step == step.number:
                sequence.swap_step = 0
                if sequence.host is None:
                    went_on.append(sequence.row)
                else:
                    self.forget_swapped(sequence.row)
        return went_on

    def _has_held(self, sequence: Sequence, blocks: set[int]) -> bool:
        """Whether a sequence holds one of `blocks`, or held one in a step that is in flight."""
        if not blocks.isdisjoint(self.blocks_of(sequence.row).tolist()):
            return True
        return sequence.given_up is not None and not blocks.isdisjoint(sequence.given_up.tolist())
