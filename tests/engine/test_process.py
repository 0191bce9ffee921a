"""The engine process's signs of life, without a process: what is said when, and what a client makes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.config import EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine import async_llm, process
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.client import build_request
from octavo.engine.fake import fake_engine
from octavo.engine.process import FIRST_STEP, EngineProcess
from octavo.engine.wire import Beat, Refused, Submit, Tokens, unpack
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


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": b""}, {"prompt": b"abc"}, {"prompt": b"\5\0\0\0\5"}, {"id": 1 << 63}, {"id": -1}, {"n": 0},
        {"n": 65},
        {"temperature": NAN}, {"temperature": INF}, {"temperature": -1.0}, {"temperature": 1e39}, {"top_p": 0.0},
        {"top_p": NAN}, {"top_p": 1.5}, {"min_p": NAN}, {"min_p": -0.1}, {"top_k": -1}, {"seed": -1},
        {"seed": 1 << 64},
        {"logprobs": 1 << 20}, {"logprobs": -2}, {"prompt_logprobs": 1 << 20}, {"repetition_penalty": 0.0},
        {"repetition_penalty": NAN}, {"presence_penalty": 3.0}, {"frequency_penalty": -INF}, {"min_tokens": -1},
        {"bias": ((1,), (NAN,))}, {"bias": ((1,), ())}, {"bad": ((),)}, {"allowed": (-1,)}, {"stop_ids": (1 << 40,)},
        {"beam": True, "n": 2, "logprobs": 4}, {"keys": b"x"}, {"limit": 1}, {"priority": 1 << 40},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_request_is_refused_and_the_engine_goes_on(wrong: dict[str, Any]) -> None:
    """Whatever a client sends in a well-formed message."""
    engine = fake_engine(CONFIG, ())
    good = build_request(2, [5] * 20, SamplingParams(max_tokens=2), engine.limits)
    bad = msgspec.structs.replace(good, **{"id": 1} | wrong)
    script = Script([Submit(bad), Submit(good)], [], [], [])
    EngineProcess(engine, script).run()  # type: ignore[arg-type]
    (refusal,) = (message for message in script.sent if isinstance(message, Refused))
    assert refusal.id == bad.id and refusal.cause and refusal.fix
    batches = [unpack(message) for message in script.sent if isinstance(message, Tokens)]
    assert sum(len(batch.token) for batch in batches) == 2 and not engine.scheduler.has_work()
