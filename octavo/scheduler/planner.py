"""The planner: makes one plan, i.e. decides what one step computes. Lives as long as the plan it makes.

Order: rows that compute their own last token; chunks of running rows that the host feeds; admissions. A block that
is freed, or read as a copy source, while the plan is made is no copy destination in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.scheduler.features import parameter_words, rare_words
from octavo.scheduler.plan import HOST_IDS, SAMPLE, PlanDraft
from octavo.scheduler.records import I64, Step
from octavo.scheduler.slots import DECODE, ENDING, IS_RARE, PREFILL, SHARED_TAIL, Sequence
from octavo.scheduler.state import SchedulerState

# Answers of `_try_admit`.
ADMITTED, NOT_NOW, NO_ROOM = range(3)
LOOK_AHEAD = 32  # waiting sequences that may be passed over in one plan


@dataclass(slots=True)
class _Chunks:
    """Rows that the host feeds, and (row, block) of what they enter in the prefix index."""

    rows: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    published: list[tuple[int, int]] = field(default_factory=list)


class Planner:
    """One plan in the making: what is left of the budget, and the sections written so far."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.limits, self.stats = state.limits, state.stats
        self.slots, self.pool, self.queue = state.slots, state.pool, state.queue
        self.draft = PlanDraft(state.step)
        self.chunks = _Chunks()
        self.budget = state.limits.max_num_batched_tokens
        self.clock = state.pool.clock
        self.held_back = False  # someone gave way or sat out: admit nobody

    def make(self) -> Step | None:
        """The plan, or None when nothing can be computed now."""
        state, slots = self.state, self.slots
        decode_rows = self._plan_decodes()
        for row in state.by_arrival(np.flatnonzero(slots.state == PREFILL)):
            if self.budget == 0:
                break
            if slots.state[row] == PREFILL:  # an earlier one may have taken its blocks
                self._plan_chunk(row)
        if self.budget and not self.held_back and len(state.queue):
            self._admit()
        if not len(decode_rows) and not self.chunks.rows and self.draft.empty():
            return None
        return self._finish(decode_rows)

    def _finish(self, decode_rows: I64) -> Step:
        slots, chunks = self.slots, self.chunks
        count = len(decode_rows)
        rows = decode_rows
        start = slots.computed[rows] - 1
        length = np.ones(count, np.int32)
        flags = SAMPLE | (slots.flags[rows] & IS_RARE).astype(np.int32)
        samples = np.arange(count)
        if chunks.rows:
            rows = np.concatenate([rows, np.array(chunks.rows, np.int64)])
            start = np.concatenate([start, np.array(chunks.start, np.int32)])
            length = np.concatenate([length, np.array(chunks.length, np.int32)])
            flags = np.concatenate([flags, np.array(chunks.flags, np.int32)])
            samples = np.flatnonzero(flags & SAMPLE)
        slots.in_flight[rows] += 1
        device_rows = slots.device_row[rows]
        words = self.draft.encode(device_rows, start, length, flags, count)
        self.stats.steps += 1
        self.stats.block_copies += len(self.draft.copies) // 2
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.pool.usable - self.pool.free)
        return Step(self.state.step, words, rows, device_rows, start, length, samples, chunks.published)

    def _plan_decodes(self) -> I64:
        """Rows that compute the token they sampled last; each gets the block it is about to write."""
        slots = self.slots
        rows = np.flatnonzero(slots.state == DECODE)
        if len(rows) > self.budget:  # who has waited longest goes first
            rows = rows[np.lexsort((slots.arrival[rows], slots.last_step[rows]))[: self.budget]]
            rows.sort()
        computed = slots.computed[rows]
        special = ((computed & self.state.mask) == 0) | ((slots.flags[rows] & SHARED_TAIL) != 0)
        if special.any():
            out = self._place(rows[special])
            if out or self.held_back:
                rows = rows[(slots.state[rows] == DECODE) & ~np.isin(rows, out)]
                computed = slots.computed[rows]
        self.budget -= len(rows)
        slots.computed[rows] = computed + 1
        known = slots.known[rows] + 1
        slots.known[rows] = known
        slots.last_step[rows] = self.state.step
        slots.state[rows[known >= slots.limit[rows]]] = ENDING
        return rows

    def _place(self, rows: I64) -> list[int]:
        """Give each row a block of its own for the position it writes next; returns the rows that sit out."""
        slots, table = self.slots, self.draft.table
        out: list[int] = []
        for row in self.state.by_arrival(rows):
            if slots.state[row] != DECODE:  # gave way to an earlier row
                continue
            blocks = slots.sequence(row).blocks
            column = int(slots.computed[row]) >> self.state.shift
            if column < len(blocks):
                if not self._unshare(row, column):
                    out.append(row)
            elif self.pool.free or self._make_room(row):
                block = self.pool.take(1)[0]
                blocks.append(block)
                table += (int(slots.device_row[row]), column, block)
        return out

    def _unshare(self, row: int, column: int) -> bool:
        """Copy on write: before `row` writes into a block that others hold, move it to a copy.

        The last owner writes in place. False when there is no block to copy to in this plan: the row sits out.
        """
        slots, pool = self.slots, self.pool
        blocks = slots.sequence(row).blocks
        block = blocks[column]
        if pool.ref[block] > 1:
            copy = pool.take_freed_before(self.clock)
            if copy is None:
                self.held_back = True
                if pool.free == 0:
                    self._make_room(row)
                return False
            self.draft.copies += (block, copy)
            if slots.device_row[row]:  # else the whole table is written at admission
                self.draft.table += (int(slots.device_row[row]), column, copy)
            pool.drop((block,))
            blocks[column] = copy
        slots.flags[row] &= ~np.uint8(SHARED_TAIL)
        return True

    def _make_room(self, row: int) -> bool:
        """Free at least one block for `row`; False when `row` itself had to give way.

        First the blocks that waiting forks hold, then those of the running sequence that came last. Rows already
        in the plan being made are spared; when only such rows are left, `row` sits out.
        """
        slots = self.slots
        self.held_back = True
        if self.state.reclaim_forks(keep=row):
            return True
        running = np.flatnonzero((slots.state == DECODE) | (slots.state == PREFILL))
        running = running[(slots.last_step[running] != self.state.step) | (running == row)]
        while len(running):
            last = int(np.argmax(slots.arrival[running]))
            victim = int(running[last])
            self.state.preempt(victim)
            if victim == row:
                return False
            if self.pool.free:
                return True
            running = np.delete(running, last)
        return False

    def _plan_chunk(self, row: int) -> None:
        """Feed the next tokens of a row from the host, as many as the budget allows."""
        slots, chunks = self.slots, self.chunks
        sequence = slots.sequence(row)
        start, known = int(slots.computed[row]), int(slots.known[row])
        length = min(known - start, self.budget)
        end = start + length
        self.draft.tokens.append(sequence.ids[start:end])
        self.state.publish(sequence, start >> self.state.shift, end >> self.state.shift, chunks.published)
        self.budget -= length
        slots.computed[row] = end
        slots.last_step[row] = self.state.step
        if sequence.preemptions:
            self.stats.recomputed_tokens += length
        else:
            self.stats.prompt_tokens_computed += length
        flags = HOST_IDS | int(slots.flags[row] & IS_RARE)
        if end == known:
            flags |= SAMPLE
            slots.known[row] = known + 1
            slots.state[row] = DECODE if known + 1 < slots.limit[row] else ENDING
            if sequence.dormant:
                self._fork(row, sequence)
        chunks.rows.append(row)
        chunks.start.append(start)
        chunks.length.append(length)
        chunks.flags.append(flags)

    def _fork(self, row: int, parent: Sequence) -> None:
        """The prompt of `n > 1` is computed with this plan: its other children share the blocks and join the queue.

        They start at the prompt's last token, so each computes one token itself and needs nobody's logits.
        """
        slots = self.slots
        prompt = len(parent.ids)
        if prompt & self.state.mask:
            slots.flags[row] |= np.uint8(SHARED_TAIL)
        for child in parent.dormant:
            child.blocks = list(parent.blocks)
            self.pool.hold(child.blocks)
            slots.computed[child.row] = prompt - 1
            slots.flags[child.row] |= np.uint8(SHARED_TAIL)
            slots.last_step[child.row] = self.state.step
            self.queue.push(child.row, int(slots.arrival[child.row]))
            self.stats.forks += 1
        parent.dormant = []

    def _admit(self) -> None:
        """Give waiting sequences device rows and blocks, in order, while budget, rows and blocks last."""
        put_back: list[int] = []
        while self.budget and self.state.device_rows and not self.held_back and len(put_back) < LOOK_AHEAD:
            row = self.queue.pop()
            if row is None:
                break
            answer = self._try_admit(row)
            if answer == ADMITTED:
                self._plan_chunk(row)
                continue
            put_back.append(row)
            if answer == NO_ROOM:
                break
        for row in put_back:
            self.queue.push(row, int(self.slots.arrival[row]))

    def _try_admit(self, row: int) -> int:
        """Reserve blocks for all known tokens of a waiting row, shared where the prefix cache or a fork has them."""
        slots, pool = self.slots, self.pool
        sequence = slots.sequence(row)
        if slots.last_step[row] == self.state.step:  # forked in this plan: what it would copy is not written yet
            return NOT_NOW
        known = int(slots.known[row])
        total = -(-known // self.limits.block_size)
        if self.draft.table and len(self.draft.table) // 3 + total > self.limits.table_capacity:
            return NO_ROOM
        if sequence.blocks:
            hit, need = [], int(pool.ref[sequence.blocks[-1]] > 1)
        else:
            hit = pool.match(sequence.keys[: (known - 1) >> self.state.shift])
            if hit and pool.filled_at[hit[-1]] == self.state.step:
                return NOT_NOW
            need = total - len(hit)
        spare = pool.free - (self.limits.watermark if self.state.busy else 0)
        if need + pool.unreferenced(hit) > spare:
            # With nobody running, the blocks that waiting forks hold are all that is in the way.
            if not self.state.busy and self.state.reclaim_forks(keep=row if sequence.blocks else 0):
                return self._try_admit(row)
            return NO_ROOM
        if sequence.blocks:
            if not self._unshare(row, (known - 1) >> self.state.shift):
                return NO_ROOM
        else:
            pool.hold(hit)
            sequence.blocks = hit + pool.take(need)
            slots.computed[row] = len(hit) << self.state.shift
            if not sequence.admitted:
                sequence.cached = int(slots.computed[row])
                self.stats.prompt_tokens += known
                self.stats.prefix_hit_tokens += sequence.cached
        sequence.admitted = True
        self._set_up(row, sequence)
        return ADMITTED

    def _set_up(self, row: int, sequence: Sequence) -> None:
        """A device row for an admitted sequence: its table, parameters and known tokens."""
        slots = self.slots
        device_row = self.state.device_rows.popleft()
        slots.device_row[row] = device_row
        slots.state[row] = PREFILL
        known = int(slots.known[row])
        self.state.history[device_row, :known] = sequence.ids
        for column, block in enumerate(sequence.blocks):
            self.draft.table += (device_row, column, block)
        prompt = len(sequence.request.prompt) // 4
        self.draft.params += parameter_words(sequence.request, device_row, int(slots.child[row]), known, prompt)
        self.draft.extras += rare_words(sequence.request, device_row, prompt)
