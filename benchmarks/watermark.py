"""What the watermark and the swap space do when the KV pool is too small: the embedded model on the CPU.

Run `taskset -c 0 python benchmarks/watermark.py`; prints a Markdown table. Time is the process's CPU time, which
other work on the machine changes little. All rows have the same requests, random prompts with long answers that all
arrive at once, and differ in nothing but the blocks that admission leaves free, and in what happens to a sequence
that gives way. The answers are compared: they are the same in every row.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import numpy as np

from octavo.config import engine_config
from octavo.engine.build import build_engine, open_model
from octavo.engine.client import ModelLimits, build_request
from octavo.engine.loop import EngineLoop
from octavo.runner.base import Runner
from octavo.scheduler.records import Limits, Stats
from octavo.scheduler.scheduler import Scheduler
from octavo.types import SamplingParams

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` prompts of `prompt` tokens at most; answers of up to `answer` tokens; a pool of `blocks`."""

    requests: int
    prompt: int
    answer: int
    blocks: int


def run(load: Load, limits: Limits, runner: Runner, model: ModelLimits) -> tuple[float, Stats, int]:
    """CPU seconds, counters, and a checksum of the answers."""
    scheduler = Scheduler(limits)
    loop = EngineLoop(scheduler, runner, 0)
    rng = np.random.default_rng(0)
    for i in range(load.requests):
        ids = rng.integers(100, 5000, int(rng.integers(load.prompt // 4, load.prompt))).tolist()
        new = int(rng.integers(load.answer // 2, load.answer))
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        scheduler.submit(build_request(i, ids, params, model, "", ()))
    begin, checksum = time.process_time(), 0
    while scheduler.has_work():
        for batch in loop.step():
            checksum += int((batch.token * (1 + batch.request_id)).sum())
    return time.process_time() - begin, scheduler.stats, checksum


def main() -> None:
    """Load the model, run every row, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=100, help="KV blocks of 16 tokens")
    args = parser.parse_args()
    load = Load(args.requests, 96, 160, args.blocks)
    swap = 2 * load.blocks
    config, _ = engine_config(
        num_gpu_blocks_override=load.blocks, block_size=BLOCK, max_model_len=512, swap_space=1.0, device="cpu"
    )
    engine = build_engine(config, open_model(config))
    base = replace(engine.scheduler.state.limits, swap_blocks=0)
    print("| blocks kept free | who gives way | tokens a CPU second | steps | preemptions | tokens given up |")
    print("|---|---|---|---|---|---|")
    checksums = set()
    for share, host in ((0.0, 0), (0.0, swap), (0.01, 0), (0.01, swap), (0.05, 0), (0.1, 0)):
        limits = replace(base, watermark=int(load.blocks * share), swap_blocks=host)
        seconds, stats, checksum = run(load, limits, engine.loop.runner, engine.limits)
        checksums.add(checksum)
        print(
            f"| {limits.watermark} ({share:.0%}) | {'is swapped' if host else 'computes again'} | "
            f"{stats.generated_tokens / seconds:.0f} | {stats.steps} | {stats.preemptions} | "
            f"{stats.preempted_tokens} |",
            flush=True,
        )
    if len(checksums) > 1:
        raise SystemExit("the answers differ")


if __name__ == "__main__":
    main()
