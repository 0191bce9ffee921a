"""`octavo bench latency`: how long one batch takes, prompt by prompt of fixed length, outputs of fixed length.

Every iteration has fresh random prompts, so that nothing is found in the prefix cache. Measured through the engine's
loop: the time to the first token of every sequence, the times between steps after that, and the whole. Times are of
this machine at this moment.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of one iteration: until every sequence has a token, of each step after that, in all."""

    first: float
    steps: list[float]
    total: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--model", help="folder, .gguf file or hub id; the embedded model if left out")
    parser.add_argument("--input-len", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each output")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of the batch")
    parser.add_argument("--num-iters-warmup", type=int, default=2, help="iterations before measuring")
    parser.add_argument("--num-iters", type=int, default=5, help="measured iterations")
    parser.add_argument("--dtype", default="auto", help="weights and KV cache")
    parser.add_argument("--load-format", default="auto", help="auto, or dummy for random weights")
    parser.add_argument("--device", default="auto", help="cpu, cuda, torch-cpu, or auto")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write the results here")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if min(args.input_len, args.output_len, args.batch_size, args.num_iters) < 1 or args.num_iters_warmup < 0:
        raise ConfigError("Lengths, batch size and iterations must be at least 1.", "Check the options.")
    from octavo.engine.llm import LLM

    llm = LLM(
        args.model,
        dtype=args.dtype,
        load_format=args.load_format,
        device=args.device,
        max_model_len=args.input_len + args.output_len,
        max_num_seqs=args.batch_size,
        skip_tokenizer_init=True,
    )
    rng = random.Random(args.seed)
    found = [
        measure(llm, rng, args.batch_size, args.input_len, args.output_len)
        for _ in range(args.num_iters_warmup + args.num_iters)
    ][args.num_iters_warmup :]
    report = summary(found, args.batch_size, args.output_len) | {"model": llm.name, "facts": llm.engine.facts.line()}
    _print(report, args)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        iterations = [asdict(one) for one in found]
        args.json.write_text(json.dumps(report | {"iterations": iterations}, indent=1) + "\n")
    return 0


def measure(llm: LLM, rng: random.Random, batch: int, prompt: int, output: int) -> Latency:
    """One batch of random prompts from start to end."""
    from octavo.engine.client import build_request
    from octavo.types import SamplingParams

    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True)
    ids = [[rng.randrange(engine.limits.vocab_size) for _ in range(prompt)] for _ in range(batch)]
    begin = time.perf_counter()
    for number, each in enumerate(ids):
        engine.scheduler.submit(build_request(number, each, params, engine.limits))
    waiting, first, steps, last = set(range(batch)), 0.0, [], begin
    while engine.scheduler.has_work():
        batches = engine.loop.step()
        now = time.perf_counter()
        for tokens in batches:
            waiting.difference_update(tokens.request_id.tolist())
        if first:
            steps.append(now - last)
        elif not waiting:
            first = now - begin
        last = now
    return Latency(first, steps, last - begin)


def summary(found: Sequence[Latency], batch: int, output: int) -> dict[str, object]:
    """Mean and percentiles over the iterations; `step` over all their steps; output tokens a second of the batch."""
    totals = [one.total for one in found]
    return {
        "total": _spread(totals),
        "first": _spread([one.first for one in found]),
        "step": _spread([step for one in found for step in one.steps] or [0.0]),
        "output_rate": batch * output / statistics.median(totals),
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(percent: int) -> float:
        return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]

    return {"mean": statistics.fmean(values), "p50": at(50), "p90": at(90), "p99": at(99)}


def _print(report: dict[str, object], args: argparse.Namespace) -> None:
    print(f"{report['model']}: {args.batch_size} x ({args.input_len} in, {args.output_len} out)")
    for name, title in (("total", "whole batch"), ("first", "first tokens"), ("step", "a step")):
        spread = report[name]
        if isinstance(spread, dict):
            print(f"  {title:12}" + "".join(f"  {key} {1000 * value:9.2f} ms" for key, value in spread.items()))
    print(f"  output      {report['output_rate']:10.1f} tokens/s")
