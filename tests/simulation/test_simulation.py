"""The simulator as a merge gate: many seeds, every invariant after every step, and the runs that once failed.

A seed that fails is kept for good: its shrunk trace goes to `traces/` (`octavo bench simulate --traces`), and stays
there after the repair. Longer runs are behind markers: `pytest -m slow tests/simulation`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from octavo.bench.sim.case import Trace
from octavo.bench.simulate import Failure as SimulationFailure
from octavo.bench.simulate import Tally, replay, report, run_seed, shrink, spread
from octavo.runner.fake import FakeRunner

TRACES = sorted(Path(__file__).with_name("traces").glob("*.json"))


@pytest.fixture(autouse=True)
def quiet():
    """Injected faults are no news."""
    logging.getLogger("octavo.engine.loop").setLevel(logging.CRITICAL)


def check(tally: Tally, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("\n" + report(tally))
    assert not tally.failures
    per_million = 1e6 / tally.steps
    assert tally.counts["preemptions"] * per_million >= 20_000
    assert tally.counts["aborts"] * per_million >= 20_000
    for name in ("block_copies", "forks", "errors", "refused", "evictions", "prefix_hit_tokens"):
        assert tally.counts[name] >= 10, f"{name} never happened"


def test_300_000_steps(capsys):
    """120 seeds on two processes; the last digits of the seeds are worlds that nobody has chosen."""
    tally = spread(range(120), 2500, jobs=2)
    check(tally, capsys)
    assert tally.steps >= 300_000 and tally.seeds >= 100


@pytest.mark.slow
def test_1_000_000_steps(capsys):
    tally = spread(range(10_000, 10_400), 2500, jobs=2)
    check(tally, capsys)
    assert tally.steps >= 1_000_000


@pytest.mark.slow
@pytest.mark.skipif("not config.getoption('--longest')", reason="most of an hour; --longest runs it")
def test_10_000_000_steps(capsys):
    tally = spread(range(100_000, 104_000), 2500, jobs=2)
    check(tally, capsys)
    assert tally.steps >= 10_000_000


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_what_failed_once_does_not_fail_again(path):
    failure = replay(msgspec.json.decode(path.read_bytes(), type=Trace))
    assert failure is None, str(failure)


def test_a_seed_gives_the_same_run_again():
    first, second = run_seed(5, 300), run_seed(5, 300)
    assert first.now == second.now
    assert first.scheduler.stats == second.scheduler.stats
    assert first.finished == second.finished


def test_a_failure_is_shrunk_to_a_trace_that_replays(monkeypatch, tmp_path):
    """A runner that forgets one copy: the trace has few events, and goes through a file."""
    move = FakeRunner._move_blocks

    def forgetful(self, plan):
        plan.copies = plan.copies[1:]
        move(self, plan)

    monkeypatch.setattr(FakeRunner, "_move_blocks", forgetful)
    for seed in range(20):
        try:
            run_seed(seed, 300)
        except SimulationFailure as caught:
            trace = caught.trace
            break
    else:
        pytest.fail("nobody noticed")
    small = shrink(trace)
    assert 1 <= len(small.events) <= min(6, len(trace.events))
    path = tmp_path / "trace.json"
    path.write_bytes(msgspec.json.encode(small))
    again = msgspec.json.decode(path.read_bytes(), type=Trace)
    failure = replay(again)
    assert failure is not None and failure.trace.steps == small.steps
    monkeypatch.setattr(FakeRunner, "_move_blocks", move)
    assert replay(again) is None
