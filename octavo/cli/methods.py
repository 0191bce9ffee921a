"""The table of `octavo eval perplexity --methods`: one plain model, quantised in several ways, on one text.

Every row runs on the CPU with activations in float32, so that rows differ by what is quantised, but for bf16
(bfloat16) and for int8 and int4, where the native engine rounds activations to 8 bits, too. Rows with FP8 run on the
torch path. Checkpoints that need calibration are made in a temporary folder, or given as NAME=FOLDER.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

BASE = "float32"
ONLINE: dict[str, dict[str, Any]] = {
    BASE: {},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8", "device": "torch-cpu"},
    "fp8-kv": {"kv_cache_dtype": "fp8", "device": "torch-cpu"},
}
MADE = ("rtn", "awq", "gptq")


@dataclass(frozen=True, slots=True)
class Row:
    """One method: bytes of the layers' matrices, how much smaller than 16 bits, perplexity, its loss to float32."""

    method: str
    layer_bytes: int
    smaller: float
    perplexity: float
    loss: float


def rows(
    model: str | None, names: Sequence[str], text: str, context: int, stride: int, most: int | None, group: int
) -> Iterator[Row]:
    """The rows in order, float32 first. ConfigError, ModelError for what cannot be made, before anything runs."""
    from octavo.cli.eval import evaluate
    from octavo.cli.quantize import open_plain
    from octavo.engine.llm import LLM

    for name in names:
        if name not in (*ONLINE, *MADE) and "=" not in name:
            known = ", ".join((*ONLINE, *MADE))
            raise ConfigError(f"{name!r} is no method.", f"Give some of {known}, or NAME=FOLDER of a checkpoint.")
        if name in MADE:
            open_plain(model, name, group)
    base = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys((BASE, *names)):
            label, options = _options(name, model, Path(folder), group)
            options = {"device": "cpu", "dtype": "float32"} | options
            options |= {"max_model_len": context + 1, "max_num_seqs": 4}
            size, plain = _layer_bytes(options)
            found = evaluate(LLM(**options), text, context, stride, most).perplexity
            base = base or found
            yield Row(label, size, plain / size, found, found / base - 1)


def table(found: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| method | layers' matrices | smaller than 16 bits | perplexity | loss |", "|---|---:|---:|---:|---:|"]
    for row in found:
        size, loss = f"{row.layer_bytes / 1e6:.1f} MB", f"{100 * row.loss:+.2f} %"
        lines.append(f"| {row.method} | {size} | {row.smaller:.2f} x | {row.perplexity:.3f} | {loss} |")
    return "\n".join(lines)


def _options(name: str, model: str | None, folder: Path, group: int) -> tuple[str, dict[str, Any]]:
    """What the row is called, and the engine's options for it; makes the checkpoint where it is one."""
    if name in ONLINE:
        return name, {"model": model, **ONLINE[name]}
    label, _, path = name.partition("=")
    if not path:
        from octavo.cli.quantize import quantise_folder

        path = str(folder / name)
        quantise_folder(model, Path(path), name, group)
    return label, {"model": path}


def _layer_bytes(options: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the matrices of all layers, as they are and with 16 bits each."""
    from octavo.config import engine_config
    from octavo.engine.build import open_model
    from octavo.runner.memory import LAYER_PRODUCTS, weight_bytes

    config, _ = engine_config(**options)
    opened = open_model(config)
    needs = [need for need in opened.needs if need.name.rpartition(".")[2] in LAYER_PRODUCTS]
    dtype = "bfloat16" if options.get("dtype") == "bfloat16" else "float32"
    kind = options.get("quantization") or ""
    size = sum(weight_bytes(needs, dtype, stored=opened.checkpoint, quantization=kind).values())
    return size, sum(weight_bytes(needs, "bfloat16").values())
