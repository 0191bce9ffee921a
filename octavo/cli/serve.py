"""`octavo serve MODEL`: an OpenAI-compatible HTTP server around one model.

Options are those of `octavo.config`, under vLLM's names where the meaning is the same; options of old guides that
mean nothing any more are taken with a notice.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields

from octavo.cli.options import add_engine_flags, add_flags, engine_options
from octavo.config import NOTICES, NOTICES_WITH_VALUE, ServerConfig, engine_config
from octavo.errors import ConfigError

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server")
    add_flags(group, ServerConfig)
    add_engine_flags(parser)
    known = {action.dest for action in parser._actions}
    for name in NOTICES:
        if name not in known:
            action = "store" if name in NOTICES_WITH_VALUE else argparse.BooleanOptionalAction
            flag = "--" + name.replace("_", "-")
            parser.add_argument(flag, action=action, default=None, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the command until it is told to end."""
    if args.name is not None and args.model is not None and args.name != args.model:
        raise ConfigError(f"Two models are named: {args.name} and {args.model}.", "Name one.")
    options = engine_options(args) | {"model": args.name or args.model}
    options |= {name: True for name in NOTICES if getattr(args, name, None) is not None}
    engine, notices = engine_config(**options)
    for notice in notices:
        print(f"octavo: note: {notice}", flush=True)
    config = ServerConfig(**{f.name: getattr(args, f.name) for f in fields(ServerConfig)})
    check(config)
    from octavo.server.supervise import serve

    return serve(engine, config)


def check(config: ServerConfig) -> None:
    """Raise ConfigError for numbers that make no sense."""
    bounds = {
        "port": (0, 65535),
        "default_timeout": (0, 86_400),
        "shutdown_timeout": (0, 86_400),
        "watchdog_timeout": (0.5, 86_400),
        "stream_interval": (1, 1 << 20),
    }
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}.", f"Give a number from {low} to {high}.")
