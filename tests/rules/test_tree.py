"""The rules of `checks.py` hold for the package, and the files around it name no place they should not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules import checks
from tests.rules.checks import RULES, Hit, Module

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Path(__file__).with_name("options.txt")
TEXT_SUFFIXES = {
    "", ".c", ".cc", ".cpp", ".cu", ".h", ".json", ".jsonl", ".md", ".py", ".sh", ".toml", ".txt", ".yml"
}  # fmt: skip
NOT_OURS = {"__pycache__", "build", "dist", "node_modules"}


def package_modules() -> list[Module]:
    """Every module of the package, parsed."""
    modules = []
    for path in sorted((ROOT / "octavo").rglob("*.py")):
        names = list(path.relative_to(ROOT).with_suffix("").parts)
        is_package = names[-1] == "__init__"
        name = ".".join(names[:-1] if is_package else names)
        modules.append(Module.parse(name, path.read_text(encoding="utf-8"), is_package))
    return modules


def project_files(folder: Path = ROOT) -> Iterator[Path]:
    """Every text file of the project; of the hidden folders only CI's are ours."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in {".ci", ".github"}
            if not hidden and path.name not in NOT_OURS and not (path / "pyvenv.cfg").exists():
                yield from project_files(path)
        elif path.suffix in TEXT_SUFFIXES and path.name != ".git":  # a file in a linked worktree
            yield path


def report(hits: list[Hit]) -> str:
    """The hits, one a line, for a failed test."""
    return "\n" + "\n".join(map(str, hits))


MODULES = package_modules()


@pytest.mark.parametrize("rule", RULES)
def test_package_keeps_the_rule(rule: str) -> None:
    hits = [hit for module in MODULES for hit in RULES[rule](module)]
    assert not hits, report(hits)


def test_files_name_no_place_and_link_to_known_hosts() -> None:
    hits: list[Hit] = []
    for path in project_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        hits += checks.check_text(str(path.relative_to(ROOT)), text)
    assert not hits, report(hits)


def test_every_option_is_in_the_frozen_list() -> None:
    config = [module for module in MODULES if module.name == "octavo.config"]
    offered = sorted(option for module in config for option in checks.options(module))
    frozen = OPTIONS.read_text(encoding="utf-8").split()
    assert offered == sorted(frozen), "octavo/config.py and tests/rules/options.txt differ"
    assert len(offered) <= checks.MAX_OPTIONS


def test_debug_variables_are_few() -> None:
    from octavo.env import DEBUG_VARIABLES

    assert len(DEBUG_VARIABLES) <= checks.MAX_DEBUG_VARIABLES
    assert all(name.startswith("OCTAVO_") for name in DEBUG_VARIABLES)


def test_edges_have_no_cycle() -> None:
    below = {part: set(allowed or ()) for part, allowed in checks.EDGES.items()}
    order: list[str] = []
    while len(order) < len(below):
        ready = [part for part in below if part not in order and all(_done(b, order) for b in below[part])]
        assert ready, f"cycle among {sorted(set(below) - set(order))}"
        order += ready


def _done(part: str, order: list[str]) -> bool:
    """Whether `part`, or the part that contains it, is already placed."""
    return part.partition(".")[0] in order
