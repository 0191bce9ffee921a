"""`octavo bench`: one subcommand for each thing that is measured; each lives in `octavo.bench`."""

from __future__ import annotations

import argparse
from importlib import import_module

SUBCOMMANDS = {
    "offline": "throughput of LLM.generate on fixed workloads, beside a rival if wished",
    "versus": "the CPU workloads A-E on several engines, in process or over HTTP, and the ratios between them",
    "latency": "time of one batch: to the first token, between tokens, and in all",
    "gpu": "the GPU workloads W1-W5 on real model shapes with dummy weights, beside stored figures of rivals",
    "host": "CPU time that the scheduler takes for one step",
    "online": "load on a running server, as clients see it",
    "compare": "two result files: exit code 1 when something became worse",
    "simulate": "random load on the scheduler, every invariant checked after every step",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, summary in SUBCOMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        import_module(f"octavo.bench.{name}").add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    code: int = import_module(f"octavo.bench.{args.what}").run(args)
    return code
