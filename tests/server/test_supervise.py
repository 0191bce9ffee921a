"""The life of a server, one decision at a time and without processes; `test_life.py` has the whole."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any
from unittest.mock import Mock

import pytest

from octavo.config import EngineConfig, ModelConfig, ServerConfig
from octavo.errors import ConfigError, EngineError
from octavo.server import supervise
from octavo.server.auth import Keys
from octavo.server.supervise import CUT_SHORT, ENGINE_DIED, Server, bind

FAKE = EngineConfig(ModelConfig(load_format="fake"))


def make(**options: Any) -> Server:
    return Server(FAKE, ServerConfig(**options), Keys())


def run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body, 10))


def test_a_port_that_another_server_listens_on_by_now() -> None:
    """Both could bind it, because neither listened before its model was loaded."""

    async def body() -> int:
        server = make()

        async def load(limit: float | None = None) -> bool:
            return True

        server._load = load  # type: ignore[method-assign]
        return await server.run(second)

    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(ConfigError, match="cannot be listened on"):
            run(body())


def test_an_http_server_that_ends_by_itself_ends_the_process() -> None:
    async def fail() -> None:
        raise OSError("no listener")

    async def body() -> int:
        return await make()._live(asyncio.create_task(fail()))

    assert run(body()) == ENGINE_DIED


def test_an_engine_that_hangs_while_it_loads_again_is_ended() -> None:
    async def body() -> list[bool]:
        server, kills = make(supervise=True, watchdog_timeout=0.05), []

        async def launch() -> None:
            await asyncio.get_running_loop().create_future()

        async def kill(dump_stacks: bool = False) -> None:
            kills.append(dump_stacks)

        server._llm.launch = launch  # type: ignore[method-assign]
        server._llm.kill = kill  # type: ignore[method-assign]
        await server._start_again()
        return kills

    assert run(body()) == [True]


def test_a_machine_without_room_for_a_process_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pause that grows, and not for ever."""
    pauses, tries = [], 0
    sleep = asyncio.sleep

    def start(*args: Any, **kwargs: Any) -> Any:
        nonlocal tries
        tries += 1
        raise OSError(11, "Resource temporarily unavailable")

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def body() -> int:
        server = make(supervise=True)
        with pytest.raises(EngineError, match="temporarily"):
            await server._llm.launch()
        server._llm._gone.set()
        server._watch = asyncio.Event().wait  # type: ignore[method-assign,assignment]
        monkeypatch.setattr(supervise.asyncio, "sleep", pause)
        return await server._live(asyncio.create_task(asyncio.Event().wait()))  # type: ignore[arg-type]

    monkeypatch.setattr(subprocess, "Popen", start)
    assert run(body()) == ENGINE_DIED and tries == 1 + supervise.MAX_RESTARTS
    assert pauses[:5] == [0.25, 0.5, 1.0, 2.0, 4.0]


def test_a_second_signal_does_not_wait_for_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes nothing holds its job open; the time to drain is not waited for."""

    async def body() -> int:
        server = make(shutdown_timeout=600.0)
        server._service.jobs.add(Mock())
        server._signals = 2
        return await server._drain()

    monkeypatch.setattr(supervise, "CUT_SECONDS", 0.05)
    assert run(body()) == CUT_SHORT
