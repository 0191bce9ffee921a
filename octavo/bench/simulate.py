"""`octavo bench simulate`: random load on the real scheduler and loop, every invariant checked after every step.

Each seed draws its own world and traffic (see `octavo.bench.sim.case`), runs for a number of steps, and drains. A
violation prints seed and step, is shrunk to fewer events, and its trace is written; `--replay FILE` runs a trace
again. Seeds are spread over `--jobs` processes.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import msgspec

from octavo.bench.sim.case import Event, SimConfig, Trace, Traffic, draw_config
from octavo.bench.sim.oracle import Violation
from octavo.bench.sim.world import World

STEPS_PER_SEED = 3000
SHRINK_RUNS = 300


@dataclass(slots=True)
class Tally:
    """What a number of seeds went through."""

    seeds: int = 0
    steps: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, world: World) -> None:
        """Take in a world that is over."""
        counts = asdict(world.scheduler.stats)
        del counts["peak_blocks"]
        counts |= {name: getattr(world, name) for name in ("aborts", "errors", "submitted", "refused")}
        self._count(counts | {"evictions": world.scheduler.state.pool.evictions})

    def merge(self, other: Tally) -> None:
        """Take in the tally of another process."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.failures += other.failures
        self._count(other.counts)

    def _count(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count


class Failure(Exception):
    """A violation with the run that led to it."""

    def __init__(self, trace: Trace, cause: Violation) -> None:
        self.trace = trace
        super().__init__(str(cause))


def run_seed(seed: int, steps: int, config: SimConfig | None = None) -> World:
    """Run one seed to its end. Raises Failure. `config` replaces the world that the seed would draw."""
    rng = Random(seed)
    drawn = draw_config(rng)
    config = config or drawn
    world, traffic = World(config), Traffic(config, rng)
    events: list[tuple[int, Event]] = []
    try:
        for _ in range(steps):
            now = traffic.events(world.live(), world.finished)
            events += [(world.now + 1, event) for event in now]
            world.step(now)
        world.drain()
    except Violation as violation:
        raise Failure(Trace(config, world.now, events, f"seed {seed}: {violation}"), violation) from violation
    return world


def replay(trace: Trace) -> Failure | None:
    """Run a trace to its end; what goes wrong, with the trace up to there."""
    world = World(trace.config)
    by_step: dict[int, list[Event]] = {}
    for step, event in trace.events:
        by_step.setdefault(step, []).append(event)
    try:
        for step in range(1, trace.steps + 1):
            world.step(by_step.get(step, []))
        world.drain()
    except Violation as violation:
        events = [(step, event) for step, event in trace.events if step <= world.now]
        return Failure(Trace(trace.config, world.now, events, trace.note), violation)
    return None


def shrink(trace: Trace, runs: int = SHRINK_RUNS) -> Trace:
    """A trace with fewer events that still ends in a violation: leave out halves, quarters ... single events."""
    best = trace
    size = max(1, len(best.events) // 2)
    while runs > 0:
        at, smaller = 0, False
        while at < len(best.events) and runs > 0:
            runs -= 1
            events = best.events[:at] + best.events[at + size :]
            failure = replay(msgspec.structs.replace(best, events=events))
            if failure is None:
                at += size
            else:
                best, smaller = msgspec.structs.replace(failure.trace, note=f"{trace.note}; shrunk: {failure}"), True
        if size == 1 and not smaller:
            break
        size = max(1, size // 2)
    return best


def simulate(seeds: Iterable[int], steps: int, traces: Path | None = None) -> Tally:
    """Run seeds one after the other; with `traces`, write the shrunk trace of each that fails."""
    tally, begin = Tally(), time.perf_counter()
    for seed in seeds:
        tally.seeds += 1
        try:
            world = run_seed(seed, steps)
        except Failure as failure:
            tally.failures.append(f"seed {seed}, step {failure.trace.steps}: {failure}")
            if traces is not None:
                traces.mkdir(parents=True, exist_ok=True)
                path = traces / f"seed-{seed}.json"
                path.write_bytes(msgspec.json.format(msgspec.json.encode(shrink(failure.trace)), indent=1))
        else:
            tally.steps += world.now
            tally.add(world)
    tally.seconds = time.perf_counter() - begin
    return tally


def spread(seeds: range, steps: int, jobs: int, traces: Path | None = None) -> Tally:
    """As `simulate`, over `jobs` processes."""
    command = [sys.executable, "-m", "octavo.bench.simulate", "--json", "--steps", str(steps), "--jobs", "1"]
    if traces is not None:
        command += ["--traces", str(traces)]
    begin, workers = time.perf_counter(), []
    for job in range(jobs):
        part = seeds[job::jobs]
        if part:
            words = [*command, "--seed", str(part.start), "--seeds", str(len(part)), "--stride", str(part.step)]
            workers.append(subprocess.Popen(words, stdout=subprocess.PIPE))
    tally = Tally()
    for worker in workers:
        out, _ = worker.communicate()
        tally.merge(msgspec.json.decode(out, type=Tally))
    tally.seconds = time.perf_counter() - begin
    return tally


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--steps", type=int, default=STEPS_PER_SEED, help="steps of each seed (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds (default %(default)s)")
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--traces", type=Path, help="folder for the shrunk traces of seeds that fail")
    parser.add_argument("--replay", type=Path, help="run this trace instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command; 1 when something was violated."""
    logging.getLogger("octavo.engine.loop").setLevel(logging.CRITICAL)  # injected faults are no news
    if args.replay is not None:
        return _replay_file(args.replay)
    seeds = range(args.seed, args.seed + args.seeds * args.stride, args.stride)
    if args.jobs > 1:
        tally = spread(seeds, args.steps, args.jobs, args.traces)
    else:
        tally = simulate(seeds, args.steps, args.traces)
    if args.json:
        print(msgspec.json.encode(tally).decode())
        return 0
    print(report(tally))
    return 1 if tally.failures else 0


def report(tally: Tally) -> str:
    """A few lines for people."""
    lines = [f"FAILED {failure}" for failure in tally.failures[:20]]
    rate = tally.steps / max(tally.seconds, 1e-9)
    lines.append(f"{tally.seeds} seeds, {tally.steps} steps in {tally.seconds:.1f} s ({rate:.0f} steps/s)")
    lines.append(", ".join(f"{name} {count}" for name, count in sorted(tally.counts.items())))
    lines.append(f"{len(tally.failures)} violations")
    return "\n".join(lines)


def _replay_file(path: Path) -> int:
    trace = msgspec.json.decode(path.read_bytes(), type=Trace)
    print(f"{path}: {len(trace.events)} events, {trace.steps} steps ({trace.note})")
    failure = replay(trace)
    print("clean" if failure is None else f"FAILED in step {failure.trace.steps}: {failure}")
    return 0 if failure is None else 1


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(_main())
