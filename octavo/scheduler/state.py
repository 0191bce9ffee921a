"""SchedulerState: what the scheduler knows, and the transitions of a sequence's life.

A sequence is submitted (waiting), admitted to a device row and blocks (running), perhaps preempted (waiting again),
and ends exactly once. Who is planned when is the planner's business; here is what each transition does to rows,
blocks, queue and counters, so that nothing can be forgotten in one place.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from octavo.errors import RequestError, invariant
from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.features import row_flags
from octavo.scheduler.keys import KEY_BYTES, chain_keys
from octavo.scheduler.policy import WaitingQueue
from octavo.scheduler.records import I32, I64, Ended, Limits, Stats
from octavo.scheduler.slots import DEAD, EMPTY, PREEMPTED, SHARED_TAIL, WAITING, Sequence, SlotTable
from octavo.types import EngineRequest


class SchedulerState:
    """Rows, blocks, queue, counters. Owner: one `Scheduler`; the planner works on it. Not thread-safe.

    history: known token ids of running sequences, [device row, position]. requests: live rows of each request.
    ended: ends that no token batch has reported yet. shift, mask: log2 of the block size, and block size - 1.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.shift = limits.block_size.bit_length() - 1
        self.mask = limits.block_size - 1
        invariant(limits.block_size == 1 << self.shift, "the block size is a power of two")
        self.pool = BlockPool(limits.blocks, prefix_cache=limits.prefix_cache)
        self.slots = SlotTable(max(64, 2 * limits.max_num_seqs))
        self.queue = WaitingQueue()
        self.stats = Stats()
        self.history: I32 = np.zeros((limits.max_num_seqs + 1, limits.max_model_len), np.int32)
        self.requests: dict[int, list[int]] = {}
        self.device_rows = deque(range(1, limits.max_num_seqs + 1))
        self.ended: list[Ended] = []
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
        need = -(-request.limit // limits.block_size)
        if need > self.pool.usable:
            raise RequestError(
                f"The request may grow to {request.limit} tokens, which is {need} KV blocks; the pool has "
                f"{self.pool.usable}.",
                "Lower max_tokens, or give the KV cache more memory.",
                "max_tokens",
            )
        if request.n < 1 or len(request.keys) not in (0, len(prompt) // limits.block_size * KEY_BYTES):
            raise RequestError("The request is malformed.", "Build it with octavo.engine.client.")

    def new_row(self, request: EngineRequest, prompt: I32, keys: list[bytes], child: int) -> int:
        """A row in state WAITING for one child of a request; the caller queues it or keeps it dormant."""
        slots = self.slots
        row = slots.take()
        self.arrivals += 1
        eos = request.eos[0] if request.eos else -1
        stop_ids = frozenset(request.stop_ids) | frozenset(request.eos[1:])
        slots.sequences[row] = Sequence(request, row, prompt, list(keys), stop_ids)
        slots.state[row] = WAITING
        slots.known[row] = len(prompt)
        slots.limit[row] = request.limit
        slots.eos[row] = eos
        slots.flags[row] = row_flags(request, stop_ids)
        slots.arrival[row] = self.arrivals
        slots.request_id[row] = request.id
        slots.child[row] = child
        return row

    def reclaim_forks(self, keep: int) -> bool:
        """Drop the blocks of waiting forks, last first, until one block is free. They start again from the prompt."""
        slots = self.slots
        waiting = [row for row in self.queue.rows() if row != keep and slots.sequence(row).blocks]
        for row in sorted(waiting, key=lambda r: -int(slots.arrival[r])):
            sequence = slots.sequence(row)
            self.pool.drop(sequence.blocks)
            sequence.blocks = []
            slots.computed[row] = 0
            slots.flags[row] &= ~np.uint8(SHARED_TAIL)
            if self.pool.free:
                return True
        return False

    def preempt(self, row: int) -> None:
        """Take a running row's blocks; it goes back to its place in the queue when nothing of it is in flight."""
        slots = self.slots
        sequence = slots.sequence(row)
        self.stats.preemptions += 1
        self.stats.preempted_tokens += int(slots.computed[row])
        sequence.preemptions += 1
        self.pool.drop(sequence.blocks)
        sequence.blocks = []
        slots.state[row] = PREEMPTED
        if slots.in_flight[row] == 0:
            self.requeue(row)

    def requeue(self, row: int) -> None:
        """A preempted row of which nothing is in flight goes back to its place in the queue, tokens and all."""
        slots = self.slots
        sequence = slots.sequence(row)
        device_row = int(slots.device_row[row])
        sequence.ids = self.history[device_row, : slots.known[row]].copy()
        if self.pool.prefix_cache:
            done = len(sequence.keys)
            parent = sequence.keys[-1] if done else sequence.request.root
            rest = sequence.ids[done * self.limits.block_size :]
            sequence.keys += chain_keys(parent, rest, self.limits.block_size)
        self.device_rows.append(device_row)
        slots.device_row[row] = 0
        slots.computed[row] = 0
        slots.flags[row] &= ~np.uint8(SHARED_TAIL)
        slots.state[row] = WAITING
        self.queue.push(row, int(slots.arrival[row]))

    def end(self, row: int, reason: int) -> None:
        """The one way in which a sequence ends: report it, give its blocks back, and its row when it is idle."""
        slots = self.slots
        invariant(slots.state[row] not in (EMPTY, DEAD), "a sequence ends once")
        sequence = slots.sequence(row)
        if row in self.queue:
            self.queue.remove(row)
        request_id, child = int(slots.request_id[row]), int(slots.child[row])
        self.ended.append(Ended(request_id, child, reason, sequence.cached, sequence.preemptions))
        self.pool.drop(sequence.blocks)
        sequence.blocks = []
        slots.state[row] = DEAD
        if sequence.dormant:  # ended before its prompt was computed: the children cannot come to life
            dormant, sequence.dormant = sequence.dormant, []
            for child_sequence in dormant:
                if slots.state[child_sequence.row] != DEAD:
                    self.end(child_sequence.row, reason)
        if slots.in_flight[row] == 0:
            self.release(row)

    def release(self, row: int) -> None:
        """Give the rows of an ended, idle sequence back."""
        slots = self.slots
        request_id = int(slots.request_id[row])
        rows = self.requests[request_id]
        rows.remove(row)
        if not rows:
            del self.requests[request_id]
        if slots.device_row[row]:
            self.device_rows.append(int(slots.device_row[row]))
        slots.give_back(row)

    def settle(self, rows: I64) -> None:
        """Rows of which nothing is in flight any more: ended ones are given back, preempted ones queue again."""
        slots = self.slots
        idle = rows[(slots.in_flight[rows] == 0) & (slots.state[rows] >= PREEMPTED)]
        for row in idle.tolist():
            if slots.state[row] == PREEMPTED:
                self.requeue(row)
            else:
                self.release(row)

    def by_arrival(self, rows: I64) -> list[int]:
        """The rows in the order in which they joined the queue first."""
        if len(rows) > 1:
            rows = rows[np.argsort(self.slots.arrival[rows])]
        return [int(row) for row in rows]

    def publish(self, sequence: Sequence, first: int, last: int, published: list[tuple[int, int]]) -> None:
        """Enter blocks first..last-1 of a table in the prefix index; their keys are known."""
        blocks, keys = sequence.blocks, sequence.keys
        for i in range(first, min(last, len(keys))):
            parent = (blocks[i - 1], keys[i - 1]) if i else None
            if self.pool.publish(blocks[i], keys[i], parent, self.step):
                published.append((sequence.row, blocks[i]))
