"""Planted bugs: one silent edit each of the real source, which the simulator has to notice.

An edit replaces a piece of a function's source and swaps the function's code object, so every reference to it sees
the edit. It raises nothing by itself. `python -m tests.simulation.mutants` hunts all of them and prints the list.
"""

from __future__ import annotations

import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from octavo.bench.sim.case import draw_config
from octavo.bench.simulate import Failure, run_seed
from octavo.scheduler import features, keys
from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.planner import Planner
from octavo.scheduler.prefix import PrefixIndex
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.slots import SlotTable
from octavo.scheduler.state import SchedulerState
from octavo.scheduler.swap import HostPool

STEPS, SEEDS = 500, 150


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in the source of `function`; `new` takes its place.

    world: settings under which the bug is met often; the rest of a world is drawn from its seed as ever.
    """

    name: str
    function: Callable[..., Any]
    old: str
    new: str
    world: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The edit, for the time of a `with` block."""
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} occurs {source.count(self.old)} times"
        scope: dict[str, Any] = {}
        exec(compile(source.replace(self.old, self.new), f"<{self.name}>", "exec"), dict(vars(_module(self))), scope)
        before = self.function.__code__
        self.function.__code__ = scope[self.function.__name__].__code__
        try:
            yield
        finally:
            self.function.__code__ = before


def _module(mutant: Mutant) -> Any:
    return inspect.getmodule(mutant.function)


def hunt(mutant: Mutant) -> str:
    """How the simulator noticed: seed, step and violation; empty when it did not."""
    logging.getLogger("octavo.engine.loop").setLevel(logging.CRITICAL)
    with mutant.planted():
        for seed in range(SEEDS):
            config = msgspec.structs.replace(draw_config(Random(seed)), **mutant.world)
            try:
                run_seed(seed, STEPS, config)
            except Failure as failure:
                return f"seed {seed}, step {failure.trace.steps}: {failure}"
    return ""


FAULTS = {"faults": 0.2, "depth": 2, "prefix_cache": True}
REPEATS = {"block_size": 2, "growth": 0.0, "arrivals": 1.4, "prefix_cache": True, "max_len": 24, "usable": 60}
SWAPS = {
    "host_blocks": 60, "swap_cost": 0.0, "growth": 0.9, "arrivals": 1.4, "aborts": 0.07, "block_size": 2,
    "max_len": 40, "usable": 45, "seqs": 6, "budget": 40, "crowd": 12,
}  # fmt: skip
DROP = "self.pool.drop(self.blocks_of(row))"

MUTANTS = [
    # Blocks.
    Mutant("leak on abort while waiting", SchedulerState.end, DROP, f"slots.device_row[row] and {DROP}"),
    Mutant("leak on abort during prefill", SchedulerState.end, DROP, f"slots.state[row] != 2 and {DROP}"),
    Mutant("double free on preemption and abort", SchedulerState.preempt, "slots.blocks[row] = 0", "pass"),
    Mutant("a prefix hit counts twice", BlockPool.hold, "= ref + 1", "= ref + 1 + (ref == 0)"),
    Mutant("a block that others hold is freed", BlockPool.drop, "blocks[left == 0]", "blocks[left <= 1]"),
    Mutant("the head of a chain is evicted first", BlockPool.drop, "[left == 0][::-1]", "[left == 0]"),
    Mutant("an evicted block keeps its key", PrefixIndex.evict, "self._run_of[blocks] = 0", "pass"),
    Mutant("an evicted run keeps its first key", PrefixIndex._remove, "del self._heads[run.key(0)]", "pass"),
    Mutant("a revived block stays in the free order", BlockPool.hold, "stale[block] += 1", "pass"),
    Mutant("partial allocation kept while waiting", Planner._try_admit,
           "        return NO_ROOM\n    if sequence.forked",
           "        return pool.hold(hit) or NO_ROOM\n    if sequence.forked"),
    # Prefix index.
    Mutant("a block is cached before it is full", Planner._plan_chunk, "end >> self.state.shift",
           "min(-(-end >> self.state.shift), len(sequence.keys))"),
    Mutant("key without parent", keys.chain_keys, "sha256(parent + data[", "sha256(data["),
    Mutant("key without salt", keys.root_key, "salt, adapter)", "adapter)"),
    Mutant("off by one at a full last block", Planner._share_cached, "(total << shift) - 1", "total << shift"),
    Mutant("a cached block is written by who shares it", Planner._share_cached, "return np.append(hit, copy)",
           "return np.append(hit, source)"),
    Mutant("the copy of a cached block is not in the plan", Planner._share_cached,
           "self.draft.copies += (source, copy)", "pass"),
    Mutant("the source of a copy is given up at once", Planner._share_cached,
           "if source in self.copied else hit)", "if True else hit)"),
    Mutant("who copied a lost block goes on", SchedulerState.fail_rows, "wrote & late.copied.keys()", "()",
           FAULTS | REPEATS | {"seqs": 12, "aborts": 0.0, "policy": "fcfs"}),
    Mutant("a block is hit in the step that fills it", Planner._is_written_now, "== self.state.step", "== -5"),
    Mutant("a published block is written in place unseen", Planner._unshare_in_place,
           "self.pool.index.filled_at[block] = self.state.step", "pass", REPEATS),
    Mutant("tokens in flight get keys", SchedulerState.publish_generated, " - slots.in_flight[row]", ""),
    Mutant("a chain goes on from a foreign block", PrefixIndex.publish, "if ref[other]:", "if False:"),
    Mutant("a chain goes on without its parent", PrefixIndex.publish,
           "return NO_BLOCKS\n        before = self._where(parent)", "parent = 0\n        before = None"),
    Mutant("a text that leaves a run gets all of it", PrefixIndex.match,
           "size = _common(run.keys, keys[at : at + size])", "pass"),
    Mutant("a deferred run without its parent", PrefixIndex.defer, "before = self._where(parent) if parent else None",
           "before = None"),
    Mutant("a deferred run is forgotten late", PrefixIndex._remove, "group.remove(run)", "pass"),
    Mutant("two runs with the same key", PrefixIndex._make_keys, "is None:", "is None or True:"),
    # Copy on write.
    Mutant("copy on write skipped", Planner._plan_decodes, "(flags & SHARED_TAIL) | ", ""),
    Mutant("the copy is not in the plan", Planner._unshare, "self.draft.copies += (int(block[0]), copy)",
           "self.stats.block_copies += 1"),
    Mutant("the copy is not in the table", Planner._unshare, "if slots.device_row[row]:", "if False:"),
    Mutant("forks hold the blocks once for all", Planner._fork, "self.pool.hold(child.forked)",
           "child is parent.dormant[0] and self.pool.hold(child.forked)"),
    Mutant("children fork from an unfinished prompt", Planner._try_admit,
           "slots.last_step[row] == self.state.step", "False"),
    # Rows and parameters.
    Mutant("slot not reset", SlotTable.give_back, "self._data[:, row] = 0", "pass"),
    Mutant("row not set up again after preemption", Planner._set_up, "self.draft.params.append(",
           "sequence.preemptions or self.draft.params.append("),
    Mutant("every child samples as the first", features.set_up_block, "device_row, length, child",
           "device_row, length, 0"),
    Mutant("upper half of the seed lost", features.parameter_block, "request.seed >> 32", "0"),
    Mutant("min_tokens forgotten", features._ban_until, "request.min_tokens <= 0", "True"),
    Mutant("device row given back too early", SchedulerState.end, "if slots.in_flight[row] == 0:", "if True:"),
    Mutant("preempted row queues with steps in flight", SchedulerState.preempt,
           "if slots.in_flight[row] == 0:", "if True:"),
    Mutant("a new block is not in the table", Planner._append_blocks,
           "self.draft.write_table(device_rows, columns, blocks)", "pass"),
    # Planning.
    Mutant("computed not reset on preemption", SchedulerState.requeue, "slots.computed[row] = 0", "pass"),
    Mutant("preemption forgets the last token", SchedulerState.requeue, ": slots.known[row]]",
           ": slots.known[row] - 1]"),
    Mutant("budget exceeded", Planner._plan_chunk, "self.budget -= length", "pass"),
    Mutant("the oldest gives way", Planner._make_room, "np.argmax", "np.argmin"),
    Mutant("who is about to end gives way", Planner._make_room, "if np.count_nonzero(slots.state == ENDING):",
           "if False:", {"growth": 0.9}),
    Mutant("unservable request retried for ever", SchedulerState.check_room, "need > self.pool.usable", "False"),
    Mutant("passed over and never put back", Planner._admit, "self.state.enqueue(row)", "pass"),
    Mutant("forked children are not queued", Planner._fork, "self.state.enqueue(child.row)", "pass"),
    # Swap.
    Mutant("host blocks leak at an end", SchedulerState.end, "self.forget_swapped(row)", "pass", SWAPS),
    Mutant("host blocks leak when they are read", Planner._swap_in, "state.host.give_back(host)", "pass", SWAPS),
    Mutant("host blocks given back twice", SchedulerState.forget_swapped, "sequence.host = None", "pass", SWAPS),
    Mutant("a host block has two owners", HostPool.take, "self._free.pop()", "self._free[-1]", SWAPS),
    Mutant("the swap-out is not in the plan", Planner._give_way, "self.draft.swap_out += ", "[] + ", SWAPS),
    Mutant("the swap-in is not in the plan", Planner._swap_in, "self.draft.swap_in += ", "[] + ", SWAPS),
    Mutant("swapped in from the wrong place", Planner._swap_in, "host[first:last]", "host[: last - first]", SWAPS),
    Mutant("swapped in to the wrong place", Planner._swap_in, "[first:last]), axis",
           "[first:last][::-1]), axis", SWAPS),
    Mutant("the last block is not swapped out", SchedulerState._swap_out, "-(-computed >> self.shift)",
           "computed >> self.shift", SWAPS),
    Mutant("the last block is not swapped in", Planner._swap_in, "-(-computed >> state.shift)",
           "computed >> state.shift", SWAPS),
    Mutant("what is in flight counts as not computed", SchedulerState.preempt, "computed = int(slots.computed[row])",
           "computed = int(slots.computed[row] - slots.in_flight[row])", SWAPS),
    Mutant("swapped out, and computed forgotten", SchedulerState.requeue, "if sequence.host is None:", "if True:",
           SWAPS),
    Mutant("host blocks forgotten, computed not", SchedulerState.forget_swapped,
           "self.slots.computed[row] = 0", "pass", SWAPS | FAULTS),
    Mutant("swapped out and in by one plan", Planner._try_admit,
           "self.draft.swap_out and sequence.host is not None", "False",
           SWAPS | {"policy": "priority", "depth": 0, "faults": 0.0, "usable": 24}),
    Mutant("a partly filled swapped block is published", Planner._swap_in, "computed >> state.shift))",
           "-(-computed >> state.shift)))", SWAPS | {"block_size": 8, "usable": 12, "prefix_cache": True}),
    Mutant("a lost swap-out is trusted", SchedulerState.fail_rows, "if lost:\n        failed.update(self",
           "if False:\n        failed.update(self", SWAPS | FAULTS),
    Mutant("who came back from a lost swap-out goes on", SchedulerState._lose_swapped, "went_on.append(sequence.row)",
           "pass", SWAPS | FAULTS | {"usable": 24, "aborts": 0.3, "policy": "fcfs"}),
    Mutant("swapped tokens count as computed again", SchedulerState._swap_out,
           "self.stats.swapped_out_tokens += computed", "pass", SWAPS),
    # Results.
    Mutant("finish reported twice", SchedulerState.end, "self.ended.append(",
           "self.ended += self.ended[-1:]\n    self.ended.append("),
    Mutant("finish never reported", Scheduler.commit, "batch.ended = self.take_ended()", "self.take_ended()"),
    Mutant("stop ids ignored", SchedulerState.new_rows, "frozenset(request.stop_ids) | ", ""),
    Mutant("end ids forgotten with the first request", SchedulerState.release,
           "if not self.ends_at[token]:", "if True:"),
    Mutant("one token too many", Scheduler.commit, "at[i] + 1 >= slots.limit", "at[i] >= slots.limit"),
    Mutant("tokens after the end", Scheduler.commit, "(now != DEAD) & (now != EMPTY)", "now >= 0"),
    Mutant("logprobs of the next row", Scheduler._batch, "np.cumsum(good) - 1", "np.cumsum(good)"),
    # Faults.
    Mutant("a lost step stays in the index", SchedulerState.fail_rows, "pool.unpublish(suspects)",
           "set(suspects)"),
    Mutant("blocks of bad logits stay in the index", SchedulerState.fail_rows, "if not lost:", "if False:",
           FAULTS | REPEATS),
    Mutant("who shared a lost block goes on", SchedulerState.fail_rows, "if lost and gone:", "if False:",
           FAULTS | REPEATS),
    Mutant("who gave a lost block up goes on", SchedulerState._has_held,
           "return sequence.given_up is not None and", "return False and",
           FAULTS | REPEATS | {"faults": 0.4, "host_blocks": 60, "swap_cost": 0.0, "max_len": 40, "usable": 20,
                               "aborts": 0.0}),
    Mutant("rows that ended do not count for a lost step", Scheduler.fail, "step.rows.tolist()",
           "step.rows[self.state.slots.state[step.rows] != DEAD].tolist()", FAULTS | {"aborts": 0.2}),
    Mutant("siblings of a lost row go on", SchedulerState.fail_rows, "list(self.requests.get(request, ()))",
           "failed & set(self.requests.get(request, ()))"),
    Mutant("tokens outside the vocabulary pass", Scheduler.commit, ">= state.limits.vocab_size", ">= 1 << 31"),
]  # fmt: skip


if __name__ == "__main__":
    for planted in MUTANTS:
        print(f"{planted.name:48} {hunt(planted) or 'NOT NOTICED'}", flush=True)
