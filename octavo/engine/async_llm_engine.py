"""`AsyncLLMEngine`: `AsyncLLM` in vLLM's old spelling, for scripts that were written for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from octavo.engine.async_llm import AsyncLLM, Stream
from octavo.engine.llm_engine import AsyncEngineArgs
from octavo.errors import RequestError
from octavo.types import RequestOutput, SamplingParams


class AsyncLLMEngine:
    """An engine process that starts with the first request. Ends with `shutdown`."""

    def __init__(self, args: AsyncEngineArgs) -> None:
        self._args = args
        self._llm: AsyncLLM | None = None
        self._starting = asyncio.Lock()
        self._streams: dict[str, Stream] = {}

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs) -> AsyncLLMEngine:
        """An engine with these options; ConfigError and ModelError come with the first request."""
        return cls(args)

    async def generate(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Yield the growing result of one prompt; closing the iterator ends it. RequestError for a taken id."""
        async with self._starting:
            if self._llm is None:
                self._llm = await AsyncLLM.start(self._args.model, **self._args.options)
        if request_id in self._streams:
            raise RequestError(f"Request {request_id!r} is running already.", "Use another id.", "request_id")
        llm, text = self._llm, prompt if isinstance(prompt, str) else None
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        stream = self._streams[request_id] = llm.submit(ids, sampling_params, prompt=text)
        try:
            finished = False
            while not finished:
                await stream.signal.wait()
                if stream.failure is not None:
                    raise stream.failure
                output = stream.text.snapshot()
                output.request_id, finished = request_id, output.finished
                yield output
        finally:
            del self._streams[request_id]
            llm.abort(stream)

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator gives a last result with finish reason "abort". Unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None and self._llm is not None:
            self._llm.abort(stream)

    async def shutdown(self) -> None:
        """End the engine process."""
        if self._llm is not None:
            await self._llm.close()
            self._llm = None
