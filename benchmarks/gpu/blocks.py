"""Block sizes 16 to 128 at a context of 32,000 tokens: speed, empty slots, and how much of the prompts was cached.

    python benchmarks/gpu/blocks.py SHAPE OUT.json [sizes] [requests] [context] [output]

Sizes: comma-separated; what OUT.json has of others stays. The prompts share their first half. Rate: output tokens a
second with all sequences decoding, from a second call whose prompts are in the cache; the hit rate is that of the
first call.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from octavo.bench import gpu
from octavo.scheduler.usage import UsageMeter
from octavo.types import SamplingParams


def main() -> None:
    """Measure and print."""
    shape, path = sys.argv[1], Path(sys.argv[2])
    sizes = [int(size) for size in (sys.argv[3] if len(sys.argv) > 3 else "16,32,64,128").split(",")]
    count, context, output = (int(n) for n in (sys.argv[4:7] if len(sys.argv) > 6 else (8, 32_000, 128)))
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    out: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for size in sizes:
        arguments = ["--shape", shape, "--block-size", str(size), "--max-model-len", str(context + 2 * output)]
        llm = gpu.build(parser.parse_args([*arguments, "--max-num-seqs", str(max(count, 8))]))
        gpu.warm_up(llm)
        rng, meter = random.Random(size), UsageMeter()
        shared = gpu.random_ids(rng, context // 2)
        prompts = [shared + gpu.random_ids(rng, context - context // 2 - rng.randrange(size)) for _ in range(count)]
        llm.engine.loop.observer = lambda scheduler, meter=meter: meter(scheduler.state)
        seconds, outputs = timed(llm, prompts, output)
        hits = sum(o.num_cached_tokens or 0 for o in outputs) / sum(map(len, prompts))
        first, _ = timed(llm, prompts, 1)
        again, _ = timed(llm, prompts, output)
        rate = count * (output - 1) / (again - first)
        out[str(size)] = {"seconds": seconds, "rate": rate, "waste": meter.waste_ratio, "hit_rate": hits}
        print(
            f"{shape} blocks of {size}: {count} x {context} in, {output} out: {seconds:.2f} s, then {rate:.0f} out "
            f"tok/s; empty slots {100 * meter.waste_ratio:.3f} %, cached {100 * hits:.1f} % of the prompts"
        )
        path.write_text(json.dumps(out, indent=1) + "\n")
        llm.engine.close()
        del llm


def timed(llm: Any, prompts: list[list[int]], output: int) -> tuple[float, Any]:
    """Seconds and results of one call."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin, outputs


if __name__ == "__main__":
    main()
