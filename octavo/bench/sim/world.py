"""World: the real scheduler and the real loop on a `FakeRunner`, with every check after every step.

`step` applies the events of one step, turns the loop once, compares what came out with the oracle and recounts all
invariants. `drain` stops the traffic and expects everything to end within a bound. Anything that is not as it must
be raises `Violation`; so does any exception of the scheduler, the loop or the runner.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.bench.sim import checks
from octavo.bench.sim.case import Abort, Event, Fault, SimConfig, Submit
from octavo.bench.sim.checks import Seen, ensure
from octavo.bench.sim.oracle import Expected, Ledger, Violation, must_refuse
from octavo.engine.loop import EngineLoop
from octavo.errors import EngineError, RequestError
from octavo.runner.base import StepError, TokenLogprobs
from octavo.runner.fake import FakeRunner, Ticket
from octavo.scheduler.records import ABORT, ERROR, RUNNING, Limits, Stats, TokenBatch
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.slots import ENDING, WAITING

COUNTERS = (
    "prompt_tokens_computed", "recomputed_tokens", "generated_tokens", "steps", "block_copies", "peak_blocks",
)  # fmt: skip


class WatchedRunner(FakeRunner):
    """Calls `before` with the words of each plan, and `after` when it was launched."""

    before: Callable[[list[int]], None]
    after: Callable[[], None]

    def launch(self, words: NDArray[np.int32]) -> Ticket:
        """As the base class."""
        self.before(words.tolist())
        try:
            ticket = super().launch(words)
        except (StepError, EngineError):
            raise
        except Exception as error:  # the loop would take it for the loss of one step
            raise Violation(f"{type(error).__name__} in the runner: {error}") from error
        self.after()
        return ticket


class World:
    """One simulation. `finished`: texts of requests that ended well, (salt number, tokens), newest last."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        limits = Limits(
            max_num_seqs=config.seqs,
            max_num_batched_tokens=config.budget,
            max_model_len=config.max_len,
            block_size=config.block_size,
            blocks=config.usable + 1,
            vocab_size=config.vocab,
            prefix_cache=config.prefix_cache,
            watermark=config.watermark,
            policy=config.policy,
            mixed_prefill=config.mixed_prefill,
            swap_blocks=config.host_blocks,
            swap_cost=config.swap_cost,
        )
        self.scheduler = Scheduler(limits)
        self.runner = WatchedRunner(
            rows=config.seqs,
            max_len=config.max_len,
            block_size=config.block_size,
            blocks=config.usable + 1,
            vocab_size=config.vocab,
            host_blocks=config.host_blocks,
        )
        self.runner.before, self.runner.after = self._before_launch, self._after_launch
        self.loop = EngineLoop(self.scheduler, self.runner, config.depth)
        self.ledger = Ledger(config)
        self.finished: list[tuple[int, list[int]]] = []
        self.count = Stats()  # recounted here from plans and results
        self.swapped_out = self.swapped_in = 0  # blocks
        self.reached: dict[tuple[int, int], int] = {}  # sequence -> tokens that it has computed, at most
        self.aborts = self.errors = self.submitted = self.refused = 0
        self.ended_preemptions = 0
        self.now = 0
        self.may_fail: set[int] = set()
        self.next_fault = 0
        self.lost: int | None = None  # number of the step that was lost, until that is reported
        self.poisoned = False  # keys and values are not finite somewhere, and nobody has noticed
        self.deadlines: dict[int, int] = {}  # request -> step by which it must have ended
        self.top = 0  # the highest priority that there was since who is first became it, or gave way
        self.first: tuple[tuple[int, ...], int] = ((), 0)  # who is served first, and since when as it is

    def live(self) -> list[int]:
        """Ids of the requests that are not over."""
        return list({number: None for (number, _), one in self.ledger.live.items() if not one.over})

    def step(self, events: list[Event]) -> None:
        """One step; raises Violation."""
        self.now += 1
        try:
            for event in events:
                self._apply(event)
            self._turn()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error

    def drain(self) -> None:
        """No more traffic: everything ends within a bound, and nothing is left behind."""
        bound = self.now + 20 + self._work()
        while self.scheduler.has_work():
            ensure(self.now < bound, f"stall: {len(self.live())} requests are left after {bound} steps")
            self.step([])
        checks.check_idle(self.scheduler)
        left = [key for key, one in self.ledger.live.items() if not one.reported]
        ensure(not left, f"I9: no end was reported for {left[:3]}")

    def _work(self, number: int = 0) -> int:
        """Steps that the live sequences may take, or those of one request, one after the other, a token at a time."""
        live = [one for key, one in self.ledger.live.items() if not one.over and number in (0, key[0])]
        return (self.config.depth + 2) * (sum(one.spec.limit for one in live) + 10)

    def _apply(self, event: Event) -> None:
        if isinstance(event, Fault):
            steps = self.scheduler.stats.steps
            # Three failed steps in a row end an engine, and rightly; two poisons at a time cannot be told apart.
            if steps >= self.next_fault and not (self.faulty and event.kind == "bad kv"):
                self.runner.inject(event.kind, event.victim)
                self.next_fault = steps + 4
        elif isinstance(event, Abort):
            children = [key for key in self.ledger.live if key[0] == event.id and event.child in (None, key[1])]
            for key in children:
                if not self.ledger.live[key].over:
                    self.ledger.live[key].over = self.ledger.live[key].aborted = True
                    self.aborts += 1
            self.scheduler.abort(event.id, event.child)
        else:
            self._submit(event)

    def _submit(self, event: Submit) -> None:
        request = self.ledger.request(event.id, event.spec)
        refuse = must_refuse(event.spec, self.config)
        try:
            self.scheduler.submit(request)
        except RequestError as error:
            ensure(refuse, f"request {event.id} was refused: {error}")
            self.refused += 1
            return
        ensure(not refuse, f"request {event.id} can never run, and was not refused")
        self.submitted += 1
        self.ledger.expect(event.id, event.spec, request.root)
        if self.config.policy != "fcfs":  # it may be served before them all
            work = self._work(event.id)
            self.deadlines = {number: at + work for number, at in self.deadlines.items()}
        self.deadlines[event.id] = self.now + 50 + self._work()

    def _turn(self) -> None:
        state = self.scheduler.state
        if self.runner.armed or self.faulty:
            self.may_fail.update(self.live())  # until the loss is reported, whoever is there may have built on it
        self.top = max([self.top] + [one.spec.priority for one in self.ledger.live.values() if not one.over])
        batches = self._loop_step()
        for batch in batches:
            self._receive(batch)
        if self.lost is not None and (not state.in_flight or state.in_flight[0].number > self.lost):
            self.lost = None
        if self.poisoned:
            pool = state.pool
            self.poisoned = any(pool.ref[b] or b in pool.index for b in self.runner.tainted)
            self.poisoned |= any(state.host.used[b] for b in self.runner.tainted_host)
        seen = checks.look(self.scheduler)
        ref = checks.check_blocks(self.scheduler, seen)
        checks.check_index(self.scheduler, self.runner, self.ledger, contents=not self.faulty)
        checks.check_host(self.scheduler, self.runner, self.ledger, seen, contents=not self.faulty)
        checks.check_sharing(self.scheduler, seen, ref)
        checks.check_rows(self.scheduler, seen)
        self._check_counters(seen)
        self._check_progress(seen)

    def _loop_step(self) -> list[TokenBatch]:
        armed, before, unsound = self.runner.armed, self.scheduler.state.step, self.runner.unsound
        batches = self.loop.step()
        ensure(self.scheduler.state.step == before + 1, "the loop makes one plan a step")
        if armed and not self.runner.armed:
            self.lost = self.scheduler.state.step
            self.poisoned |= bool(self.runner.tainted)
        if self.runner.unsound != unsound:  # noticed when this step comes back
            self.lost, self.poisoned = self.scheduler.state.step, False
        return batches

    @property
    def faulty(self) -> bool:
        """Whether a fault has happened of which the scheduler cannot know yet."""
        return self.lost is not None or self.poisoned

    def _before_launch(self, words: list[int]) -> None:
        """Limits of a plan, and counters of work done from its own words."""
        checks.check_plan(self.scheduler, words)
        rows, decode_rows = words[3], words[5]
        flags = words[32 + 3 * rows : 32 + 4 * rows]
        ensure(all(flag & 2 == 0 for flag in flags[:decode_rows]), "I6: a decode row is fed by the host")
        self.count.steps += 1
        self._count_rows(words, rows)
        self.count.block_copies += words[13]
        self.swapped_out += words[15]
        self.swapped_in += words[17]
        pool = self.scheduler.state.pool
        self.count.peak_blocks = max(self.count.peak_blocks, pool.usable - pool.free)

    def _count_rows(self, words: list[int], rows: int) -> None:
        """What each row computes: for the first time, or again."""
        slots = self.scheduler.state.slots
        names = {
            device_row: (int(slots.request_id[row]), int(slots.child[row]))
            for row, device_row in enumerate(slots.device_row.tolist())
            if device_row
        }
        for i in range(rows):
            device_row, start, length, flags = words[32 + i : 32 + 4 * rows : rows]
            name, end = names[device_row], start + length
            reached = self.reached.get(name, 0)
            self.reached[name] = max(reached, end)
            if flags & 2:
                prompt = len(self.ledger.live[name].spec.prompt)
                self.count.recomputed_tokens += max(0, min(end, reached) - start)
                self.count.prompt_tokens_computed += max(0, min(end, prompt) - max(start, reached))

    def _after_launch(self) -> None:
        checks.check_writes(self.scheduler, self.runner)

    def _receive(self, batch: TokenBatch) -> None:
        """I9, I10: tokens and ends as the oracle has them."""
        columns = zip(batch.request_id.tolist(), batch.child.tolist(), batch.token.tolist(), strict=True)
        for i, (number, child, token) in enumerate(columns):
            one = self.ledger.live.get((number, child))
            if one is None or one.over:
                raise Violation(f"I9: a token came for request {number}.{child}, which is over")
            if one.got >= len(one.tokens) or one.tokens[one.got] != token:
                raise Violation(
                    f"I10: token {one.got} of request {number}.{child} is {token}, alone it is "
                    f"{one.tokens[one.got] if one.got < len(one.tokens) else 'not there'}"
                )
            self._check_logprobs(one, token, batch.logprobs.get(i))
            one.got += 1
            self.count.generated_tokens += 1
        for end in batch.ended:
            one = self.ledger.live.get((end.request_id, end.child))
            name = f"request {end.request_id}.{end.child}"
            if one is None or one.reported:
                raise Violation(f"I9: {name} ended twice, or never began")
            self._check_end(name, end.request_id, one, end.reason, end.cached_tokens)
            one.over = one.reported = True
            self.ended_preemptions += end.preemptions
            self._forget(end.request_id)

    def _check_logprobs(self, one: Expected, token: int, value: object) -> None:
        wanted = one.spec.logprobs >= 0
        ensure(isinstance(value, TokenLogprobs) == wanted, "I10: logprobs where none belong, or none where some do")
        if isinstance(value, TokenLogprobs):
            ensure(
                value.chosen == -1.0 - token and value.rank == len(one.spec.prompt) + one.got,
                "I10: logprobs of another token",
            )

    def _check_end(self, name: str, number: int, one: Expected, reason: int, cached: int) -> None:
        ensure(reason != RUNNING and not (one.aborted and reason != ABORT), f"I9: {name} ended with reason {reason}")
        if reason == ABORT:
            ensure(one.aborted, f"I9: {name} ended as aborted, but nobody aborted it")
        elif reason == ERROR:
            ensure(number in self.may_fail, f"I9: {name} failed, but nothing that concerns it did")
            self.errors += 1
        else:
            ensure(reason == one.reason, f"I10: {name} ended with reason {reason}, alone with {one.reason}")
            ensure(one.got == len(one.tokens), f"I10: {name} ended after {one.got} of {len(one.tokens)} tokens")
            salt = ("", "a", "b").index(one.spec.salt)
            self.finished = [*self.finished[-20:], (salt, [*one.spec.prompt, *one.tokens])]
        ensure(0 <= cached < len(one.spec.prompt), f"I11: {name} had {cached} cached tokens")

    def _forget(self, number: int) -> None:
        """Drop a request when all its children were reported."""
        children = [key for key in self.ledger.live if key[0] == number]
        if all(self.ledger.live[key].reported for key in children):
            for key in children:
                del self.ledger.live[key]
                self.reached.pop(key, None)
            self.deadlines.pop(number, None)
            self.may_fail.discard(number)

    def _check_counters(self, seen: list[Seen]) -> None:
        """I11."""
        stats, count = self.scheduler.stats, self.count
        for name in COUNTERS:
            if getattr(count, name) != getattr(stats, name):
                raise Violation(f"I11: {name} is {getattr(stats, name)}, recounted {getattr(count, name)}")
        live = sum(one.sequence.preemptions for one in seen if checks.alive(one))
        ensure(stats.preemptions == self.ended_preemptions + live, "I11: preemptions")
        size = self.config.block_size
        swaps = ((stats.swapped_out_tokens, self.swapped_out), (stats.swapped_in_tokens, self.swapped_in))
        for tokens, blocks in swaps:  # of each sequence, the last block may be filled in part
            ensure(blocks * size >= tokens >= (blocks - stats.preemptions) * size, "I11: swapped tokens")

    def _check_progress(self, seen: list[Seen]) -> None:
        """The first in the order of service never stands still; nobody waits for ever."""
        if self.deadlines and min(self.deadlines.values()) < self.now:
            raise Violation(f"stall: requests {[n for n, at in self.deadlines.items() if at < self.now]} did not end")
        running = [one for one in seen if WAITING < one.state <= ENDING]
        if not running:
            return
        first = min(running, key=lambda one: one.order)
        mark = (first.request_id, first.child, first.computed, first.in_flight, first.sequence.preemptions)
        if mark[:2] == self.first[0][:2] and mark[4] != self.first[0][4]:
            ensure(self.top > first.sequence.request.priority, "the first in the order of service gave way")
        if mark[:2] != self.first[0][:2] or mark[4] != self.first[0][4]:
            self.top = first.sequence.request.priority
        if mark != self.first[0]:
            self.first = (mark, self.now)
        patience = 4 + 2 * self.config.depth + len(running)
        if self.now - self.first[1] > patience:
            raise Violation(f"stall: {first} made no progress in {patience} steps")
