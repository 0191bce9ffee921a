"""Where the time of one decode step goes: wall, host and each kernel, for a shape and some batch sizes.

    python benchmarks/gpu/steps.py SHAPE BATCHES OUT.json [context] [--host] [--late] [--library]
    python benchmarks/gpu/steps.py SHAPE W1 OUT.json [repetition]

Wall: mean of 100 engine steps with all rows decoding. Host: CPU time of plan, launch and commit in them, without
waiting. Kernels: device time a step from torch's profiler over 5 steps, summed by kernel name. `--late`: no kernel is
launched early. `--library`: the vendor's products only. `--host`: Python's profiler over 50 steps, too.
In place of batch sizes, a workload of `octavo bench gpu` other than W2: device time of all its steps and the gaps
before them, summed by kind (all rows decode; some do; none does) and number of rows, by events around each launch.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import sys
import time
from collections import defaultdict
from typing import Any

import torch

from octavo.bench import gpu
from octavo.kernels.gpu import linear
from octavo.kernels.gpu.launch import ALLOWED
from octavo.scheduler.plan import PlanView

ROWS = (0, 1, 8, 16, 32, 64, 128, 192, 256, 1 << 30)  # upper ends of the classes of rows


def settle(llm: Any, batch: int, context: int) -> list[int]:
    """Rows with `context` tokens, all of them decoding; their request numbers."""
    import random

    from octavo.types import SamplingParams

    rng = random.Random(batch)
    numbers = []
    for _ in range(batch):
        params = SamplingParams(temperature=0.6, max_tokens=400, ignore_eos=True)
        numbers.append(llm.open([rng.randrange(10, 30000) for _ in range(context)], params))
    for _ in range(2000):
        llm.turn()
        slots = llm.engine.scheduler.state.slots
        if int((slots.state == 3).sum()) == batch:
            break
    for _ in range(5):
        llm.turn()
    return numbers


def host_times(llm: Any, steps: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a step: wall, and host time by part."""
    loop, times = llm.engine.loop, defaultdict(float)
    runner, scheduler = loop.runner, loop.scheduler
    owners = {"launch": runner, "plan": scheduler, "commit": scheduler, "_send": runner, "run": runner.graphs}
    owners["_take_in"] = llm
    originals = {name: getattr(owner, name) for name, owner in owners.items()}

    def wrap(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args)
            times[name] += time.perf_counter() - begin
            return result

        return call

    for name, owner in owners.items():
        setattr(owner, name, wrap(name, originals[name]))
    torch.cuda.synchronize()
    begin, cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        llm.turn()
    torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - begin, time.thread_time() - cpu
    for name, owner in owners.items():
        setattr(owner, name, originals[name])
    return 1000 * wall / steps, {"cpu": 1000 * cpu / steps} | {n: 1000 * t / steps for n, t in times.items()}


def profile_host(llm: Any, steps: int) -> str:
    """Python's profiler over some steps: the functions that take most time themselves."""
    profile, text = cProfile.Profile(), io.StringIO()
    profile.enable()
    for _ in range(steps):
        llm.turn()
    profile.disable()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(14)
    return "\n".join(line[:110] for line in text.getvalue().splitlines()[7:] if line.strip())


def kernels(llm: Any, steps: int) -> list[tuple[str, int, float]]:
    """(name, launches, microseconds) of each kernel, a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            llm.turn()
        torch.cuda.synchronize()
    rows = [(e.key[:70], e.count / steps, e.self_device_time_total / steps) for e in profile.key_averages()]
    return sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])


def floor(llm: Any) -> float:
    """Milliseconds that reading all weights and all keys and values once takes at 4.3 TB/s."""
    facts, slots = llm.engine.facts, llm.engine.scheduler.state.slots
    keys = int(slots.known[slots.state == 3].sum()) * facts.kv_bytes_per_block / facts.block_size
    return 1e3 * (llm.engine.loop.runner.memory["weights"] + keys) / 4.3e12


def by_kind(llm: Any, name: str, repetition: int) -> dict[str, Any]:
    """A workload's seconds, and (steps, tokens, device ms, ms of gaps before them, steps without a graph) by kind."""
    runner, found = llm.engine.loop.runner, []
    launch, exact = runner.launch, runner._run_exact

    def launched(words: Any) -> Any:
        view, events = PlanView(words), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        kind = "decode" if view.decode_rows == view.rows else "mixed" if view.decode_rows else "prefill"
        rows = next(i for i, most in enumerate(ROWS) if view.rows <= most)
        found.append([f"{kind} of {ROWS[rows - 1] + 1}..{ROWS[rows]} rows", view.total_tokens, *events, 0])
        events[0].record()
        ticket = launch(words)
        events[1].record()
        return ticket

    def run_exact(*args: Any) -> Any:
        found[-1][4] = 1
        return exact(*args)

    runner.launch, runner._run_exact = launched, run_exact
    seconds = gpu.generate(llm, gpu.requests_of(name, repetition))
    torch.cuda.synchronize()
    runner.launch, runner._run_exact = launch, exact
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0, 0])
    for i, (kind, tokens, begin, end, one_by_one) in enumerate(found):
        gap = found[i - 1][3].elapsed_time(begin) if i else 0.0
        for at, value in enumerate((1, tokens, begin.elapsed_time(end), gap, one_by_one)):
            kinds[kind][at] += value
    print(f"{name}: {seconds:.3f} s, {sum(k[2] for k in kinds.values()) / 1e3:.3f} s of it on the device")
    for kind, (steps, tokens, device, gaps, exact_steps) in sorted(kinds.items()):
        print(
            f"  {kind:30} {steps:5.0f} steps ({exact_steps} without graph) {tokens:8.0f} tokens {device:9.1f} ms"
            f" ({device / steps:8.3f} a step), gaps {gaps:7.1f} ms ({1e3 * gaps / steps:6.1f} us)"
        )
    return {"seconds": seconds, "kinds": kinds}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    ALLOWED[0] = "--late" not in sys.argv
    if "--library" in sys.argv:
        linear.FEW_TOKENS = 0
    llm = gpu.build(parser.parse_args(["--shape", sys.argv[1]]))
    gpu.warm_up(llm)
    print(llm.engine.loop.runner.timeline)
    out: dict[str, Any] = {}
    workload = sys.argv[2].startswith("W")
    if workload:
        out = by_kind(llm, sys.argv[2], int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    for batch in () if workload else [int(size) for size in sys.argv[2].split(",")]:
        numbers = settle(llm, batch, int(sys.argv[4]) if len(sys.argv) > 4 and sys.argv[4].isdigit() else 1024)
        wall, host = host_times(llm, 100)
        limit = floor(llm)
        table = kernels(llm, 5)
        device = sum(row[2] for row in table) / 1000
        print(
            f"batch {batch}: wall {wall:.3f} ms ({100 * limit / wall:.0f} % of limit), device {device:.3f} ms, host",
            {k: round(v, 3) for k, v in host.items()},
        )
        if "--host" in sys.argv:
            print(profile_host(llm, 50))
        for name, count, micros in table[:16]:
            print(f"    {micros:9.1f} us {count:6.1f} x {name}")
        out[str(batch)] = {"wall_ms": wall, "limit_ms": limit, "device_ms": device, "host_ms": host, "kernels": table}
        for number in numbers:
            llm.drop([number])
        while llm.engine.scheduler.has_work():
            llm.turn()
    with open(sys.argv[3], "w") as file:
        json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
