"""The comparison of engines: its arithmetic, its prompts, and a run on two servers."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from octavo.bench import versus
from octavo.bench.coldstart import start
from octavo.bench.online import Sample, _take
from octavo.bench.versus import Result, measure, online_figures, requests_of, table
from octavo.bench.workloads import build
from octavo.errors import ConfigError
from tests.bench.test_online import bench

SETTLE = versus.settle
TEXT = list(range(100, 5100))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versus, "settle", lambda: 0.0)


def test_prompts_keep_sizes_and_what_they_share() -> None:
    for workload in "ABCD":
        made, plain = requests_of(workload, 1, TEXT), build(workload, 1)
        assert [(len(r.ids), r.out, r.at) for r in made] == [(len(r.ids), r.out, r.at) for r in plain]
        assert all(token in range(100, 5100) for request in made for token in request.ids)
        assert made == requests_of(workload, 1, TEXT) != requests_of(workload, 2, TEXT)
    shared = requests_of("C", 0, TEXT)
    assert len({tuple(request.ids[:1024]) for request in shared}) == 1
    assert len({tuple(request.ids) for request in shared}) == 32


def test_figures_of_a_server() -> None:
    samples = [
        Sample(200, 0.1, [0.01, 0.03], 0.2, 3, 10, 0, True),
        Sample(200, 0.3, [0.02, 0.02], 0.5, 3, 10, 0, True),
    ]
    found = online_figures(samples, 0.5)
    assert found["output_rate"] == 12 and found["decode_rate"] == pytest.approx(50)
    assert found["ttft_p50"] == 100 and found["ttft_p99"] == 300 and found["itl_p99"] == 30
    with pytest.raises(ConfigError, match="1 of 3 requests"):
        online_figures([*samples, Sample(404)], 0.5)


def test_ratios_are_above_one_where_the_first_is_better() -> None:
    results = [
        Result("octavo", "A", [{"decode_rate": 300.0, "ttft_p50": 50.0}, {"decode_rate": 200.0}]),
        Result("other", "A", [{"decode_rate": 100.0, "ttft_p50": 25.0}]),
    ]
    lines = table(results, "octavo").splitlines()
    assert [line.split()[-2:] for line in lines[1:]] == [
        ["250.00", "1.00x"],
        ["100.00", "2.50x"],
        ["50.00", "1.00x"],
        ["25.00", "0.50x"],
    ]


def test_engines_take_turns() -> None:
    calls: list[tuple[str, int]] = []

    def runner(name: str) -> versus.Runner:
        return lambda requests: calls.append((name, len(requests))) or {"seconds": 1.0}

    results = measure({"a": runner("a"), "b": runner("b")}, ["A", "C"], 2, TEXT)
    assert calls == [("a", 1), ("b", 1)] * 3 + [("a", 32), ("b", 32)] * 2
    assert [(r.target, r.workload, len(r.runs)) for r in results] == [
        ("a", "A", 2),
        ("b", "A", 2),
        ("a", "C", 2),
        ("b", "C", 2),
    ]


def test_a_run_on_a_server_that_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{sys.executable} -m octavo serve --load-format fake --port {port} --max-model-len 2048"
    out = tmp_path / "out.json"
    words = ["--workloads", "A,C", "--repetitions", 2, "--json", out]
    assert bench(versus, f"us=http://127.0.0.1:{port}", "--start", f"us={command}", *words) == 0
    rows = json.loads(out.read_text())["results"]
    assert [(row["workload"], len(row["runs"])) for row in rows] == [("A", 2), ("C", 2), ("E", 1)]
    assert all(value > 0 for row in rows for run in row["runs"] for key, value in run.items() if key != "busy_before")
    assert "s from start to first token" in capsys.readouterr().out


def test_events_of_other_servers() -> None:
    """No details of usage, no id first, a last event without text."""
    sample = Sample()
    last = _take(sample, {"choices": [{"text": "a"}], "usage": None}, 0.0, 0.0, 1.0)
    last = _take(sample, {"choices": [{"text": "b", "finish_reason": None}]}, 0.0, last, 1.5)
    last = _take(sample, {"choices": [{"text": "", "finish_reason": "length"}]}, 0.0, last, 9.0)
    _take(sample, {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 3}}, 0.0, last, 9.0)
    assert (sample.ttft, sample.gaps, sample.tokens, sample.prompt, sample.cached) == (1.0, [0.5], 2, 3, 0)


def test_a_run_waits_for_others_to_end() -> None:
    begin = time.monotonic()
    assert 0 <= SETTLE(0.0) <= (os.cpu_count() or 1) and time.monotonic() - begin < 5


def test_a_command_is_timed_until_it_prints() -> None:
    code = "import time; time.sleep(0.2); print('x', flush=True); time.sleep(60)"
    with start(f'{sys.executable} -c "{code}"', "") as started:
        assert 0.2 <= started.seconds < 30 and started.peak_bytes() > 1e6
    assert started.process.returncode is not None
    with pytest.raises(ConfigError, match="code 3 before a token: no model"):
        with start(f"{sys.executable} -c \"import sys; print('no model', file=sys.stderr); sys.exit(3)\"", ""):
            pass
    with pytest.raises(ConfigError, match="cannot be run"), start("/no/such/program", ""):
        pass


@pytest.mark.parametrize(
    "words",
    [
        ["octavo", "--workloads", "F"],
        ["octavo", "--repetitions", "0"],
        ["x=https://h"],
        ["x"],
        ["octavo", "--start", "x"],
    ],
    ids=str,
)
def test_nonsense_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        bench(versus, *words)
