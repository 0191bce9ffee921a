"""The table of the guides, Octavo beside `transformers`, in one run: Llama-2-13B's shape in float16, random weights.

    python benchmarks/gpu/guide.py OUT.json

Sequences of 2,048 tokens: 1,792 in, 256 out. KV utilisation: slots with a token over slots set aside. Concurrency:
sequences that run at a time. TTFT: to the first token of all sequences that come at once. `transformers` pads a fixed
batch, sets the whole length aside for each, and makes a quarter of the output, which is enough to know its rate.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from octavo.bench import gpu
from octavo.bench.shapes import write_shape
from octavo.scheduler.usage import UsageMeter

SHAPE, PROMPT, OUTPUT, REQUESTS, RIVAL_BATCH = "llama2-13b", 1792, 256, 64, 8


def lengths(count: int) -> list[tuple[int, int]]:
    """Prompt and output of each request: half of them are long, half are of any length up to that."""
    rng = random.Random(2)
    return [(PROMPT, OUTPUT) if i % 2 else (rng.randint(64, PROMPT), rng.randint(16, OUTPUT)) for i in range(count)]


def octavo() -> dict[str, Any]:
    """All requests at once."""
    from octavo.types import SamplingParams

    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    llm = gpu.build(parser.parse_args(["--shape", SHAPE, "--max-model-len", "2048"]))
    gpu.warm_up(llm)
    rng, meter = random.Random(3), UsageMeter()
    llm.engine.loop.observer = lambda scheduler: meter(scheduler.state)
    begin, first, tokens = time.perf_counter(), {}, 0
    live = set()
    for prompt, output in lengths(REQUESTS):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        live.add(llm.open(gpu.random_ids(rng, prompt), params))
        tokens += output
    while live:
        for number in llm.turn() & live:
            first.setdefault(number, time.perf_counter() - begin)
            if llm.result(number).finished:
                live.discard(number)
    seconds = time.perf_counter() - begin
    row = {
        "kv_utilisation": 1 / (1 + meter.waste_ratio), "concurrency": meter.peak_sequences,
        "room_for": (llm.engine.facts.blocks - 1) * llm.engine.facts.block_size // 2048,
        "ttft_mean": sum(first.values()) / len(first), "out_tok_s": tokens / seconds,
    }  # fmt: skip
    llm.engine.close()
    return row


def transformers() -> dict[str, Any]:
    """Static batches of the same requests, longest first within a batch not sorted: as they come."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as root:
        config = AutoConfig.from_pretrained(write_shape(SHAPE, Path(root)))
    with torch.device("cuda"):
        torch.set_default_dtype(torch.float16)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
        torch.set_default_dtype(torch.float32)
    requests, rng = lengths(RIVAL_BATCH), random.Random(3)
    longest, steps = max(p for p, _ in requests), OUTPUT // 4
    ids = torch.zeros((RIVAL_BATCH, longest), dtype=torch.int64)
    for row, (prompt, _) in enumerate(requests):
        ids[row, longest - prompt :] = torch.tensor(gpu.random_ids(rng, prompt))
    mask = (ids > 0).long().cuda()
    ids = ids.cuda()

    def generate(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    generate(2)
    ttft = generate(1)
    a_step = (generate(steps) - ttft) / (steps - 1)
    useful, seconds = sum(out for _, out in requests), ttft + (max(out for _, out in requests) - 1) * a_step
    filled = sum(prompt + out for prompt, out in requests) / (RIVAL_BATCH * (longest + OUTPUT))
    return {
        "kv_utilisation": filled, "concurrency": RIVAL_BATCH, "ttft_mean": ttft, "out_tok_s": useful / seconds,
        "ms_a_step": 1e3 * a_step,
    }  # fmt: skip


if __name__ == "__main__":
    rows = {}
    for run in (octavo, transformers):
        rows[run.__name__] = row = run()
        print(run.__name__, {key: round(value, 3) for key, value in row.items()}, flush=True)
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
