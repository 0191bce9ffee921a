"""`octavo generate`: complete prompts from arguments, a file or standard input, all together.

A prompt a line: plain text, or a JSON object with "prompt", "prompt_token_ids" or "messages" and, if wished, any
sampling field. `--jsonl` writes one JSON object for each prompt, in order; a prompt that is refused yields an object
with "error" and the others go on. Exit code 1 when any was refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.options import add_engine_flags, engine_options
from octavo.errors import ConfigError, RequestError
from octavo.types import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.llm import LLM

_SAMPLING = {
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command: the engine's, generated from `octavo.config`, and sampling."""
    parser.add_argument("prompts", nargs="*", help="prompts; standard input, one a line, if there are none")
    parser.add_argument("--file", type=Path, help="read prompts from this file, one a line")
    parser.add_argument("--raw", action="store_true", help="complete the text as it is, without the chat template")
    parser.add_argument("--jsonl", action="store_true", help="write JSON, one object for each prompt")
    parser.add_argument("--stop", action="append", help="string that ends the text; may be repeated")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128)
    sampling.add_argument("--min-tokens", type=int, default=0)
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--n", type=int, default=1, help="completions for each prompt")
    sampling.add_argument("--logprobs", type=int)
    sampling.add_argument("--ignore-eos", action="store_true")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    lines = _lines(args)
    default = SamplingParams(stop=args.stop, **{name: getattr(args, name) for name in _SAMPLING})
    from octavo.engine.llm import LLM

    begin = time.perf_counter()
    llm = LLM(**engine_options(args))
    loaded = time.perf_counter()
    prompts, params, errors = _parse(lines, default, llm, args.raw)
    from octavo.scheduler.usage import UsageMeter

    meter = UsageMeter()
    llm.engine.loop.observer = lambda scheduler: meter(scheduler.state)
    outputs = iter(llm.generate(list(prompts.values()), list(params.values())) if prompts else [])
    done = time.perf_counter()
    for i, line in enumerate(lines):
        _show(args.jsonl, line, errors.get(i) or next(outputs))
    _summary(llm, meter, loaded - begin, done - loaded, len(prompts))
    return 1 if errors else 0


def _lines(args: argparse.Namespace) -> list[str]:
    if args.prompts and args.file:
        raise ConfigError("Prompts are given as arguments and as a file.", "Give one of them.")
    if args.prompts:
        return list(args.prompts)
    if args.file:
        try:
            text = args.file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{args.file} cannot be read: {error}.", "Check the path.") from None
    else:
        text = sys.stdin.read()
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError("There is no prompt.", "Give one as an argument, in a file or on standard input.")
    return lines


def _parse(
    lines: list[str], default: SamplingParams, llm: LLM, raw: bool
) -> tuple[dict[int, Any], dict[int, SamplingParams], dict[int, RequestError]]:
    """Prompts and parameters by line, and the errors of lines that cannot be served."""
    prompts: dict[int, Any] = {}
    params: dict[int, SamplingParams] = {}
    errors: dict[int, RequestError] = {}
    for i, line in enumerate(lines):
        try:
            prompt, param = _parse_line(line, default, llm, raw)
            llm.check(prompt, param)
            prompts[i], params[i] = prompt, param
        except RequestError as error:
            errors[i] = error
    return prompts, params, errors


def _parse_line(line: str, default: SamplingParams, llm: LLM, raw: bool) -> tuple[Any, SamplingParams]:
    record: dict[str, Any] = {"prompt": line}
    if line.lstrip().startswith("{"):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RequestError(f"The line starts with '{{' but is no JSON object ({error}).", "Mend it.") from None
    wished = {f.name: record[f.name] for f in fields(SamplingParams) if f.name in record}
    if isinstance(bias := wished.get("logit_bias"), dict):  # JSON has no integer keys
        wished["logit_bias"] = {int(key) if str(key).isdecimal() else key: value for key, value in bias.items()}
    params = replace(default, **wished)
    if "prompt_token_ids" in record:
        return record["prompt_token_ids"], params
    messages = record.get("messages")
    text = record.get("prompt")
    if messages is None and (raw or llm.tokenizer is None or llm.tokenizer.chat_template is None):
        return text if isinstance(text, str) else "", params
    messages = messages or [{"role": "user", "content": text}]
    return {"prompt": text, "prompt_token_ids": llm.tokenize_chat(messages)}, params


def _show(jsonl: bool, line: str, result: Any) -> None:
    if isinstance(result, RequestError):
        print(json.dumps({"prompt": line, "error": str(result)}) if jsonl else f"> {line}\nerror: {result}\n")
    elif jsonl:
        print(json.dumps(asdict(result), ensure_ascii=False))
    else:
        texts = "\n---\n".join(completion.text.strip() for completion in result.outputs)
        print(f"> {line}\n{texts}\n")


def _summary(llm: LLM, meter: Any, load: float, seconds: float, count: int) -> None:
    stats, facts = llm.stats, llm.engine.facts
    hits = stats.prefix_hit_tokens / max(stats.prompt_tokens, 1)
    print(
        f"{llm.name}: {count} prompts together, {stats.prompt_tokens} tokens in, {stats.generated_tokens} out in "
        f"{seconds:.1f} s = {stats.generated_tokens / max(seconds, 1e-9):.0f} tokens/s (loaded in {load:.1f} s); "
        f"KV blocks used {meter.peak_blocks} of {facts.blocks - 1}, waste {100 * meter.waste_ratio:.1f} %, "
        f"prefix hits {100 * hits:.0f} % of prompt tokens",
        file=sys.stderr,
    )
