"""`octavo plan`: what a model needs on a card, from its configuration alone, and what to change when it does not fit.

Nothing is downloaded but config.json (of a GGUF file its header is read), and the numbers are those that the engine
itself goes by (`octavo.runner.memory`, `octavo.config.resolve`); only what a step takes is an estimate here, which
the engine measures.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from octavo.cli.options import add_engine_flags, engine_options
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.build import OpenedModel

# Bytes that the driver reports of each card, in MiB.
CARDS = {
    "h200": 143_155, "h100": 81_080, "a100-80": 81_050, "a100-40": 40_340, "l40s": 45_460, "a10g": 22_500,
    "l4": 22_480, "t4": 15_100, "rtx4090": 24_080, "rtx3090": 24_120, "rtx5090": 32_100,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes and counts. `fits`: an engine would start; `problem` and `fix` say why not and what helps.

    sequences: of `max_model_len` tokens that the KV cache holds at a time. longest: tokens of one sequence that alone
    would fill it, at most what the model was made for.
    """

    model: str
    dtype: str
    quantization: str
    weight_bytes: dict[str, int]
    step_bytes: int
    graph_bytes: int
    kv_dtype: str
    kv_bytes_per_token: int
    block_size: int
    kv_bytes_per_block: int
    card_bytes: int
    budget_bytes: int
    kv_cache_bytes: int
    fits: bool
    blocks: int = 0
    tokens: int = 0
    max_model_len: int = 0
    sequences: int = 0
    longest: int = 0
    problem: str = ""
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("plan_model", metavar="MODEL", help="folder, .gguf file or hub id")
    parser.add_argument("--gpu", default="h200", help=f"{', '.join(CARDS)}, or a size such as 24GiB")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 also when the model does not fit, since that is an answer."""
    from octavo.config import engine_config

    options = engine_options(args) | {"model": args.plan_model, "load_format": "dummy"}
    config, _ = engine_config(**options)
    plan = make_plan(config, card_bytes(args.gpu))
    print(json.dumps(asdict(plan), indent=2) if args.json else render(plan))
    return 0


def card_bytes(name: str) -> int:
    """Bytes of a card by name or size. ConfigError for another name."""
    if name.lower() in CARDS:
        return CARDS[name.lower()] << 20
    match = re.fullmatch(r"(\d{1,5}(?:\.\d+)?) *(G|GB|GIB)", name.upper())
    if match is None:
        raise ConfigError(f"The card {name!r} is not known.", f"Give {', '.join(CARDS)}, or a size such as 24GiB.")
    return int(float(match[1]) * (1 << 30))


def make_plan(config: EngineConfig, card: int) -> Plan:
    """The plan of one model on one card. Raises ConfigError, ModelError for what no engine would start with."""
    from octavo.config import block_tokens, step_limits
    from octavo.engine.build import kv_dtype, open_model, run_dtype
    from octavo.runner import memory

    opened = open_model(config)
    spec, dtype, kv = opened.spec, run_dtype(config, opened.spec), kv_dtype(config, native=False)
    kind, weights = _weights(config, opened, dtype)
    facts = memory.model_facts(spec, dtype, kv)
    budget = int(card * memory.memory_share(config))
    held = memory.CardMemory(config, card, budget, sum(weights.values()))
    rows, tokens = step_limits(config, "cuda")
    longest = config.model.max_model_len or spec.max_positions
    steps = memory.step_bytes(spec, dtype, tokens, rows, longest)
    graphs = 0 if config.model.enforce_eager else memory.graph_bytes(spec, dtype, rows)
    left = budget - sum(weights.values()) - steps - graphs
    size = block_tokens(config.cache.block_size, facts.kv_bytes_per_token)
    plan = Plan(
        opened.files.name, dtype, kind, weights, steps, graphs, kv or dtype, facts.kv_bytes_per_token, size,
        facts.kv_bytes_per_token * size, card, budget, max(left, 0), False,
    )  # fmt: skip
    what = f"{memory.gib(sum(weights.values()))} of weights and {memory.gib(steps + graphs)} to run steps"
    try:
        found = held.resolve(facts, left, what)
    except ConfigError as error:
        return _replaced(plan, problem=error.cause, fix=error.fix)
    blocks = found.blocks - 1
    each = -(-found.max_model_len // found.block_size)
    return _replaced(
        plan, fits=True, block_size=found.block_size, kv_bytes_per_block=found.kv_bytes_per_block, blocks=blocks,
        kv_cache_bytes=found.blocks * found.kv_bytes_per_block, tokens=blocks * found.block_size,
        max_model_len=found.max_model_len, sequences=min(blocks // each, found.max_num_seqs),
        longest=min(blocks * found.block_size, spec.max_positions),
    )  # fmt: skip


def _replaced(plan: Plan, **changes: object) -> Plan:
    return Plan(**(asdict(plan) | changes))


def _weights(config: EngineConfig, opened: OpenedModel, dtype: str) -> tuple[str, dict[str, int]]:
    """How the weights are quantised, in words, and their bytes by kind."""
    from octavo.engine.build import online_kind
    from octavo.runner.memory import weight_bytes

    kind = online_kind(config, opened.scheme)
    weights = weight_bytes(opened.needs, dtype, scheme=opened.scheme, quantization=kind)
    return opened.scheme.line() if opened.scheme is not None else kind, weights


def render(plan: Plan) -> str:
    """The plan in lines."""
    from octavo.runner.memory import gib

    weights = ", ".join(f"{gib(size)} {kind}" for kind, size in plan.weight_bytes.items())
    lines = [
        f"model      {plan.model}, {plan.dtype}{', ' + plan.quantization if plan.quantization else ''}",
        f"card       {gib(plan.card_bytes)}, of which {gib(plan.budget_bytes)} may be used",
        f"weights    {gib(sum(plan.weight_bytes.values()))} ({weights})",
        f"steps      {gib(plan.step_bytes)} (estimate), graphs {gib(plan.graph_bytes)}",
        f"KV cache   {gib(plan.kv_cache_bytes)}, {plan.kv_dtype}: {plan.kv_bytes_per_token:,} bytes a token, "
        f"{plan.kv_bytes_per_block:,} a block of {plan.block_size} tokens",
    ]
    if plan.fits:
        lines += [
            f"           {plan.blocks:,} blocks = {plan.tokens:,} tokens",
            f"sequences  {plan.sequences:,} of {plan.max_model_len:,} tokens at a time; one alone may have "
            f"{plan.longest:,}",
        ]
    else:
        lines += [f"does not fit: {plan.problem}", f"{plan.fix}"]
    return "\n".join(lines)
