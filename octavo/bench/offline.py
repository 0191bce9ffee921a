"""`octavo bench offline`: throughput of `LLM.generate` on fixed workloads, beside `transformers` in the same run.

One warm-up, then the repetitions, each with fresh prompts. Printed and written: median over the repetitions; the
ratio first. Times are of this machine at this moment: compare only what one run measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.bench.workloads import WORKLOADS, BenchRequest, build
from octavo.errors import ConfigError


@dataclass(slots=True)
class Row:
    """One engine on one workload: medians over the repetitions; rates in tokens a second."""

    engine: str
    workload: str
    repetitions: int
    seconds: float
    output_rate: float
    total_rate: float
    all_seconds: list[float]
    details: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--model", help="folder, .gguf file or hub id; the embedded model if left out")
    parser.add_argument("--workloads", default="B", help=f"comma-separated: {', '.join(WORKLOADS)} (default: B)")
    parser.add_argument("--repetitions", type=int, default=3, help="measured repetitions of each workload")
    parser.add_argument("--dtype", default="auto", help="weights and KV cache")
    parser.add_argument("--load-format", default="auto", help="auto, or dummy for random weights")
    parser.add_argument("--threads", type=int, help="cores that both engines may use; all if left out")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of one KV block")
    parser.add_argument("--max-num-seqs", type=int, help="most sequences at a time")
    parser.add_argument("--max-num-batched-tokens", type=int, help="most tokens of one step")
    parser.add_argument("--vs", choices=["transformers"], help="measure a rival on the same prompts")
    parser.add_argument("--vs-batch", type=int, default=8, help="size of the rival's static batches")
    parser.add_argument("--vs-repetitions", type=int, default=1, help="measured repetitions of the rival")
    parser.add_argument("--json", type=Path, help="write the results here")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.threads:
        _keep_to(args.threads)
    names = [name.strip() for name in args.workloads.split(",")]
    for name in names:
        build(name)  # refuse unknown names before loading
    rows: list[Row] = []
    for name in names:
        rows += _measure(args, name)
    _print(rows)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report(args, rows), indent=1) + "\n")
    return 0


def _keep_to(cores: int) -> None:
    """Let this process run on so many of its cores only; engines take as many threads as there are cores."""
    import os

    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= cores <= len(allowed):
        raise ConfigError(f"threads is {cores}.", f"Give 1 to {len(allowed)}.")
    os.sched_setaffinity(0, allowed[:cores])


def report(args: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    """Everything that a reader of the numbers must know."""
    import os
    import platform

    from octavo.machine import cpu_info

    cpu = cpu_info()
    return {
        "command": "octavo bench offline",
        "options": {name: str(value) for name, value in vars(args).items() if value is not None},
        "machine": {"cpu": cpu.model, "cores": cpu.physical, "python": platform.python_version()},
        "threads": len(os.sched_getaffinity(0)),
        "rows": [asdict(row) for row in rows],
    }


def _measure(args: argparse.Namespace, name: str) -> list[Row]:
    from octavo.engine.llm import LLM

    options = {
        "block_size": args.block_size,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }
    llm = LLM(
        args.model,
        dtype=args.dtype,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        **{key: value for key, value in options.items() if value is not None},
    )
    generate(llm, build(name, 1000))  # warm up, and take the memory that the workload needs
    rows, kept = [], []
    for repetition in range(args.repetitions):
        seconds, outputs, details = generate(llm, build(name, repetition))
        rows.append((seconds, details))
        kept.append(outputs)
    facts = llm.engine.facts
    own = _row("octavo", name, [build(name, i) for i in range(args.repetitions)], [s for s, _ in rows], rows[0][1])
    own.details |= {"dtype": facts.dtype, "block_size": facts.block_size, "max_num_seqs": facts.max_num_seqs}
    llm.engine.close()
    if args.vs is None:
        return [own]
    return [own, _rival(args, name, kept)]


def generate(llm: Any, requests: list[BenchRequest]) -> tuple[float, list[list[int]], dict[str, Any]]:
    """Seconds that `LLM.generate` takes for all requests at once, the output ids, and how full the cache was."""
    from octavo.scheduler.usage import UsageMeter
    from octavo.types import SamplingParams

    meter = UsageMeter()
    llm.engine.loop.observer = lambda scheduler: meter(scheduler.state)
    before = asdict(llm.stats)
    params = [SamplingParams(temperature=r.temperature, max_tokens=r.out, ignore_eos=True) for r in requests]
    begin = time.perf_counter()
    outputs = llm.generate([r.ids for r in requests], params)
    seconds = time.perf_counter() - begin
    llm.engine.loop.observer = None
    ids = [output.outputs[0].token_ids for output in outputs]
    if [len(out) for out in ids] != [r.out for r in requests]:
        raise ConfigError("The engine returned another number of tokens than asked for.", "Raise --max-model-len.")
    after = asdict(llm.stats)
    details = {
        "kv_waste": round(meter.waste_ratio, 4),
        "peak_blocks": meter.peak_blocks,
        "peak_sequences": meter.peak_sequences,
        **{key: after[key] - before[key] for key in ("steps", "preemptions", "prefix_hit_tokens")},
    }
    return seconds, ids, details


def _rival(args: argparse.Namespace, name: str, ours: list[list[list[int]]]) -> Row:
    from octavo.bench.peer import generate_static, load_transformers

    model = load_transformers(args.model, args.dtype, args.load_format)
    generate_static(model, build("A", 1000)[:1], 1)  # warm up
    seconds, same, asked = [], 0, 0
    for repetition in range(args.vs_repetitions):
        requests = build(name, repetition)
        took, outputs = generate_static(model, requests, args.vs_batch)
        seconds.append(took)
        if repetition < len(ours):
            same += sum(
                a == b for x, y in zip(outputs, ours[repetition], strict=True) for a, b in zip(x, y, strict=True)
            )
            asked += sum(r.out for r in requests)
    row = _row(
        f"transformers, static batches of {args.vs_batch}",
        name,
        [build(name, i) for i in range(len(seconds))],
        seconds,
        {},
    )
    row.details["equal_tokens"] = round(same / max(asked, 1), 4)
    return row


def _row(
    engine: str, name: str, runs: list[list[BenchRequest]], seconds: list[float], details: dict[str, Any]
) -> Row:
    outs = [sum(r.out for r in run) / s for run, s in zip(runs, seconds, strict=True)]
    totals = [sum(r.out + len(r.ids) for r in run) / s for run, s in zip(runs, seconds, strict=True)]
    median = statistics.median
    return Row(
        engine,
        name,
        len(seconds),
        round(median(seconds), 3),
        round(median(outs), 1),
        round(median(totals), 1),
        [round(s, 3) for s in seconds],
        dict(details),
    )


def _print(rows: list[Row]) -> None:
    rivals = {row.workload: row for row in rows if row.engine != "octavo"}
    print(f"{'workload':9} {'engine':34} {'ratio':>6} {'out tok/s':>10} {'all tok/s':>10} {'seconds':>8}  notes")
    for row in rows:
        rival = rivals.get(row.workload)
        ratio = f"{row.output_rate / rival.output_rate:.2f}x" if rival else "-"
        notes = ", ".join(f"{key} {value}" for key, value in row.details.items())
        print(
            f"{row.workload:9} {row.engine:34} {ratio:>6} {row.output_rate:10.1f} {row.total_rate:10.1f} "
            f"{row.seconds:8.2f}  {notes}"
        )
