"""The planner: makes one plan, i.e. decides what one step computes. Lives as long as the plan it makes.

Order: rows that compute their own last token; chunks of running rows that the host feeds; admissions. A block that
is freed, or read as a copy source, while the plan is made is no copy destination in it.

The last token of a sequence is always computed, since somebody must yield the logits after it. When the prefix cache
has all of a sequence, that token goes into a copy of the last block: who reads the cached one never sees a write.
"""

from __future__ import annotations

import numpy as np

from octavo.scheduler.features import prompt_words, rare_words, set_up_block
from octavo.scheduler.keys import KEY_BYTES
from octavo.scheduler.plan import HOST_IDS, SAMPLE, PlanDraft
from octavo.scheduler.policy import OUTPUT_WEIGHT, PROMPT_WEIGHT
from octavo.scheduler.prefix import NO_BLOCKS
from octavo.scheduler.records import I64, MIXED_FLOOR, Step
from octavo.scheduler.slots import DECODE, ENDING, IS_BEAM, IS_RARE, PREEMPTED, PREFILL, SHARED_TAIL, Sequence
from octavo.scheduler.state import SchedulerState

# Answers of `_try_admit`.
ADMITTED, NOT_NOW, NO_ROOM = range(3)
LOOK_AHEAD = 32  # waiting sequences that may be passed over in one plan


class Planner:
    """One plan in the making: what is left of the budget, and the sections written so far."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.limits, self.stats = state.limits, state.stats
        self.slots, self.pool, self.queue = state.slots, state.pool, state.queue
        self.draft = PlanDraft(state.step)
        self.chunks: list[tuple[int, int, int, int]] = []  # row, start, length, flags of rows that the host feeds
        self.published: list[tuple[int, I64]] = []
        self.copied: dict[int, list[int]] = {}  # see `Step`; these blocks are held until the plan is complete
        self.budget = state.limits.max_num_batched_tokens
        self.mark = state.pool.mark
        self.held_back = False  # someone gave way or sat out: admit nobody
        self.way_for = 0  # waiting row for which someone of lower priority gave way

    def make(self) -> Step | None:
        """The plan, or None when nothing can be computed now."""
        state, slots = self.state, self.slots
        if self.limits.policy == "priority":
            self._make_way()
        rows, start, flags = self._plan_decodes()
        if len(rows) and self.limits.mixed_prefill:  # who decodes must not wait long for those who come
            self.budget = min(self.budget, max(MIXED_FLOOR, self.limits.mixed_prefill * len(rows)))
        for row in state.by_order((slots.state == PREFILL).nonzero()[0]):
            if self.budget == 0:
                break
            self._plan_chunk(row)
        if self.budget and not self.held_back and len(state.queue):
            self._admit()
        if not len(rows) and not self.chunks and self.draft.empty():
            return None
        return self._finish(rows, start, flags)

    def _finish(self, rows: I64, start: I64, flags: I64) -> Step:
        """The step from its decode rows, and from what was gathered in `draft` and `chunks`."""
        slots, count = self.slots, len(rows)
        if self.copied:
            self._release_copied()
        columns = self.state.scratch[:, : count + len(self.chunks)]
        columns[0, :count], columns[1, :count], columns[2, :count] = rows, start, 1
        columns[3, :count] = (flags & IS_RARE) | SAMPLE
        for i, chunk in enumerate(self.chunks):
            columns[:, count + i] = chunk
        rows, end, flags = columns[0].copy(), columns[1] + columns[2], columns[3]
        every = all(chunk[3] & SAMPLE for chunk in self.chunks)
        samples = np.arange(len(rows)) if every else (flags & SAMPLE).nonzero()[0]
        slots.in_flight[rows] += 1
        device_rows = columns[0] = slots.device_row[rows]
        words = self.draft.encode(columns, count)
        if self.queue.fair:
            self._charge(rows[:count])
        self.stats.steps += 1
        self.stats.block_copies += len(self.draft.copies) // 2
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.pool.usable - self.pool.free)
        return Step(self.state.step, words, rows, device_rows, end, samples, self.published, self.copied)

    def _charge(self, decodes: I64) -> None:
        """Count what this step serves each tenant: tokens computed, and one generated token for each sample."""
        tenants, queue = self.slots.tenant, self.queue
        queue.charge_decodes(tenants[decodes])
        for row, _, length, flags in self.chunks:
            tokens = length * PROMPT_WEIGHT + (OUTPUT_WEIGHT if flags & SAMPLE else 0)
            queue.charge(queue.names[tenants[row]], tokens)

    def _make_way(self) -> None:
        """The sequence that is served next takes the place of a running one of lower priority, one in each plan.

        Only when all device rows are taken, or when it found no room last time. Equal priorities never do this.
        """
        slots, head = self.slots, self.queue.peek()
        if head is None or (self.state.device_rows and head != self.state.blocked):
            return
        if np.count_nonzero(slots.state == PREEMPTED):  # its device row is on the way
            return
        self.state.blocked = 0
        running = ((slots.state == DECODE) | (slots.state == PREFILL)).nonzero()[0]
        if len(running):
            victim = int(running[np.argmax(slots.order[running])])
            first, last = (self.state.rank(slots.sequence(row).request) for row in (head, victim))
            # By age the victim may come first again: taking its place would only send it round in a circle.
            if first > last and slots.order[head] < slots.order[victim]:
                self._give_way(victim, head, "a request of higher priority was waiting")
                self.way_for = head

    def _give_way(self, row: int, to: int, why: str) -> None:
        """Preempt a row that is not in this plan. Its blocks go to the host first where that is cheaper."""
        room = self.limits.swap_capacity - len(self.draft.swap_out) // 2
        blocks, host = self.state.preempt(row, to, why, room)
        self.draft.swap_out += np.stack((blocks, host), axis=1).reshape(-1).tolist()

    def _plan_decodes(self) -> tuple[I64, I64, I64]:
        """Rows that compute the token they sampled last, its position, their flags; each has the block it writes."""
        slots = self.slots
        rows = (slots.state == DECODE).nonzero()[0]
        if len(rows) > self.budget:  # who has waited longest goes first
            rows = rows[np.lexsort((slots.order[rows], slots.last_step[rows]))[: self.budget]]
            rows.sort()
        computed, flags = slots.computed[rows], slots.flags[rows]
        special = ((flags & SHARED_TAIL) | ((computed & self.state.mask) == 0)).nonzero()[0]
        if len(special):
            out = self._place(rows[special])
            if out or self.held_back:
                rows = rows[(slots.state[rows] == DECODE) & ~np.isin(rows, out)]
                computed, flags = slots.computed[rows], slots.flags[rows]
        self.budget -= len(rows)
        slots.computed[rows] = computed + 1
        known = computed + 2
        slots.known[rows] = known
        if self.state.may_sit_out:
            slots.last_step[rows] = self.state.step
        last = (known >= slots.limit[rows]).nonzero()[0]
        if len(last):
            slots.state[rows[last]] = ENDING
        return rows, computed, flags

    def _place(self, rows: I64) -> list[int]:
        """Give each row a block of its own for the position it writes next; returns the rows that sit out."""
        slots = self.slots
        if self.pool.free >= len(rows) and not np.count_nonzero(slots.flags[rows] & SHARED_TAIL):
            self._append_blocks(rows)  # they are here because their last block is full
            return []
        out: list[int] = []
        for row in self.state.by_order(rows):
            if slots.state[row] != DECODE:  # gave way to an earlier row
                continue
            column = int(slots.computed[row]) >> self.state.shift
            if column < slots.blocks[row]:
                if not self._unshare(row, column):
                    out.append(row)
            elif self.pool.free or self._make_room(row):
                self._append_blocks(np.array([row]))
            else:
                out.append(row)
        return out

    def _append_blocks(self, rows: I64) -> None:
        """One more block for each of the rows."""
        device_rows, columns = self.slots.device_row[rows], self.slots.blocks[rows]
        blocks = self.pool.take(len(rows))
        self.state.table[device_rows, columns] = blocks
        self.slots.blocks[rows] = columns + 1
        self.draft.write_table(device_rows, columns, blocks)

    def _unshare(self, row: int, column: int) -> bool:
        """Copy on write: before `row` writes into a block that others hold, move it to a copy.

        The last owner writes in place. False when there is no block to copy to in this plan: the row sits out.
        """
        slots, pool = self.slots, self.pool
        blocks = self.state.blocks_of(row)
        block = blocks[column : column + 1].copy()
        if pool.ref[block[0]] > 1:
            copy = pool.take_freed_before(self.mark)
            if copy is None:
                self.held_back = True
                return pool.free == 0 and self._make_room(row, int(block[0])) and self._unshare_in_place(row, block)
            self.draft.copies += (int(block[0]), copy)
            pool.drop(block)
            blocks[column] = copy
            if slots.device_row[row]:  # else the whole table is written at admission
                self.draft.write_table(int(slots.device_row[row]), column, blocks[column : column + 1])
            slots.flags[row] &= ~SHARED_TAIL
            return True
        return self._unshare_in_place(row, block)

    def _unshare_in_place(self, row: int, block: I64) -> bool:
        """Let the last owner of a block write into it; False when it has others."""
        if self.pool.ref[block[0]] > 1:
            return False
        # It may be published, and this step writes it again; with the row's chunk it is published by this plan, too.
        self.pool.index.filled_at[block] = self.state.step
        self.slots.flags[row] &= ~SHARED_TAIL
        return True

    def _make_room(self, row: int, shared: int = 0) -> bool:
        """Free at least one block for `row`, or leave it alone with block `shared`; False: not in this plan.

        First go the blocks that waiting forks hold. If somebody is about to end, `row` sits out until then. Else the
        running sequence that comes last in the order of service gives way, which may be `row` itself; those that are
        in the plan already come before it.
        """
        slots = self.slots
        self.held_back = True
        if self.state.reclaim_forks(shared):
            return True
        if np.count_nonzero(slots.state == ENDING):
            return False
        running = np.flatnonzero((slots.state == DECODE) | (slots.state == PREFILL))
        while len(running):
            last = int(np.argmax(slots.order[running]))
            victim = int(running[last])
            self._give_way(victim, row, "no KV block was free for the next token")
            if victim == row:
                return False
            if self.pool.free or (shared and self.pool.ref[shared] == 1):
                return True
            running = np.delete(running, last)
        return False

    def _plan_chunk(self, row: int) -> None:
        """Feed the next tokens of a row from the host, as many as the budget allows."""
        slots = self.slots
        sequence = slots.sequence(row)
        start, known = int(slots.computed[row]), int(slots.known[row])
        length = min(known - start, self.budget)
        end = start + length
        self.draft.tokens.append(sequence.ids[start:end])
        self.budget -= length
        slots.computed[row] = end
        slots.last_step[row] = self.state.step
        if self.pool.prefix_cache:
            published = self.state.publish(row, start >> self.state.shift, end >> self.state.shift)
            self.published.append((row, published))
        self._count(sequence, start, end)
        if sequence.request.prompt_logprobs >= 0:
            device_row = int(slots.device_row[row])
            self.draft.extras += prompt_words(sequence.request, device_row, sequence.ids, start, end)
        flags = HOST_IDS | int(slots.flags[row] & IS_RARE)
        if end == known:
            flags |= SAMPLE
            slots.known[row] = known + 1
            more = known + 1 < slots.limit[row] and not slots.flags[row] & IS_BEAM
            slots.state[row] = DECODE if more else ENDING
            if sequence.dormant:
                self._fork(row, sequence)
        self.chunks.append((row, start, length, flags))

    def _count(self, sequence: Sequence, start: int, end: int) -> None:
        """Tokens that a sequence had before it gave way are computed again; a prompt's others for the first time."""
        first, again = max(start, sequence.reached), max(0, min(end, sequence.reached) - start)
        self.stats.recomputed_tokens += again
        sequence.recomputed += again
        self.stats.prompt_tokens_computed += max(0, min(end, len(sequence.request.prompt) // 4) - first)

    def _fork(self, row: int, parent: Sequence) -> None:
        """The prompt of `n > 1` is computed with this plan: its other children share the blocks and join the queue.

        They start at the prompt's last token, so each computes one token itself and needs nobody's logits.
        """
        slots = self.slots
        prompt = len(parent.ids)
        if prompt & self.state.mask:
            slots.flags[row] |= SHARED_TAIL
        for child in parent.dormant:
            child.forked = self.state.blocks_of(row).copy()
            self.pool.hold(child.forked)
            slots.computed[child.row] = prompt - 1
            slots.flags[child.row] |= SHARED_TAIL
            slots.last_step[child.row] = self.state.step
            self.state.enqueue(child.row)
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
                self.state.blocked = row
                break
            if row == self.way_for:  # or the victim would be back before it
                break
        for row in put_back:
            self.state.enqueue(row)

    def _try_admit(self, row: int) -> int:
        """Reserve blocks for all known tokens of a waiting row, shared where the prefix cache or a fork has them."""
        slots, pool = self.slots, self.pool
        sequence = slots.sequence(row)
        if slots.last_step[row] == self.state.step:  # forked in this plan: what it would copy is not written yet
            return NOT_NOW
        if self.draft.swap_out and sequence.host is not None:  # no block is swapped out and in by one plan
            return NOT_NOW
        known = int(slots.known[row])
        total = -(-known // self.limits.block_size)
        if not self._sections_hold(row, sequence, total):
            return NO_ROOM
        hit = NO_BLOCKS
        column = (known - 1) >> self.state.shift  # of the block that a fork writes first
        if sequence.forked is not None:
            need = 1 if column == len(sequence.forked) else int(pool.ref[sequence.forked[column]] > 1)
        else:
            # Who wants log-probabilities of its prompt computes all of it. A block of one token is not worth a copy.
            if sequence.request.prompt_logprobs < 0:
                full = known >> self.state.shift if self.state.mask else known - 1
                hit = pool.match(sequence.keys[: KEY_BYTES * full], sequence.request.root)
            if self._is_written_now(hit):
                return NOT_NOW
            need = max(total - len(hit), 1)  # 1: for the copy of the last block, when the cache has them all
        spare = pool.free - (self.limits.watermark if self.state.busy else 0)
        taken = need + pool.unreferenced(hit)
        if taken > spare and len(hit) == total:  # there is no room beside the last block: it is computed again
            hit = hit[:-1]
            taken = need + pool.unreferenced(hit)
        if taken > spare:
            # With nobody running, the blocks that waiting forks hold are all that is in the way.
            if not self.state.busy and self.state.reclaim_forks():
                return self._try_admit(row)
            return NO_ROOM
        if sequence.forked is not None:
            if column == len(sequence.forked):
                sequence.forked = np.concatenate([sequence.forked, pool.take(1)])
            elif not self._unshare(row, column):
                return NO_ROOM
            blocks = sequence.forked
        else:
            blocks, cached = self._share_cached(row, hit, total)
            if sequence.host is None:
                slots.computed[row] = cached
            if not sequence.admitted:
                sequence.cached = cached
                self.stats.prompt_tokens += known
                self.stats.prefix_hit_tokens += cached
        self._set_up(row, sequence, blocks)
        if sequence.host is not None:
            self._swap_in(row, sequence, sequence.host, cached)
        return ADMITTED

    def _share_cached(self, row: int, hit: I64, total: int) -> tuple[I64, int]:
        """Blocks for a row that needs `total` and finds `hit` in the cache, and how many tokens that spares it."""
        pool, shift = self.pool, self.state.shift
        if len(hit) == total:
            source = int(hit[-1])
            pool.hold(hit[:-1] if source in self.copied else hit)
            copiers = self.copied.setdefault(source, [])
            hit = hit[:-1]
            copy = pool.take_freed_before(self.mark)
            if copy is not None:
                self.draft.copies += (source, copy)
                copiers.append(row)
                return np.append(hit, copy), (total << shift) - 1
        else:
            pool.hold(hit)
        return np.concatenate([hit, pool.take(total - len(hit))]), len(hit) << shift

    def _release_copied(self) -> None:
        """Let go of the cached blocks that this plan copies: their first copies stand for those that nobody holds."""
        slots, pool = self.slots, self.pool
        pool.drop(np.array(list(self.copied)))
        for source, rows in self.copied.items():
            if rows and not pool.ref[source]:
                columns = int(slots.blocks[rows[0]])
                self.published.append((rows[0], self.state.publish(rows[0], columns - 1, columns)))

    def _sections_hold(self, row: int, sequence: Sequence, blocks: int) -> bool:
        """Whether the sections of this plan have room to set a row up with so many blocks."""
        if self.draft.table and self.draft.table_writes + blocks > self.limits.table_capacity:
            return False
        if self.draft.swap_in and sequence.host is not None:
            swapped = len(self.draft.swap_in) // 2 + len(sequence.host)
            if swapped > self.limits.swap_capacity:
                return False
        if not self.draft.extras or not self.slots.flags[row] & IS_RARE:
            return True
        words = len(rare_words(sequence.request, 0, sequence.ids))
        return len(self.draft.extras) + words <= self.limits.extras_capacity

    def _swap_in(self, row: int, sequence: Sequence, host: I64, cached: int) -> None:
        """Bring back from the host what a row had computed behind its `cached` tokens, and publish it again.

        These were in the prefix cache, which may even have more than the row itself had.
        """
        slots, state = self.slots, self.state
        computed = int(slots.computed[row])
        first, last = -(-cached >> state.shift), -(-computed >> state.shift)
        if first < last:
            pairs = np.stack((host[first:last], state.blocks_of(row)[first:last]), axis=1)
            self.draft.swap_in += pairs.reshape(-1).tolist()
            self.stats.swapped_in_tokens += computed - (first << state.shift)
            sequence.swapped += computed - (first << state.shift)
            if self.pool.prefix_cache:
                self.published.append((row, state.publish(row, first, computed >> state.shift)))
        else:
            slots.computed[row] = cached
            sequence.swap_step = 0
        state.host.give_back(host)
        sequence.host = None

    def _is_written_now(self, blocks: I64) -> bool:
        """Whether this very plan writes one of some cached blocks: whoever needs it waits one step."""
        return bool(np.count_nonzero(self.pool.index.filled_at[blocks] == self.state.step))

    def _set_up(self, row: int, sequence: Sequence, blocks: I64) -> None:
        """A device row for an admitted sequence: its table, parameters and known tokens."""
        slots = self.slots
        known, columns = int(slots.known[row]), len(blocks)
        device_row = self.state.device_rows.popleft()
        slots.device_row[row] = device_row
        slots.blocks[row] = columns
        slots.state[row] = PREFILL
        sequence.admitted = True
        sequence.scheduled_us = sequence.scheduled_us or self.state.now_us
        sequence.forked = None
        self.state.table[device_row, :columns] = blocks
        self.state.history[device_row, :known] = sequence.ids
        self.draft.write_table(device_row, self.state.columns[:columns], blocks)
        self.draft.params.append(set_up_block(sequence.params, device_row, known, int(slots.child[row])))
        if slots.flags[row] & IS_RARE:
            self.draft.extras += rare_words(sequence.request, device_row, sequence.ids)
