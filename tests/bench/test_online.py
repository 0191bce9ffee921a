"""The online benchmark on the fake engine, its arithmetic, and the comparison of two files."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from octavo.bench import compare as compare_command
from octavo.bench import online
from octavo.bench.compare import compare, figures
from octavo.bench.online import CS, Sample, arrivals, make_requests, percentile, summary
from octavo.bench.plot import cumulative_svg
from octavo.errors import ConfigError
from tests.server.running import Running


def bench(module: ModuleType, *words: object) -> int:
    """Run one subcommand of `octavo bench`."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args([str(word) for word in words]))
    return code


def test_arrivals_are_of_the_rate_and_repeat() -> None:
    for shape in (1.0, 0.25):
        times = arrivals(4000, 10.0, shape, 1)
        assert times == sorted(times) == arrivals(4000, 10.0, shape, 1)
        assert times[-1] == pytest.approx(400, rel=0.1)
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        mean = sum(gaps) / len(gaps)
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
        assert variance / mean**2 == pytest.approx(1 / shape, rel=0.2)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError):
            arrivals(1, wrong, 1.0, 0)


def test_customer_service_shares_its_beginning() -> None:
    requests = make_requests("CS", 20, 0)
    heads = {tuple(request.ids[: CS[0]]) for request in requests}
    assert len(heads) == 1 and {len(request.ids) for request in requests} == {CS[0] + CS[1]}
    assert len({tuple(request.ids) for request in requests}) == 20
    assert len(make_requests("A", 3, 0)) == 3


def test_goodput_counts_what_keeps_both_limits() -> None:
    def sample(ttft: float, gap: float, whole: bool = True) -> Sample:
        return Sample(200, ttft, [0.01, gap], 1.0, 3, 10, 5, whole)

    samples = [sample(0.1, 0.02), sample(2.0, 0.02), sample(0.1, 0.5), sample(0.1, 0.02, whole=False), Sample(429)]
    made = summary(samples, 2.0, slo_ttft=1.0, slo_itl=0.1)
    assert made["completed"] == 3 and made["goodput"] == 0.5 and made["refused"] == 1 and made["failed"] == 1
    assert made["cached_share"] == 0.5 and made["output_rate"] == 4.5
    assert percentile([], 50) == 0 and percentile([1, 2, 3, 4], 50) == 2 and percentile([1, 2, 3, 4], 99) == 4


def test_a_run_against_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = "key-0123456789"
    with Running("--api-key", key, "--max-model-len", "2048", fake="fake:1", key=key) as server:
        url = ["--url", f"http://127.0.0.1:{server.port}", "--api-key", key]
        out = [f"--json={tmp_path / 'a.json'}", f"--plot={tmp_path / 'a.svg'}"]
        assert bench(online, *url, "--requests", 20, "--rate", 50, *out) == 0
        assert bench(online, *url, "--requests", 6, "--concurrency", 2, "--workload", "A") == 0
        assert bench(online, "--url", url[1], "--requests", 2) == 1  # without its key
    text = (tmp_path / "a.json").read_text()
    result = json.loads(text)["online"]
    assert result["completed"] == 20 and result["cached_share"] > 0.7 and key not in text
    assert 0 < result["ttft_p50"] <= result["ttft_p99"] and result["itl_p50"] > 0
    ElementTree.parse(tmp_path / "a.svg")
    assert "goodput" in capsys.readouterr().out


def test_compare(tmp_path: Path) -> None:
    """FEATURES S66: exit code 1 on a regression of more than the limit."""
    before = {"goodput": 10.0, "ttft_p50": 100.0, "itl_p99": 20.0, "completed": 5}
    files = {}
    for name, change in {
        "before": {},
        "same": {"ttft_p50": 104.0, "goodput": 9.8},
        "slow": {"ttft_p50": 110.0},
        "less": {"goodput": 9.0},
        "gone": {"goodput": 0.0},
    }.items():
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(json.dumps({"online": before | change}))
    codes = {name: bench(compare_command, files["before"], file) for name, file in files.items()}
    assert codes == {"before": 0, "same": 0, "slow": 1, "less": 1, "gone": 1}
    assert bench(compare_command, files["before"], files["less"], "--limit", 20) == 0
    rows = {"rows": [{"engine": "octavo", "workload": "B", "output_rate": 5.0, "total_rate": 9.0}]}
    assert [change.worse for change in compare(figures(rows), figures(rows))] == [0.0, 0.0]
    (tmp_path / "no.json").write_text("[")
    with pytest.raises(ConfigError, match="no.json"):
        bench(compare_command, tmp_path / "no.json", files["before"])


def test_curves_of_nothing_are_an_image() -> None:
    ElementTree.fromstring(cumulative_svg({"a": [], "b": [1.0]}, "ms"))
