"""Captured graphs against --enforce-eager: time between tokens (p50, p99) of whole batches, and both start times.

python benchmarks/gpu/graphs.py SHAPE OUT.json [batches] [prompt] [output]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any

from octavo.bench import gpu
from octavo.bench.latency import measure, summary


def main() -> None:
    """Measure and print."""
    shape, path = sys.argv[1:3]
    batches = [int(size) for size in (sys.argv[3] if len(sys.argv) > 3 else "1,8,64").split(",")]
    prompt, output = (int(sys.argv[4]), int(sys.argv[5])) if len(sys.argv) > 5 else (512, 128)
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    out: dict[str, Any] = {}
    for name, flags in (("graphs", []), ("eager", ["--enforce-eager"])):
        llm = gpu.build(parser.parse_args(["--shape", shape, *flags]))
        start = llm.engine.loop.runner.timeline
        gpu.warm_up(llm)
        rows = {}
        for batch in batches:
            runs = [measure(llm, random.Random(seed), batch, prompt, output) for seed in (1, 2)]
            rows[batch] = summary(runs[1:], batch, output)["step"]
            p50, p99 = (1e3 * rows[batch][key] for key in ("p50", "p99"))
            print(f"{shape} {name} batch {batch}: {p50:.2f} ms p50, {p99:.2f} p99")
        print(f"{shape} {name}: start {sum(start.values()):.2f} s")
        out[name] = {"start": start, "steps": rows}
        llm.engine.close()
        del llm
    with open(path, "w") as file:
        json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
