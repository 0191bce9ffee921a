"""`octavo bench compare before.json after.json`: exit code 1 when something became worse by more than the limit.

Reads what `octavo bench online` and `octavo bench offline` write with `--json`. Rates should rise, times should fall;
compare runs of one machine at one time only, the machine's own noise is larger than most changes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

RATES = ("goodput", "request_rate", "output_rate", "total_rate")
TIMES = tuple(f"{name}_p{share}" for name in ("ttft", "itl", "e2e") for share in (50, 90, 99))
MAX_FILE = 256 << 20


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both files. `worse`: by how many percent it is worse; negative is better."""

    name: str
    before: float
    after: float
    worse: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--limit", type=float, default=5.0, help="percent that count as worse (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    changes = compare(figures(read(args.before)), figures(read(args.after)))
    if not changes:
        raise ConfigError("The files have no figure in common.", "Give two files of the same benchmark.")
    print(f"{'':34}{'before':>12}{'after':>12}{'worse by':>10}")
    for change in changes:
        mark = "  <--" if change.worse > args.limit else ""
        print(f"{change.name:34}{change.before:12.2f}{change.after:12.2f}{change.worse:9.1f}%{mark}")
    worse = [change for change in changes if change.worse > args.limit]
    print(f"{len(worse)} of {len(changes)} figures are worse by more than {args.limit:g} %")
    return 1 if worse else 0


def read(path: Path) -> dict[str, Any]:
    """One file of results."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(f"{path} is larger than results are.", "Check the path.")
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", "Give a file written with --json.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no results.", "Give a file written with --json.")
    return data


def figures(data: dict[str, Any]) -> dict[str, float]:
    """The figures of a file by name; those that are 0 say nothing and are left out."""
    found: dict[str, Any] = dict(data.get("online", {}))
    for row in data.get("rows", []):
        found |= {
            f"{row['engine']} {row['workload']} {name}": row.get(name, 0) for name in ("output_rate", "total_rate")
        }
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float)) and value}


def compare(before: dict[str, float], after: dict[str, float]) -> list[Change]:
    """What both have and what has a direction. A rate that is gone counts as infinitely worse."""
    changes = []
    for name, old in before.items():
        kind = name.rpartition(" ")[2]
        if kind in RATES:
            new = after.get(name, 0.0)
            changes.append(Change(name, old, new, 100 * (old / new - 1) if new else float("inf")))
        elif kind in TIMES and name in after:
            changes.append(Change(name, old, after[name], 100 * (after[name] / old - 1)))
    return changes
