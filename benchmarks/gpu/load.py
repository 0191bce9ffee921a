"""Random load for some minutes on one engine at 0.9 of the card: nothing may run out, and all blocks come back.

    python benchmarks/gpu/load.py SHAPE SECONDS OUT.json

Requests of all lengths, some with filters, several children, shared beginnings, log-probabilities or penalties; some
are aborted on their way. There are always 400 of them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

import torch

from octavo.bench import gpu
from octavo.types import SamplingParams

LIVE = 400  # requests at a time


def request(rng: random.Random, heads: list[list[int]], longest: int) -> tuple[list[int], SamplingParams]:
    """One request at random."""
    ids = gpu.random_ids(rng, min(int(rng.expovariate(1 / 800)) + 1, longest // 2))
    if rng.random() < 0.3:
        ids = (rng.choice(heads) + ids)[: longest // 2]
    kind: dict[str, Any] = {"temperature": rng.choice((0.0, 0.7, 1.0))}
    for share, more in (
        (0.2, {"top_p": 0.9}), (0.2, {"top_k": 40}), (0.1, {"n": 3}), (0.02, {"logprobs": 3}),
        (0.02, {"presence_penalty": 0.5}),
    ):  # fmt: skip
        if rng.random() < share:
            kind |= more
    return ids, SamplingParams(
        max_tokens=min(int(rng.expovariate(1 / 200)) + 1, longest // 2), ignore_eos=True, **kind
    )


def main() -> None:
    """Run and report."""
    shape, seconds, path = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    llm = gpu.build(parser.parse_args(["--shape", shape]))
    gpu.warm_up(llm)
    rng, live, done, aborted = random.Random(4), set(), 0, 0
    heads = [gpu.random_ids(rng, length) for length in (64, 500, 1500)]
    begin, tokens = time.perf_counter(), llm.stats.generated_tokens
    while time.perf_counter() - begin < seconds or live:
        while len(live) < LIVE and time.perf_counter() - begin < seconds:
            live.add(llm.open(*request(rng, heads, llm.engine.facts.max_model_len)))
        if live and rng.random() < 0.05:
            victim = rng.choice(sorted(live))
            live.discard(victim)
            llm.drop([victim])
            aborted += 1
        ended = [number for number in llm.turn() if number in live and llm.result(number).finished]
        live.difference_update(ended)
        done += len(ended)
        llm.drop(ended)
    while llm.engine.scheduler.has_work():
        llm.turn()
    took, pool = time.perf_counter() - begin, llm.engine.scheduler.state.pool
    report = {
        "seconds": took, "finished": done, "aborted": aborted, "preemptions": llm.stats.preemptions,
        "out_tokens_per_second": (llm.stats.generated_tokens - tokens) / took, "blocks": pool.usable,
        "blocks_free_at_end": int(pool.free), "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }  # fmt: skip
    print(shape, report)
    if report["blocks"] != report["blocks_free_at_end"]:
        sys.exit("blocks are lost")
    with open(path, "w") as file:
        json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
