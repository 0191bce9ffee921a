"""`octavo eval perplexity`: how well a model predicts a text, beside what it weighs and how fast it reads.

The text is cut into windows of `--context` tokens; of each window every token but the first counts. With `--stride`
smaller than the window, windows overlap and only their last `--stride` tokens count, each with more text before it.
Perplexity is the exponential of the mean negative log-probability of the tokens that count; bits per byte do not
depend on the vocabulary, so they compare models with different tokenizers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.options import add_engine_flags, engine_options
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The figures of one model on one text. `tokens` are those that count; `weight_bytes` as stored in the files."""

    model: str
    perplexity: float
    bits_per_byte: float
    tokens: int
    windows: int
    weight_bytes: int
    seconds: float
    tokens_per_second: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    summary = "perplexity on a text file, size and reading speed"
    sub = commands.add_parser("perplexity", help=summary, description=summary)
    sub.add_argument("file", type=Path, help="UTF-8 text; - for standard input")
    sub.add_argument("--context", type=int, default=512, help="tokens of a window")
    sub.add_argument("--stride", type=int, help="tokens from one window to the next; --context if left out")
    sub.add_argument("--max-windows", type=int, help="stop after so many windows")
    sub.add_argument("--methods", help="compare bf16, int8, int4, fp8, fp8-kv, rtn, awq, gptq (commas)")
    sub.add_argument("--group-size", type=int, default=128, help="groups of rtn, awq and gptq")
    sub.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(sub)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    stride = args.stride or args.context
    if not 2 <= args.context or not 1 <= stride <= args.context:
        raise ConfigError(
            f"context is {args.context} and stride {stride}.", "Give a context of 2 or more and a stride of 1 to it."
        )
    if args.max_windows is not None and args.max_windows < 1:
        raise ConfigError(f"max_windows is {args.max_windows}.", "Give --max-windows of 1 or more, or leave it out.")
    text = _read(args.file)
    if args.methods:
        return _compare(args, text, stride)
    from octavo.engine.llm import LLM

    options = engine_options(args)
    if options.get("max_model_len") is None:
        options["max_model_len"] = args.context + 1
    result = evaluate(LLM(**options), text, args.context, stride, args.max_windows)
    if args.json:
        print(json.dumps(asdict(result)))
    else:
        print(
            f"{result.model}: perplexity {result.perplexity:.4f}, {result.bits_per_byte:.4f} bits per byte over "
            f"{result.tokens} tokens in {result.windows} windows of {args.context}; weights "
            f"{result.weight_bytes / 1e6:.1f} MB; {result.tokens_per_second:.0f} tokens/s"
        )
    return 0


def _compare(args: argparse.Namespace, text: str, stride: int) -> int:
    from octavo.cli.methods import rows, table

    names = [name.strip() for name in args.methods.split(",") if name.strip()]
    found = []
    for row in rows(args.model, names, text, args.context, stride, args.max_windows, args.group_size):
        found.append(row)
        print(f"{row.method}: perplexity {row.perplexity:.4f}", file=sys.stderr)
    print(json.dumps([asdict(row) for row in found]) if args.json else table(found))
    return 0


def evaluate(llm: LLM, text: str, context: int, stride: int, most: int | None = None) -> Perplexity:
    """Measure `llm` on `text`. ConfigError when the text is too short or the context too long."""
    from octavo.types import SamplingParams

    tokenizer = llm.tokenizer
    if tokenizer is None or context >= llm.engine.facts.max_model_len:
        raise ConfigError(f"A context of {context} tokens does not fit this model.", "Give a smaller --context.")
    ids = tokenizer.encode(text, parse_special=False)
    spans = windows(len(ids), context, stride)[:most]
    if not spans:
        raise ConfigError(f"The text has {len(ids)} tokens, too few for one window.", "Give a longer text.")
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    begin = time.perf_counter()
    outputs = llm.generate([ids[start:end] for start, end, _ in spans], params)
    seconds = time.perf_counter() - begin
    total, counted, size = 0.0, 0, 0
    for (start, end, first), output in zip(spans, outputs, strict=True):
        entries = output.prompt_logprobs or []
        for position in range(first, end):
            entry = entries[position - start]
            if entry is not None:
                total += entry[ids[position]].logprob
                size += len(tokenizer.token_bytes(ids[position]))
                counted += 1
    read = sum(end - start for start, end, _ in spans)
    return Perplexity(
        model=llm.name,
        perplexity=math.exp(-total / counted),
        bits_per_byte=-total / math.log(2) / max(size, 1),
        tokens=counted,
        windows=len(spans),
        weight_bytes=llm.weight_bytes,
        seconds=seconds,
        tokens_per_second=read / seconds,
    )


def windows(tokens: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, end, first token that counts) of each window. A last window that adds no token is left out."""
    found: list[tuple[int, int, int]] = []
    counted = 1  # the first token of all has nothing before it
    for start in range(0, tokens, stride):
        end = min(start + context, tokens)
        first = max(counted, start + 1)
        if first >= end:
            break
        found.append((start, end, first))
        counted = end
    return found


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", "Give a UTF-8 text file.") from None
