"""AsyncLLM on the fake engine: streams, stop strings, aborts, refusals, and what happens when the process dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octavo.engine import async_llm
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import ConfigError, EngineError, ModelError, RequestError
from octavo.types import RequestOutput, SamplingParams
from octavo.weights.fetch import resolve_model

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def run(use: Callable[[AsyncLLM], Awaitable[None]], **options: object) -> None:
    async def body() -> None:
        llm = await AsyncLLM.start(**{"load_format": "fake", "max_model_len": 512} | options)
        try:
            await asyncio.wait_for(use(llm), 20)
        finally:
            await llm.close()
        assert llm._process is not None and llm._process.returncode is not None

    asyncio.run(body())


async def last(llm: AsyncLLM, prompt: str, params: SamplingParams) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params)][-1]


def test_results_grow_and_are_repeatable() -> None:
    async def use(llm: AsyncLLM) -> None:
        seen = []
        async for output in llm.generate("Hello there", GREEDY):
            seen.append(output.outputs[0].text)
        assert all(b.startswith(a) for a, b in zip(seen, seen[1:], strict=False))
        assert output.finished and output.outputs[0].finish_reason == "length"
        many = await asyncio.gather(*(last(llm, "Hello there", GREEDY) for _ in range(20)))
        assert {item.outputs[0].text for item in many} == {seen[-1]}
        text = seen[-1]
        stopped = await last(llm, "Hello there", SamplingParams(temperature=0, max_tokens=12, stop=[text[6:9]]))
        assert stopped.outputs[0].text == text[: text.index(text[6:9])]
        assert stopped.outputs[0].stop_reason == text[6:9] and llm.streams == []

    run(use)


def test_closing_the_iterator_ends_the_request() -> None:
    async def use(llm: AsyncLLM) -> None:
        iterator = llm.generate("x", SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(iterator)
        assert len(llm.streams) == 1
        await iterator.aclose()
        state = await llm.kv_state()
        while state["tables"]:
            state = await llm.kv_state()
        assert state["free_blocks"] == state["total_blocks"]

    run(use, load_format="fake:5")


def test_refusals_on_both_sides() -> None:
    async def use(llm: AsyncLLM) -> None:
        for prompt in ("", [], [-1], [1 << 20], [5] * 512):
            with pytest.raises(RequestError):
                await last(llm, prompt, GREEDY)  # type: ignore[arg-type]
        assert (await last(llm, "fine", GREEDY)).finished

    run(use)


def test_a_dead_engine_fails_what_runs_and_can_be_started_again() -> None:
    async def use(llm: AsyncLLM) -> None:
        waiting = [
            asyncio.create_task(last(llm, "x", SamplingParams(max_tokens=400, ignore_eos=True))) for _ in range(3)
        ]
        while len(llm.streams) < 3:
            await asyncio.sleep(0.01)
        await llm.kill()
        for task in waiting:
            with pytest.raises(EngineError):
                await task
        await asyncio.wait_for(llm.gone(), 5)
        with pytest.raises(EngineError):
            await last(llm, "x", GREEDY)
        with pytest.raises(EngineError):
            await llm.kv_state()
        await llm.launch()
        assert (await last(llm, "x", GREEDY)).finished

    run(use, load_format="fake:5")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"block_size": 7}, ConfigError),
        ({"max_model_len": 1 << 30}, ConfigError),
        ({"banana": 1}, ConfigError),
        ({"model": "/nowhere"}, ModelError),
    ],
)
def test_what_cannot_start_raises_and_leaves_no_process(options: dict[str, object], error: type[Exception]) -> None:
    async def body() -> None:
        with pytest.raises(error):
            await AsyncLLM.start(**{"load_format": "fake"} | options)  # type: ignore[arg-type]

    asyncio.run(body())


def test_the_model_is_found_once_and_not_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine process gets the place of the files, whatever the name was."""
    seen: list[bool] = []

    def resolve(*args: Any, **kwargs: Any) -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return resolve_model(*args, **kwargs)

    async def launch(self: AsyncLLM) -> None:
        """No process."""

    monkeypatch.setattr(async_llm, "resolve_model", resolve)
    monkeypatch.setattr(AsyncLLM, "launch", launch)
    llm = asyncio.run(AsyncLLM.start(load_format="fake"))
    files = resolve_model(None)
    assert seen == [False] and llm.name == files.name
    assert (llm.config.model.model, llm.config.model.revision) == (str(files.path), None)
    assert resolve_model(llm.config.model.model).path == files.path
