"""The engine process's signs of life, without a process: what is said when, and what a client makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine import async_llm, process
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.client import build_request
from octavo.engine.fake import fake_engine
from octavo.engine.process import FIRST_STEP, EngineProcess
from octavo.engine.wire import Beat, Submit
from octavo.types import SamplingParams

CONFIG = EngineConfig(ModelConfig(load_format="fake"), scheduler=SchedulerConfig(max_num_batched_tokens=512))


class Script:
    """A channel that brings what it was given, one list at a time, and then closes."""

    def __init__(self, *arrivals: list[Any]) -> None:
        self.arrivals = list(arrivals)
        self.sent: list[Any] = []
        self.flushed = 0
        self.closed = False

    def receive(self, seconds: float) -> list[Any]:
        if not self.arrivals:
            self.closed = True
            return []
        return self.arrivals.pop(0)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def flush(self) -> None:
        self.flushed = len(self.sent)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(process.time, "monotonic", lambda: self.now)


def test_a_step_is_announced_and_its_length_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    engine = fake_engine(CONFIG, ())
    request = build_request(1, [5] * 100, SamplingParams(max_tokens=3), engine.limits)
    script = Script([], [Submit(request)], [], [], [], [])
    steps, seen = engine.loop.step, []

    def step() -> Any:
        seen.append((script.sent[-1], script.flushed == len(script.sent)))
        clock.now += 50.0
        return steps()

    monkeypatch.setattr(engine.loop, "step", step)
    EngineProcess(engine, script).run()  # type: ignore[arg-type]
    beats = [message.numbers for message in script.sent if isinstance(message, Beat)]
    first, flushed = seen[0]
    assert isinstance(first, Beat) and flushed and first.numbers.waiting == 1
    assert beats[0].running == beats[0].waiting == 0 and beats[-1].running == beats[-1].waiting == 0
    assert first.numbers.full_step_seconds == FIRST_STEP
    assert beats[-1].full_step_seconds == pytest.approx(50.0 * 512 / 101, rel=0.02)
    assert len(seen) == 3


@pytest.mark.parametrize(("running", "limit"), [(0, 5.0), (1, 5.0 + 4 * 50.0)])
def test_a_client_is_patient_while_there_is_work(monkeypatch: pytest.MonkeyPatch, running: int, limit: float) -> None:
    clock = Clock(monkeypatch)
    llm = AsyncLLM(CONFIG, "m", None)  # type: ignore[arg-type]
    numbers = process.EngineNumbers(running, 0, 0, 0, 0, 0, 0.0, {}, 50.0)
    assert async_llm.STEPS == 4
    llm._on_message(Beat(numbers))
    clock.now += limit
    assert not llm.overdue(5.0)
    clock.now += 0.01
    assert llm.overdue(5.0)
