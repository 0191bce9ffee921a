"""What routes do before and after the engine, on a stub: text work outside the event loop, seats, answers' ends."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM, Signal, Stream
from octavo.engine.wire import pack
from octavo.errors import EngineError
from octavo.metrics.server import ServerMetrics
from octavo.scheduler.records import LENGTH, Ended, TokenBatch
from octavo.server import service as service_module
from octavo.server.supervise import Server
from octavo.text.bad_words import bad_sequences
from octavo.text.outputs import RequestText
from octavo.text.tokenizer import Tokenizer
from octavo.types import SamplingParams
from octavo.weights.gguf import GgufCheckpoint
from tests.server.stub import ask, make


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Any) -> Tokenizer:
    return Tokenizer.from_gguf(GgufCheckpoint(smollm2_gguf).metadata)


def test_bad_words_are_spelled_once_and_not_on_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[threading.Thread] = []

    def spell(*args: Any) -> Any:
        seen.append(threading.current_thread())
        return bad_sequences(*args)

    monkeypatch.setattr(service_module, "bad_sequences", spell)
    service = make(tokenizer)
    body = {"prompt": ["a", "b", "c"], "bad_words": ["word"]}
    assert asyncio.run(ask(service, "/v1/completions", body))[0] == 200
    assert len(seen) == 1 and seen[0] is not threading.main_thread()
    wanted = bad_sequences(["word"], tokenizer)
    assert [request["bad"] for request in service.llm.submitted] == [wanted] * 3  # type: ignore[attr-defined]
    status, data = asyncio.run(ask(service, "/v1/completions", {"prompt": "a", "bad_words": ["a" * 64] * 64}))
    assert status == 400 and json.loads(data)["error"]["param"] == "bad_words" and service.gate.taken == 0


def test_long_tools_documents_and_variables_are_rendered_in_a_thread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def render(*args: Any, **kwargs: Any) -> str:
        seen.append(threading.current_thread() is threading.main_thread())
        return "x"

    monkeypatch.setattr(service_module, "render_chat", render)
    service, long = make(tokenizer), "x" * service_module.INLINE_CHARS
    for fields, here in (
        ({}, True),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": long}}]}, False),
        ({"documents": [{"text": long}]}, False),
        ({"chat_template_kwargs": {"a": {"b": [long]}}}, False),
        ({"chat_template_kwargs": {long: 1}}, False),
    ):
        body = {"messages": [{"role": "user", "content": "a"}], **fields}
        assert asyncio.run(ask(service, "/v1/chat/completions", body))[0] == 200
        assert seen.pop() == here


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_work_on_text_takes_a_seat(tokenizer: Tokenizer, path: str) -> None:
    service = make(tokenizer, queue=0)
    body = {"prompt": "Hello"} if path == "/tokenize" else {"tokens": [9]}
    taken = []
    work = service.work

    async def watch(size: int, task: Any) -> Any:
        taken.append(service.gate.taken)
        return await work(size, task)

    service.work = watch  # type: ignore[method-assign]
    assert asyncio.run(ask(service, path, body))[0] == 200 and taken == [1] and service.gate.taken == 0
    assert asyncio.run(ask(service, path, {"prompt": "x", "tokens": [-1], "messages": []}))[0] == 400
    service.gate.take(8)
    assert asyncio.run(ask(service, path, body))[0] == 429 and service.gate.taken == 8
    service.gate.closed = "The end."
    assert asyncio.run(ask(service, path, body))[0] == 503


DEMO = {"prompt": "Say", "stream": True}


def test_a_demo_stream_has_everything_however_slow_its_reader_is(tokenizer: Tokenizer) -> None:
    """What comes, and ends, while a part is being sent is sent too."""
    service = make(tokenizer)
    llm: Any = service.llm
    streams: list[Any] = []

    def begin(stream: Any) -> None:
        streams.append(stream)
        stream.text.push(0, 9, None, ends=False)
        stream.signal.set()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and message["more_body"]:
            llm.finish(streams[0])  # while this part is on its way
            await asyncio.sleep(0)

    llm.play = begin
    status, data = asyncio.run(ask(service, "/generate", DEMO, send))
    parts = [json.loads(part)["text"] for part in data.split(b"\0")[:-1]]
    want = tokenizer.decode([9, *llm.answer])
    assert status == 200 and parts == [["Say" + tokenizer.decode([9])], ["Say" + want]]


def test_a_demo_stream_that_fails_says_so(tokenizer: Tokenizer) -> None:
    service = make(tokenizer)
    llm: Any = service.llm

    def begin(stream: Any) -> None:
        stream.text.push(0, 9, None, ends=False)
        stream.signal.set()
        asyncio.get_running_loop().call_later(0.05, stream.fail, EngineError("gone"))

    llm.play = begin
    status, data = asyncio.run(ask(service, "/generate", DEMO))
    *_, last, rest = data.split(b"\0")
    assert status == 200 and rest == b"" and json.loads(last)["error"]["type"] == "unavailable_error"
    assert service.gate.taken == 0 and not service.jobs


def test_paces_are_counted_for_each_sequence(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sequences of one request that get a token a second each do not count as one that gets four."""
    llm = AsyncLLM(EngineConfig(), "m", tokenizer)
    metrics, now = ServerMetrics(), 100.0
    server: Any = SimpleNamespace(_metrics=metrics)
    llm.on_tokens = lambda *args: Server._on_tokens(server, *args)
    llm.on_end = lambda stream: Server._on_end(server, stream)
    monkeypatch.setattr("octavo.engine.async_llm.time.monotonic", lambda: now)
    stream = Stream(1, RequestText("1", None, [5], SamplingParams(n=4, max_tokens=None), tokenizer), Signal())
    llm._streams[1] = stream
    for step in range(9):
        children = [child for child in range(4) if step < 9 - child]
        rows = (np.ones(len(children), np.int64), np.array(children), np.full(len(children), 300))
        ends = [Ended(1, child, LENGTH, 0, 0) for child in children if step == 8 - child]
        llm._on_message(pack(TokenBatch(*rows, ends)))
        now += 1.0
    assert stream.paces == [1.0] * 4 and stream.finished
    assert (sum(metrics.tpot.counts), metrics.tpot.sum) == (4, 4.0)
    assert (sum(metrics.itl.counts), metrics.itl.sum) == (26, 26.0)


def events(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize("chat", [False, True])
def test_streams_have_usage_and_prompt_ids_when_asked(tokenizer: Tokenizer, chat: bool) -> None:
    service = make(tokenizer)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": [[5, 6], [7]]}
    body |= {"stream": True, "n": 2, "return_token_ids": True, "stream_options": {"continuous_usage_stats": True}}
    made = events(asyncio.run(ask(service, path, body))[1])
    prompts = [list(request["ids"]) for request in service.llm.submitted]  # type: ignore[attr-defined]
    assert len(made) == 2 * len(prompts)
    for event in made:
        (choice,) = event["choices"]
        assert event["prompt_token_ids"] == prompts[choice["index"] // 2] and choice["token_ids"] == [9, 8, 7]
        assert event["usage"]["completion_tokens"] == 3 * len(made)
    assert all("usage" not in e for e in events(asyncio.run(ask(service, path, body | {"stream_options": None}))[1]))


def test_reasoning_effort_reaches_the_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("{{ reasoning_effort }}")
    service = make(tokenizer, chat_template=str(template))
    body = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "high"}
    for fields in ({}, {"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"}):
        assert asyncio.run(ask(service, "/v1/chat/completions", body | fields))[0] == 200
    asked = [tokenizer.decode(request["ids"]) for request in service.llm.submitted]  # type: ignore[attr-defined]
    assert asked == ["high", "high"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 2), ("logprobs", 0), ("prompt_logprobs", 1), ("return_token_ids", True), ("echo", False),
        ("return_tokens_as_token_ids", True), ("stream_options", {"include_usage": True}), ("chunk_size", 2),
        ("stream_interval", 2), ("model", "other"),
    ],
)  # fmt: skip
def test_the_demo_route_refuses_what_it_cannot_show(tokenizer: Tokenizer, name: str, value: Any) -> None:
    service = make(tokenizer)
    status, data = asyncio.run(ask(service, "/generate", {"prompt": "a", name: value}))
    assert status == (404 if name == "model" else 400) and name in json.loads(data)["error"]["message"]
    neutral = {"echo": True, "return_token_ids": False, "logprobs": None, "model": "stub"}
    assert asyncio.run(ask(service, "/generate", {"prompt": "a"} | neutral))[0] == 200


def test_an_answer_that_goes_round_in_circles_ends_with_its_own_reason(tokenizer: Tokenizer) -> None:
    service = make(tokenizer)
    llm: Any = service.llm
    llm.answer = [9, 8, 7, 300, 301, 300, 301, 300, 301, 5, 5]
    guard = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
    body = {"prompt": "a", "max_tokens": 99, "repetition_detection": guard, "return_token_ids": True}
    status, data = asyncio.run(ask(service, "/v1/completions", body))
    (choice,) = json.loads(data)["choices"]
    assert (status, choice["finish_reason"]) == (200, "repetition") and choice["token_ids"] == llm.answer[:9]
    (event,) = events(asyncio.run(ask(service, "/v1/completions", body | {"stream": True}))[1])
    assert event["choices"][0]["finish_reason"] == "repetition"
    for wrong in ({"min_count": 1}, {"max_pattern_size": 0}, {"min_pattern_size": 17}, {"min_count": "x"}, 5, [1]):
        status, data = asyncio.run(ask(service, "/v1/completions", body | {"repetition_detection": wrong}))
        assert status == 400, wrong
