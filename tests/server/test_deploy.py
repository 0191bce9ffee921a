"""What is in deploy/ fits what the server exports; with promtool, the rules are tested and the metrics checked."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.running import ROOT, Running

DEPLOY = ROOT / "deploy"
HAS_PROMTOOL = shutil.which("promtool") is not None
needs_promtool = pytest.mark.skipif(not HAS_PROMTOOL, reason="no promtool (apt-get install prometheus)")
NAME = re.compile(r"octavo:[a-z0-9_]+(?![a-z0-9_:])")


def names(path: Path) -> set[str]:
    """Metrics that a file uses, less those that it records itself."""
    text = path.read_text()
    return set(NAME.findall(re.sub(r"octavo:\w+:\w+", "", text)))


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json", "tests/alerts_test.yml"])
def test_only_exported_metrics_are_used(fake: Running, file: str) -> None:
    exported = {re.split(r"[{ ]", line)[0] for line in fake.call("/metrics").body.decode().splitlines()}
    assert names(DEPLOY / file) and names(DEPLOY / file) <= exported


def test_the_dashboard_is_complete() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    assert len(panels) >= 12 and len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["targets"] for panel in panels)


def test_the_unit_drains_and_restarts_what_helps() -> None:
    unit = (DEPLOY / "octavo.service").read_text()
    assert "RestartPreventExitStatus=2 3" in unit and "Restart=on-failure" in unit
    assert int(re.search(r"TimeoutStopSec=(\d+)", unit)[1]) > 30  # type: ignore[index]


@needs_promtool
def test_rules_with_promtool() -> None:
    """Each rule fires on its fault and is silent on a healthy server at saturation."""
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "tests/alerts_test.yml"]):
        done = subprocess.run(["promtool", *words], cwd=DEPLOY, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_metrics_with_promtool(fake: Running) -> None:
    """FEATURES S56: the format is sound. Names with a colon and old names are remarked on, and meant."""
    fake.complete()
    body = fake.call("/metrics").body
    done = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True)
    remarks = [line for line in done.stderr.decode().splitlines() if "should not contain ':'" not in line]
    assert "error while linting" not in done.stderr.decode()
    assert not [line for line in remarks if "vllm:" not in line], remarks
