"""What `octavo plan` says of a shape beside what an engine with dummy weights takes on this card.

    python benchmarks/gpu/plan.py OUT.json ["case;..."]

Each case runs in a process of its own. Weights: bytes that torch has given out when they are all there. Card: bytes
in use as the driver counts them, without graphs, which are captured when they are first needed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from octavo.bench.shapes import write_shape
from octavo.cli.plan import make_plan
from octavo.config import engine_config
from octavo.engine.llm import LLM
from octavo.runner import startup
from octavo.runner.card import card_used
from octavo.runner.cuda_runner import CudaRunner

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": ("qwen3-0.6b", {}),
    "llama3.1-8b": ("llama3.1-8b", {}),
    "llama3.1-8b, FP8 KV": ("llama3.1-8b", {"kv_cache_dtype": "fp8"}),
    "llama3.1-8b, fp8": ("llama3.1-8b", {"quantization": "fp8"}),
    "llama3.1-8b, int4": ("llama3.1-8b", {"quantization": "int4"}),
}
HELD: dict[str, int] = {}


class CountingRunner(CudaRunner):
    """Notes what is held when the weights are there, and captures no graph before it is needed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        HELD["weights"] = torch.cuda.memory_allocated()
        super().__init__(*arguments, **options)

    def capture(self) -> None:
        """Nothing."""


def start(case: str) -> tuple[LLM, dict[str, dict[str, float]]]:
    """The engine of a case, and planned beside measured bytes and counts."""
    shape, more = CASES[case]
    startup.CudaRunner = CountingRunner  # type: ignore[misc]
    options = {"load_format": "dummy", "max_model_len": 8192, "device": "cuda", **more}
    with tempfile.TemporaryDirectory() as root:
        folder = str(write_shape(shape, Path(root)))
        llm = LLM(folder, skip_tokenizer_init=True, **options)
        config, _ = engine_config(model=folder, **options)
        plan = make_plan(config, torch.cuda.mem_get_info()[1])
    facts, pool, used = llm.engine.facts, llm.engine.loop.runner.pool.data.nbytes, card_used(torch.device("cuda", 0))
    weights = sum(plan.weight_bytes.values())
    rows = {
        "weights": (weights, HELD["weights"]),
        "KV bytes a block": (plan.kv_bytes_per_block, pool // facts.blocks),
        "blocks": (plan.blocks, facts.blocks - 1),
        "KV cache": (plan.kv_cache_bytes, pool),
        "card, without graphs": (weights + plan.step_bytes + plan.kv_cache_bytes, used or 0),
    }
    return llm, {name: {"planned": a, "measured": b, "off": a / max(b, 1) - 1} for name, (a, b) in rows.items()}


def show(case: str, rows: dict[str, dict[str, float]]) -> None:
    """A line for each number."""
    for name, row in rows.items():
        numbers = f"{row['planned']:>16,} {row['measured']:>16,} {100 * row['off']:+6.2f} %"
        print(f"{case:22} {name:22} {numbers}", flush=True)


def main() -> None:
    """Measure and print."""
    if sys.argv[1] == "--one":
        case = sys.argv[3]
        _, rows = start(case)
        show(case, rows)
        Path(sys.argv[2]).write_text(json.dumps(rows))
        return
    wanted = sys.argv[2].split(";") if len(sys.argv) > 2 else list(CASES)
    out = {}
    with tempfile.TemporaryDirectory() as root:
        for case in wanted:
            one = Path(root) / "one.json"
            subprocess.run([sys.executable, __file__, "--one", str(one), case], check=True)
            out[case] = json.loads(one.read_text())
    Path(sys.argv[1]).write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
