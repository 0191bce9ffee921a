"""`octavo bench gpu`: the GPU workloads W1-W5 on real model shapes with dummy weights, through `LLM.generate`.

    W1  256 requests, prompt and output uniform in 100..1024, temperature 0.6; every repetition draws anew
    W2  a fixed batch of prompts of 1,024 tokens, generated with 1 output token, then again with 129: milliseconds
        of the second call over 129, so prompt tail, scheduling and host time are in it
    W3  32 prompts of 4,032 tokens, 1 output token: prompt tokens a second
    W4  256 requests with 3,072 shared and 64 own tokens, 128 output tokens
    W5  2,048 requests of 32 prompt and 32 output tokens
    W6  2 requests of 100,000 prompt and 256 output tokens (needs --max-model-len 131072, and a model made for it)
Token ids are uniform in 10..29,999, nothing is detokenised, end-of-sequence is ignored. `RIVALS` holds the better of
vLLM 0.25.1 and SGLang 0.5.16 in each row, measured on the same kind of machine (one NVIDIA H200, torch 2.11).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo.bench.shapes import SHAPES, write_shape

Request = tuple[list[int], int, float]
RIVALS = {
    "qwen3-0.6b": {
        "W1": 23_480, "W2-1": 1.73, "W2-8": 1.85, "W2-32": 2.77, "W2-128": 6.37, "W2-256": 11.39, "W3": 338_100,
        "W4": 2.31, "W5": 40_141, "start": 112,
    },
    "llama3.1-8b": {
        "W1": 10_002, "W2-1": 4.94, "W2-8": 5.26, "W2-32": 6.31, "W2-128": 11.08, "W2-256": 18.41, "W3": 41_070,
        "W4": 3.87, "W5": 18_431, "start": 55,
    },
}  # fmt: skip
UNITS = {"W1": "out tok/s", "W2": "ms a step", "W3": "in tok/s", "W4": "s", "W5": "out tok/s", "W6": "s"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--shape", default="qwen3-0.6b", help=f"model shape: {', '.join(SHAPES)}")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5", help="comma-separated")
    parser.add_argument("--batches", default="1,8,32,128,256", help="batch sizes of W2, comma-separated")
    parser.add_argument("--repetitions", type=int, default=2, help="measured repetitions of W1, W3, W4 and W5")
    parser.add_argument("--max-model-len", type=int, default=8192, help="context limit")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of one KV block")
    parser.add_argument("--max-num-seqs", type=int, help="most sequences at a time")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=16384, help="most tokens of one step (default: vLLM's, 16384)"
    )
    parser.add_argument("--enforce-eager", action="store_true", help="no captured graphs")
    parser.add_argument("--dtype", default="auto", help="weights and KV cache")
    parser.add_argument("--quantization", help="weights of the layers: fp8, int8 or int4; plain if left out")
    parser.add_argument("--kv-cache-dtype", help="fp8, or as the weights")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--trace", type=Path, help="write a trace of 32 requests here, for chrome://tracing")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    llm = build(args)
    rows: dict[str, Any] = {}
    started, timeline = first_token(llm), llm.engine.loop.runner.timeline
    warm_up(llm)
    if args.trace:
        trace(llm, args.trace)
    names = [name.strip() for name in args.workloads.split(",")]
    for name in names:
        if name == "W2":
            for batch in (int(batch) for batch in args.batches.split(",")):
                rows[f"W2-{batch}"] = [_w2(llm, batch)]
        else:
            rows[name] = [_measure(llm, name, repetition) for repetition in range(args.repetitions)]
    _print(args.shape, rows)
    print(f"first token {started:.2f} s after the process began: {timeline}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report(args, llm, rows) | {"first_token": started}, indent=1) + "\n")
    return 0


def build(args: argparse.Namespace) -> Any:
    """The engine with dummy weights."""
    from octavo.engine.llm import LLM

    names = (
        "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "dtype",
        "quantization", "kv_cache_dtype",
    )  # fmt: skip
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    with tempfile.TemporaryDirectory() as root:
        folder = str(write_shape(args.shape, Path(root)))
        return LLM(folder, load_format="dummy", skip_tokenizer_init=True, device="cuda", **options)


def report(args: argparse.Namespace, llm: Any, rows: dict[str, Any]) -> dict[str, Any]:
    """Everything that a reader of the numbers must know."""
    from dataclasses import asdict
    from importlib.metadata import version

    import torch

    return {
        "command": "octavo bench gpu",
        "options": {name: str(value) for name, value in vars(args).items() if value is not None},
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": version("triton"), "cuda": torch.version.cuda},
        "facts": asdict(llm.engine.facts),
        "start": llm.engine.loop.runner.timeline,
        "units": UNITS,
        "rows": rows,
        "rivals": RIVALS.get(args.shape, {}),
    }


def first_token(llm: Any) -> float:
    """Seconds from the start of this process to the first token of its first request."""
    from octavo.runner.startup import process_age

    generate(llm, [(random_ids(random.Random(98), 100), 1, 0.0)])
    return process_age()


def warm_up(llm: Any) -> None:
    """Compile and capture what a first request would otherwise wait for."""
    rng = random.Random(99)
    for temperature in (0.0, 0.6):
        generate(llm, [(random_ids(rng, 100), 8, temperature) for _ in range(16)])


def trace(llm: Any, path: Path) -> None:
    """Host and device activity of 32 requests, in the format of Chrome's tracer."""
    from torch.profiler import ProfilerActivity, profile

    rng = random.Random(7)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        generate(llm, [(random_ids(rng, 256), 16, 0.6) for _ in range(32)])
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def generate(llm: Any, requests: list[Request]) -> float:
    """Seconds that `LLM.generate` takes for all requests at once."""
    from octavo.types import SamplingParams

    params = [SamplingParams(temperature=t, max_tokens=out, ignore_eos=True) for _, out, t in requests]
    begin = time.perf_counter()
    outputs = llm.generate([ids for ids, _, _ in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    for output, (_, out, _) in zip(outputs, requests, strict=True):
        if len(output.outputs[0].token_ids) != out:
            raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens where {out} were asked for")
    return seconds


def w1(repetition: int) -> list[Request]:
    """W1 of one repetition: the draws of all repetitions before it are passed over."""
    rng = random.Random(0)
    requests: list[Request] = []
    for _ in range(repetition + 1):
        prompts = [random_ids(rng, rng.randint(100, 1024)) for _ in range(256)]
        outputs = [rng.randint(100, 1024) for _ in range(256)]
        requests = [(ids, out, 0.6) for ids, out in zip(prompts, outputs, strict=True)]
    return requests


def requests_of(name: str, repetition: int) -> list[Request]:
    """The requests of a workload that is not W2."""
    if name == "W1":
        return w1(repetition)
    rng = random.Random(int(name[1:]) + 100 * repetition)
    if name == "W3":
        return [(random_ids(rng, 4032), 1, 0.0) for _ in range(32)]
    if name == "W4":
        shared = random_ids(rng, 3072)
        return [(shared + random_ids(rng, 64), 128, 0.0) for _ in range(256)]
    if name == "W6":
        return [(random_ids(rng, 100_000), 256, 0.0) for _ in range(2)]
    return [(random_ids(rng, 32), 32, 0.0) for _ in range(2048)]


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Token ids uniform in 10..29,999."""
    return [rng.randrange(10, 30000) for _ in range(count)]


def _measure(llm: Any, name: str, repetition: int) -> float:
    requests = requests_of(name, repetition)
    seconds = generate(llm, requests)
    if name == "W3":
        return sum(len(ids) for ids, _, _ in requests) / seconds
    return seconds if name in ("W4", "W6") else sum(out for _, out, _ in requests) / seconds


def _w2(llm: Any, batch: int) -> float:
    rng = random.Random(1000 + batch)
    prompts = [random_ids(rng, 1024) for _ in range(batch)]
    generate(llm, [(ids, 1, 0.0) for ids in prompts])
    return 1000 * generate(llm, [(ids, 129, 0.0) for ids in prompts]) / 129


def _print(shape: str, rows: dict[str, list[float]]) -> None:
    """Mean, repetitions, and the ratio to the rival, above 1 where Octavo is faster."""
    print(f"{shape}, rival: the better of vLLM 0.25.1 and SGLang 0.5.16")
    for name, values in rows.items():
        mean = sum(values) / len(values)
        unit = UNITS[name[:2]]
        rival = RIVALS.get(shape, {}).get(name)
        ratio = "-" if rival is None else f"{rival / mean if unit in ('s', 'ms a step') else mean / rival:.2f}x"
        print(f"{name:7} {mean:12.2f} {unit:10} rival {rival or '-':>8} {ratio:>6}  {[round(v, 2) for v in values]}")
