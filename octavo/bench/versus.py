"""`octavo bench versus`: the CPU workloads A-E on several engines in one run, and how they compare.

A target is `octavo` or `transformers` (in this process: throughput only), or `NAME=URL`, any server with OpenAI's
completions. Engines take turns within each repetition and get the same prompts; every repetition has fresh ones, so
that no prefix cache helps across repetitions. Prompts are pieces of Python's own help texts as token ids: what random
ids make a model say is often no valid text, and servers hold that back. Servers that wait share the machine with the
one that is measured, so they should be idle ones; each run waits a moment until nothing else computes.

`--start NAME=COMMAND` starts a server, or any command that prints what it generates, and measures E: from process
start to the first token, and the peak memory of its processes. A server that was started serves the other workloads
too and is ended at the end.

Figures are medians over the repetitions. Ratios are to the first target: above 1 it is better.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.coldstart import Started, start
from octavo.bench.online import Sample, load, percentile
from octavo.bench.workloads import BenchRequest, build
from octavo.errors import ConfigError

Runner = Callable[[list[BenchRequest]], dict[str, float]]

IN_PROCESS = ("octavo", "transformers")
SETTLE, QUIET = 5.0, 0.15  # seconds at most, cores that may be busy
CONCURRENCY = 32  # clients of a workload whose requests all come at once
# Figure -> unit, and whether more is better.
FIGURES = {
    "output_rate": ("out tok/s", True),
    "decode_rate": ("decode tok/s a request", True),
    "seconds": ("s", False),
    "ttft_p50": ("ms to first token, p50", False),
    "ttft_p99": ("ms to first token, p99", False),
    "itl_p50": ("ms between tokens, p50", False),
    "itl_p99": ("ms between tokens, p99", False),
    "start": ("s from start to first token", False),
    "memory": ("MB at most", False),
}
# What tells engines apart in each workload.
SHOWN = {
    "A": ("decode_rate", "ttft_p50", "output_rate"),
    "B": ("output_rate", "seconds"),
    "C": ("seconds", "output_rate"),
    "D": ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"),
    "E": ("start", "memory"),
}


@dataclass(slots=True)
class Result:
    """One engine on one workload: the figures of each repetition."""

    target: str
    workload: str
    runs: list[dict[str, float]]

    def median(self, figure: str) -> float | None:
        """The median of a figure; None when it was not measured."""
        values = [run[figure] for run in self.runs if figure in run]
        return statistics.median(values) if values else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="octavo, transformers, or NAME=URL")
    parser.add_argument("--start", action="append", default=[], metavar="NAME=COMMAND", help="start and measure E")
    parser.add_argument("--workloads", default="A,B,C", help="comma-separated, of A-D (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each workload (default: %(default)s)")
    parser.add_argument("--model", help="of targets in this process; the embedded model if left out")
    parser.add_argument("--dtype", default="auto", help="of targets in this process: weights and KV cache")
    parser.add_argument("--api-key", help="of the servers, if they need one")
    parser.add_argument("--json", type=Path, help="write the results here")


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 when a request of a server did not come to its end."""
    names = [name.strip() for name in args.workloads.split(",") if name.strip()]
    if set(names) - set("ABCD") or args.repetitions < 1:
        raise ConfigError(
            f"workloads are {args.workloads!r}.", "Give some of A, B, C, D, and repetitions of at least 1."
        )
    targets = dict(_target(text) for text in args.targets)
    commands = dict(_named(text, "--start") for text in args.start)
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(start(command, targets.get(name, ""))) for name, command in commands.items()
        }
        runners = {name: _runner(name, url, args) for name, url in targets.items()}
        results = measure(runners, names, args.repetitions, help_text(args.model))
        results += [Result(name, "E", [_start_figures(found)]) for name, found in started.items()]
    first = next(iter(targets))
    print(table(results, first))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report(args, results, first), indent=1) + "\n")
    return 0


def measure(runners: dict[str, Runner], workloads: Sequence[str], repetitions: int, text: list[int]) -> list[Result]:
    """Every target on every workload, taking turns; one short warm-up each. `text`: ids to cut prompts from."""
    for runner in runners.values():
        runner(requests_of("A", 1000, text))
    results: list[Result] = []
    for workload in workloads:
        rows = {name: Result(name, workload, []) for name in runners}
        for repetition in range(repetitions):
            for name, runner in runners.items():
                busy = settle()
                rows[name].runs.append(runner(requests_of(workload, repetition, text)) | {"busy_before": busy})
        results += rows.values()
    return results


def settle(limit: float = SETTLE) -> float:
    """Wait, at most `limit` seconds, until nothing computes; returns how many cores are busy after that.

    The threads of some engines go on spinning for a while after their last request.
    """
    until = time.perf_counter() + limit
    while True:
        before, begin = _idle_seconds(), time.perf_counter()
        time.sleep(0.2)
        took = time.perf_counter() - begin
        busy = max(0.0, (os.cpu_count() or 1) - (_idle_seconds() - before) / took)
        if busy < QUIET or time.perf_counter() > until:
            return round(busy, 2)


def _idle_seconds() -> float:
    """Seconds that the machine's cores have been idle or waited for disks."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(words[4]) + int(words[5])) / os.sysconf("SC_CLK_TCK")


def requests_of(workload: str, repetition: int, text: list[int]) -> list[BenchRequest]:
    """The requests of a workload with pieces of `text` for prompts; what they share they go on sharing."""
    requests = build(workload, repetition)
    at = random.Random(f"{workload}-{repetition}").randrange(len(text))

    def take(count: int) -> list[int]:
        nonlocal at
        at += count
        return [text[i % len(text)] for i in range(at - count, at)]

    head = take(len(os.path.commonprefix([request.ids for request in requests])) if len(requests) > 1 else 0)
    return [replace(request, ids=head + take(len(request.ids) - len(head))) for request in requests]


def help_text(model: str | None) -> list[int]:
    """Python's help topics as ids of the model's tokenizer."""
    from pydoc_data.topics import topics

    from octavo.config import engine_config
    from octavo.engine.build import open_model, tokenizer_of

    tokenizer = tokenizer_of(open_model(engine_config(model=model)[0]))
    return tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))


def online_figures(samples: list[Sample], seconds: float) -> dict[str, float]:
    """The figures of a run on a server. ConfigError when a request did not come to its end."""
    bad = [sample for sample in samples if not sample.whole]
    if bad:
        raise ConfigError(
            f"{len(bad)} of {len(samples)} requests were not answered (status {bad[0].status}).",
            "Look into the server's log; it must take prompts of token ids at /v1/completions.",
        )
    gaps = [gap for sample in samples for gap in sample.gaps]
    rates = [(sample.tokens - 1) / sum(sample.gaps) for sample in samples if sum(sample.gaps) > 0]
    found = {"seconds": seconds, "output_rate": sum(sample.tokens for sample in samples) / seconds}
    if rates:
        found["decode_rate"] = statistics.fmean(rates)
    for share in (50, 99):
        found[f"ttft_p{share}"] = 1000 * percentile([sample.ttft for sample in samples], share)
        found[f"itl_p{share}"] = 1000 * percentile(gaps, share)
    return found


def table(results: list[Result], first: str) -> str:
    """A line for each workload, figure and engine, with the ratio to the first target."""
    lines = [f"{'':2}{'figure':31}{'engine':24}{'median':>10}{'ratio':>8}"]
    for workload in dict.fromkeys(result.workload for result in results):
        rows = [result for result in results if result.workload == workload]
        for figure in SHOWN[workload]:
            unit, more = FIGURES[figure]
            base = next((row.median(figure) for row in rows if row.target == first), None)
            for row in rows:
                value = row.median(figure)
                if value is None:
                    continue
                ratio = f"{(base / value if more else value / base):.2f}x" if base and value else "-"
                lines.append(f"{workload:2}{unit:31}{row.target:24}{value:10.2f}{ratio:>8}")
    return "\n".join(lines)


def report(args: argparse.Namespace, results: list[Result], first: str) -> dict[str, Any]:
    """Everything that a reader of the numbers must know."""
    import platform

    from octavo.machine import cpu_info

    cpu = cpu_info()
    return {
        "command": "octavo bench versus",
        "options": {
            name: str(value) for name, value in vars(args).items() if value is not None and name != "api_key"
        },
        "machine": {"cpu": cpu.model, "cores": cpu.physical, "python": platform.python_version()},
        "first": first,
        "results": [asdict(result) for result in results],
    }


def _target(text: str) -> tuple[str, str]:
    if text in IN_PROCESS:
        return text, ""
    name, url = _named(text, "a target")
    if urlsplit(url).scheme != "http" or urlsplit(url).hostname is None:
        raise ConfigError(f"The target {name} has the address {url!r}.", "Give NAME=http://host:port.")
    return name, url


def _named(text: str, what: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise ConfigError(
            f"{text!r} is not {what}.", f"Give NAME=..., or one of {', '.join(IN_PROCESS)} as a target."
        )
    return name, value


def _runner(name: str, url: str, args: argparse.Namespace) -> Runner:
    if url:
        return lambda requests: _on_server(url, args.api_key, requests)
    if name == "octavo":
        from octavo.bench.offline import generate
        from octavo.engine.llm import LLM

        llm = LLM(args.model, dtype=args.dtype, skip_tokenizer_init=True)
        return _offline(lambda requests: generate(llm, requests)[0])
    from octavo.bench.peer import generate_static, load_transformers

    model = load_transformers(args.model, args.dtype, "auto")
    return _offline(lambda requests: generate_static(model, requests, 8)[0])


def _offline(seconds_of: Callable[[list[BenchRequest]], float]) -> Runner:
    def once(requests: list[BenchRequest]) -> dict[str, float]:
        if any(request.at for request in requests):
            raise ConfigError(
                "Requests of workload D arrive one by one, at a server.", "Give NAME=URL targets for it."
            )
        seconds = seconds_of(requests)
        return {"seconds": seconds, "output_rate": sum(request.out for request in requests) / seconds}

    return once


def _on_server(url: str, key: str | None, requests: list[BenchRequest]) -> dict[str, float]:
    arriving = any(request.at for request in requests)
    begin = time.perf_counter()
    samples = asyncio.run(load(url, key, requests, [r.at for r in requests], None if arriving else CONCURRENCY))
    return online_figures(samples, time.perf_counter() - begin)


def _start_figures(found: Started) -> dict[str, float]:
    return {"start": found.seconds, "memory": found.peak_bytes() / 1e6}
