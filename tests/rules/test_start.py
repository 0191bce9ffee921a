"""What starting Octavo loads: no command pays for packages that it does not use."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "tokenizers",
    "safetensors",
    "jinja2",
    "huggingface_hub",
    "asyncio",
}
HELP_CPU_SECONDS = 0.3

PROBE = """
import json, sys
{statement}
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})), file=sys.stderr)
"""


def loaded_by(statement: str) -> set[str]:
    """Top-level names in `sys.modules` after `statement` ran in a process of its own."""
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_by("import octavo") & HEAVY


def test_help_loads_nothing_heavy() -> None:
    statement = "import octavo.cli.main as m\ntry: m.main(['--help'])\nexcept SystemExit: pass"
    assert not loaded_by(statement) & HEAVY


@pytest.mark.parametrize(
    "part",
    ["scheduler", "text", "weights", "metrics", "quantization.ggml", "server", "kernels.native", "runner.native"],
)
def test_these_parts_leave_torch_out(part: str) -> None:
    statement = (
        f"import importlib, pkgutil, octavo.{part} as part\n"
        "for info in pkgutil.walk_packages(getattr(part, '__path__', []), part.__name__ + '.'):\n"
        "    importlib.import_module(info.name)\n"
    )
    assert not loaded_by(statement) & {"torch", "transformers"}


def test_scheduler_needs_numpy_only() -> None:
    statement = "import octavo.scheduler.plan, octavo.scheduler.scheduler"
    assert not loaded_by(statement) & HEAVY - {"numpy"}


def test_help_is_fast() -> None:
    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "octavo", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_seconds() for _ in range(3)) <= HELP_CPU_SECONDS
