"""Flags from the dataclasses of `octavo.config`: one for each field, its text as the help."""

from __future__ import annotations

import argparse
from dataclasses import Field, fields
from typing import Any

from octavo.config import PARTS


def add_flags(group: argparse._ArgumentGroup, cls: type) -> None:
    """One flag for each field of a configuration dataclass."""
    for f in fields(cls):
        flag = "--" + f.name.replace("_", "-")
        if isinstance(f.default, bool):
            group.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=f.default, help=f.metadata["help"]
            )
        else:
            group.add_argument(flag, type=_kind(f), default=f.default, help=f.metadata["help"])


def _kind(f: Field[Any]) -> type:
    """The type that a field's text on the command line is read as."""
    words = str(f.type).replace("|", " ").split()
    return float if "float" in words else int if "int" in words else str


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the engine, grouped as in `octavo.config`."""
    for part, cls in PARTS:
        add_flags(parser.add_argument_group(part), cls)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options among parsed arguments, under their field names."""
    return {f.name: getattr(args, f.name) for _, cls in PARTS for f in fields(cls)}
