"""`octavo doctor --memory`: an engine is started as a server would, and every byte of its card is given a name."""

from __future__ import annotations

import json

from octavo.errors import ConfigError


def report(model: str, load_format: str, *, as_json: bool) -> str:
    """The split by the engine's own books, and what the driver counts. Raises ConfigError without a card."""
    from octavo.engine.llm import LLM

    llm = LLM(model, load_format=load_format, skip_tokenizer_init=True, device="cuda")
    runner = llm.engine.loop.runner
    from octavo.runner.card import card_used, split
    from octavo.runner.cuda_runner import CudaRunner

    if not isinstance(runner, CudaRunner):
        raise ConfigError("This model does not run on the CUDA engine here.", "Run `octavo doctor` to see why.")
    parts, counted = split(runner), card_used(runner.device)
    if as_json:
        return json.dumps({"parts": parts, "sum": sum(parts.values()), "driver": counted}, indent=2)
    return text(parts, counted)


def text(parts: dict[str, int], counted: int | None) -> str:
    """One line for each part, in GiB, the largest first, then the sum and how far it is from the driver's count."""
    total = sum(parts.values())
    lines = [f"{size / 2**30:9.2f} GiB  {name}" for name, size in sorted(parts.items(), key=lambda item: -item[1])]
    lines.append(f"{total / 2**30:9.2f} GiB  in all, by the engine's own books")
    if counted is None:
        lines.append("  unknown      by the driver's count (NVML does not answer)")
    else:
        off = 100 * (total - counted) / counted
        lines.append(f"{counted / 2**30:9.2f} GiB  by the driver's count (NVML); the books are off by {off:+.2f} %")
    return "\n".join(lines)
