"""The application without processes: a stub in the place of the engine, and one request at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from octavo.config import EngineConfig, SchedulerConfig, ServerConfig
from octavo.engine.async_llm import Signal, Stream
from octavo.engine.client import ModelLimits
from octavo.metrics.server import EngineNumbers, ServerMetrics
from octavo.server.app import build_app
from octavo.server.auth import Keys
from octavo.server.service import Service
from octavo.text.outputs import RequestText
from octavo.text.tokenizer import Tokenizer
from octavo.types import SamplingParams


class StubLLM:
    """As much of an `AsyncLLM` as the routes use. Every request gets the tokens of `answer`, at once, and ends.

    submitted: what was asked of it. `play`, when set, is called with each stream instead.
    """

    name = "stub"
    failure: Any = None

    def __init__(self, tokenizer: Tokenizer, answer: Sequence[int] = (9, 8, 7), queue: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.config = EngineConfig(scheduler=SchedulerConfig(max_num_queued_reqs=queue))
        self.limits = ModelLimits(tokenizer.vocab_size, 4096, 16, (), False)
        self.facts = SimpleNamespace(max_model_len=4096)
        self.answer = answer
        self.submitted: list[dict[str, Any]] = []
        self.play: Callable[[Stream], None] | None = None
        self.numbers: EngineNumbers | None = None

    def submit(
        self, ids: Sequence[int], params: SamplingParams, *, prompt: str | None, signal: Signal, **rest: Any
    ) -> Stream:
        self.submitted.append({"ids": ids, "params": params, **rest})
        stream = Stream(1, RequestText("1", prompt, ids, params, self.tokenizer), signal)
        (self.play or self.finish)(stream)
        return stream

    def finish(self, stream: Stream, reason: str = "length") -> None:
        """The whole answer for every child."""
        for child in range(stream.text.params.n):
            for token in self.answer:
                stream.text.push(child, token, None, ends=False)
            stream.text.end(child, reason)
        stream.running = 0
        stream.signal.set()

    def abort(self, stream: Stream, reason: str = "abort") -> None:
        stream.running = 0

    def overdue(self, seconds: float) -> bool:
        return False


def make(tokenizer: Tokenizer, *, queue: int | None = None, **options: Any) -> Service:
    """A service on a stub, with 8 sequences at a time."""
    service = Service(StubLLM(tokenizer, queue=queue), ServerConfig(**options), ServerMetrics())  # type: ignore[arg-type]
    service.gate.running = 8
    return service


async def ask(service: Service, path: str, body: Any, send: Callable[[Any], Awaitable[None]] | None = None) -> Any:
    """Status and body of the answer to one request. `send` sees every message of it first."""
    data = json.dumps(body).encode()
    sent: list[Any] = []
    bodies = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if bodies:
            return bodies.pop()
        return await asyncio.get_running_loop().create_future()

    async def record(message: Any) -> None:
        if send is not None:
            await send(message)
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": b"", "state": {}, "http_version": "1.1",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    }  # fmt: skip
    await asyncio.wait_for(build_app(service, Keys(), False)(scope, receive, record), 20)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)
