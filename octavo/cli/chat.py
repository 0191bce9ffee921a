"""`octavo chat`: a conversation with a model in the terminal, streamed.

Each line is a turn; one that ends in a backslash goes on in the next. Lines that begin with a slash are commands
(`/help` lists them). The conversation grows with each answer; when it no longer fits into the context, its oldest
turns are left out. Ctrl-C ends the answer that is being written, at the prompt it ends the program. Answers go to
standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from octavo.cli.options import add_engine_flags, engine_options
from octavo.errors import ConfigError, RequestError
from octavo.types import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.llm import LLM

_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "repetition_penalty")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command: sampling, and the engine's."""
    parser.add_argument("--system", help="system prompt")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=512, help="most tokens of an answer")
    sampling.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, default=0.9)
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--repetition-penalty", type=float, default=1.0)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    params = SamplingParams(**{name: getattr(args, name) for name in _SETTINGS})
    from octavo.engine.llm import LLM

    llm = LLM(**engine_options(args))
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        raise ConfigError(f"{llm.name} has no chat template.", "Use octavo generate --raw.")
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  makes `input` edit lines and remember them

    Chat(llm, params, args.system).loop(_reader(interactive), sys.stdout, sys.stderr)
    return 0


def _reader(interactive: bool) -> Callable[[], str | None]:
    """A function that gives the next line without its end, None when there is no more."""

    def read() -> str | None:
        try:
            return input("> " if interactive else "")
        except EOFError:
            return None

    return read


class Chat:
    """One conversation. `loop` runs it; the streams are given, so that tests can be at the other end."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.llm, self.params, self.system = llm, params, system
        self.turns: list[dict[str, str]] = []
        self._commands: dict[str, tuple[str, Callable[[str], str | None]]] = {
            "help": ("this list", self._help),
            "exit": ("end", lambda _: None),
            "clear": ("forget the conversation", self._clear),
            "undo": ("forget the last question and its answer", self._undo),
            "retry": ("answer the last question again", lambda _: ""),
            "system": ("TEXT: set the system prompt; without TEXT there is none", self._set_system),
            "set": (f"NAME VALUE: one of {', '.join(_SETTINGS)}", self._set),
            "save": ("FILE: write the conversation as JSON", self._save),
            "stats": ("tokens, cache hits and blocks so far", self._stats),
        }

    def loop(self, read: Callable[[], str | None], out: IO[str], err: IO[str]) -> None:
        """Turn after turn until the input ends or /exit."""
        print(f"{self.llm.name}; /help lists the commands.", file=err)
        while True:
            try:
                text = self._next(read)
            except KeyboardInterrupt:
                return
            if text is None:
                return
            if text.startswith("/"):
                name, _, rest = text[1:].partition(" ")
                if name == "exit":
                    return
                if not self._command(name, rest.strip(), err):
                    continue
            elif text.strip():
                self.turns.append({"role": "user", "content": text})
            else:
                continue
            self._answer(out, err)

    def _next(self, read: Callable[[], str | None]) -> str | None:
        lines: list[str] = []
        while (line := read()) is not None:
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
        return "\n".join(lines) if lines else None

    def _command(self, name: str, rest: str, err: IO[str]) -> bool:
        """Run a command; True when an answer is wanted now."""
        if name not in self._commands:
            print(f"There is no command /{name}; /help lists them.", file=err)
            return False
        try:
            said = self._commands[name][1](rest)
        except (RequestError, OSError, ValueError) as error:
            said = str(error)
        if said:
            print(said, file=err)
        if name != "retry":
            return False
        if self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        if not self.turns:
            print("There is no question yet.", file=err)
        return bool(self.turns)

    def _answer(self, out: IO[str], err: IO[str]) -> None:
        """Stream the answer to the last turn, and remember it."""
        try:
            ids = self._fit(err)
        except RequestError as error:
            print(str(error), file=err)
            self.turns.pop()
            return
        text, tokens, begin, first = "", 0, time.perf_counter(), 0.0
        stream = self.llm.stream(ids, self.params)
        try:
            for output in stream:
                first = first or time.perf_counter()
                completion = output.outputs[0]
                out.write(completion.text[len(text) :])
                out.flush()
                text, tokens = completion.text, len(completion.token_ids)
        except KeyboardInterrupt:
            stream.close()  # type: ignore[attr-defined]
            print("\n(stopped)", file=err)
        end = time.perf_counter()
        out.write("\n")
        out.flush()
        self.turns.append({"role": "assistant", "content": text})
        rate = (tokens - 1) / (end - first) if tokens > 1 and end > first else 0.0
        print(
            f"[{len(ids)} tokens in, {tokens} out, first after {max(first - begin, 0.0):.2f} s, {rate:.1f} tokens/s]",
            file=err,
        )

    def _fit(self, err: IO[str]) -> list[int]:
        """Token ids of the conversation, without its oldest turns if need be: an answer of some length must fit."""
        limit = self.llm.engine.facts.max_model_len
        room = min(self.params.max_tokens or limit, limit // 4)
        dropped = 0
        while True:
            system = [{"role": "system", "content": self.system}] if self.system else []
            ids = self.llm.tokenize_chat(system + self.turns)
            if len(ids) + room <= limit or len(self.turns) == 1:
                break
            # Whole exchanges: a question and its answer.
            del self.turns[: 2 if len(self.turns) > 2 else 1]
            dropped += 1
        if dropped:
            print(f"(the first {dropped} exchanges are left out: the context is {limit} tokens)", file=err)
        self.llm.check(ids, self.params)
        return ids

    def _help(self, _: str) -> str:
        return "\n".join(f"/{name:8} {summary}" for name, (summary, _) in self._commands.items())

    def _clear(self, _: str) -> str:
        self.turns.clear()
        return "Forgotten."

    def _undo(self, _: str) -> str:
        while self.turns and self.turns.pop()["role"] != "user":
            pass
        return f"{len(self.turns)} turns are left."

    def _set_system(self, text: str) -> str:
        self.system = text or None
        return "There is a system prompt now." if text else "There is no system prompt now."

    def _set(self, rest: str) -> str:
        name, _, value = rest.partition(" ")
        name = name.replace("-", "_")
        if name not in _SETTINGS:
            return ", ".join(f"{each} {getattr(self.params, each)}" for each in _SETTINGS)
        number = None if value in ("", "none") else float(value)
        whole = name in ("top_k", "seed", "max_tokens")
        change: dict[str, Any] = {name: int(number) if whole and number is not None else number}
        self.params = replace(self.params, **change)
        return f"{name} is {getattr(self.params, name)}."

    def _save(self, path: str) -> str:
        if not path:
            return "Give a file: /save conversation.json"
        system = [{"role": "system", "content": self.system}] if self.system else []
        Path(path).expanduser().write_text(json.dumps(system + self.turns, ensure_ascii=False, indent=1) + "\n")
        return f"Saved {len(self.turns)} turns to {path}."

    def _stats(self, _: str) -> str:
        stats, pool = self.llm.stats, self.llm.engine.scheduler.state.pool
        hits = 100 * stats.prefix_hit_tokens / max(stats.prompt_tokens, 1)
        return (
            f"{stats.prompt_tokens} tokens in ({hits:.0f} % from the cache), {stats.generated_tokens} out; "
            f"{pool.usable - pool.free} of {pool.usable} KV blocks in use"
        )
