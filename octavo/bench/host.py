"""`octavo bench host`: CPU time that the scheduler takes for one step, at a steady churn and without a device.

The mix: a full batch of sequences with prompts of which half is shared, one step in flight, and in every step one
admission, one finish, one new block for a sixteenth of the batch, two aborts of requests that wait. Plan encoding,
prefix cache and token batch are included. What is measured is the thread's CPU time of `plan` and `commit`
together; `abort` and `submit` are reported beside it. Swap space is there, and nobody has to give way.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from dataclasses import asdict, dataclass

import numpy as np

from octavo.scheduler.keys import chain_keys, root_key
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.records import LENGTH, Limits, Step
from octavo.scheduler.scheduler import Scheduler
from octavo.types import EngineRequest

BLOCK_SIZE = 16
PROMPT, SHARED = 1024, 512
VOCAB = 32000
WARM_UP = 300


@dataclass(frozen=True, slots=True)
class HostCost:
    """Microseconds of thread CPU time a step: median and 99th percentile of `plan` + `commit`, medians of parts."""

    batch: int
    steps: int
    policy: str
    median: float
    p99: float
    plan: float
    commit: float
    abort: float
    submit: float
    admissions: float  # a step
    finishes: float

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, {self.policy}: plan + commit {self.median:.0f} us a step (p99 {self.p99:.0f}); "
            f"plan {self.plan:.0f}, commit {self.commit:.0f}, two aborts {self.abort:.0f}, "
            f"three submits {self.submit:.0f}; {self.admissions:.2f} admissions, {self.finishes:.2f} finishes a step"
        )


class Churn:
    """The mix, step by step. The first batch ends one by one, every later sequence after `batch` steps."""

    def __init__(self, batch: int, policy: str = "fcfs") -> None:
        self.batch = batch
        tokens = PROMPT + batch + 2
        blocks = batch * (-(-tokens // BLOCK_SIZE) - SHARED // BLOCK_SIZE)
        self.scheduler = Scheduler(
            Limits(
                max_num_seqs=batch,
                max_num_batched_tokens=8192,
                max_model_len=tokens,
                block_size=BLOCK_SIZE,
                blocks=blocks * 5 // 4,
                vocab_size=VOCAB,
                watermark=blocks // 100,
                policy=policy,
                swap_blocks=1024,
                swap_cost=1.0,
            )
        )
        self.rng = np.random.default_rng(0)
        self.shared = self._tokens(SHARED)
        self.sampled = self.rng.integers(3, VOCAB, (64, batch), dtype=np.int32)
        self.waiting: deque[int] = deque()
        self.in_flight: Step | None = None
        self.requests = self.finished = 0
        self.steps = 0
        for i in range(batch):
            self.scheduler.submit(self.request(1 + i * 9 // 10))  # they are admitted about ten at a time

    def _tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(3, VOCAB, count, dtype=np.int32)

    def request(self, new_tokens: int, priority: int = 0) -> EngineRequest:
        """A new request; tenants take turns."""
        self.requests += 1
        prompt = np.concatenate([self.shared, self._tokens(PROMPT - SHARED)])
        root = root_key(BLOCK_SIZE)
        return EngineRequest(
            id=self.requests,
            prompt=prompt.tobytes(),
            keys=b"".join(chain_keys(root, prompt, BLOCK_SIZE)),
            root=root,
            limit=PROMPT + new_tokens,
            eos=(2,),
            priority=priority,
            tenant=f"tenant {self.requests % 4}",
        )

    def arrivals(self) -> list[EngineRequest]:
        """Requests of one step: one to be admitted, two that go away while they wait."""
        return [self.request(self.batch, priority) for priority in (0, 1, 2)]

    def plan_and_commit(self) -> tuple[float, float]:
        """One step with one in flight; CPU seconds of `plan` and of `commit`."""
        begin = time.thread_time()
        step = self.scheduler.plan()
        planned = time.thread_time()
        if self.in_flight is not None:
            tokens = self.sampled[self.steps & 63, : len(self.in_flight.samples)]
            committing = time.thread_time()
            batch = self.scheduler.commit(self.in_flight, tokens)
            done = time.thread_time()
            self.finished += sum(end.reason == LENGTH for end in batch.ended)
        else:
            committing = done = planned
        self.in_flight = step
        self.steps += 1
        return planned - begin, done - committing


def measure(batch: int = 256, steps: int = 1000, policy: str = "fcfs") -> HostCost:
    """Run the mix and take the times."""
    churn = Churn(batch, policy)
    scheduler = churn.scheduler
    rounds = [churn.arrivals() for _ in range(WARM_UP + steps)]
    times, admitted, finished = [], 0, 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for i, requests in enumerate(rounds):
            if i == WARM_UP:
                admitted, finished = scheduler.stats.prompt_tokens, churn.finished
            begin = time.thread_time()
            for request in requests:
                scheduler.submit(request)
            submitted = time.thread_time()
            for request in requests[1:]:
                scheduler.abort(request.id)
            aborted = time.thread_time()
            times.append((*churn.plan_and_commit(), aborted - submitted, submitted - begin))
    finally:
        gc.enable()
        gc.unfreeze()
    kept = np.array(times[WARM_UP:]) * 1e6
    total = kept[:, 0] + kept[:, 1]
    admissions = (scheduler.stats.prompt_tokens - admitted) / PROMPT / steps
    finishes = (churn.finished - finished) / steps
    median, p99 = np.percentile(total, (50, 99)).tolist()
    plan, commit, abort, submit = np.median(kept, axis=0).tolist()
    return HostCost(batch, steps, policy, median, p99, plan, commit, abort, submit, admissions, finishes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--batch", type=int, default=256, help="sequences at a time (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps to measure (default %(default)s)")
    parser.add_argument("--policy", choices=POLICIES, default="fcfs", help="who is served next (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    cost = measure(args.batch, args.steps, args.policy)
    print(json.dumps(asdict(cost)) if args.json else cost)
    return 0
