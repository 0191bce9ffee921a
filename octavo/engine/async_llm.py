"""`AsyncLLM`: a model in a process of its own, for asyncio programs and for the server.

    llm = await AsyncLLM.start("folder, .gguf or hub id")
    async for output in llm.generate("Hello, my name is", SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
    await llm.close()

This side does all text: tokenising, detokenising, stop strings. The engine process sees token ids only. Everything
here belongs to one event loop and one thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from octavo.config import EngineConfig, Facts, engine_config
from octavo.engine.channel import ClientEnd
from octavo.engine.client import ModelLimits, build_request, cut_prompt
from octavo.engine.kv_text import kv_text
from octavo.engine.tokenizer import open_tokenizer
from octavo.engine.wire import Abort, Answer, Ask, Beat, Failed, Ready, Refused, Start, Submit, Tokens, unpack
from octavo.env import engine_environment
from octavo.errors import ConfigError, EngineError, ModelError, OctavoError, QueueFull, RequestError
from octavo.metrics.server import EngineNumbers
from octavo.scheduler.records import REASONS, STOP, TokenBatch
from octavo.text.bad_words import bad_sequences
from octavo.text.outputs import RequestText, SampledLogprobs
from octavo.text.tokenizer import Tokenizer
from octavo.types import RequestOutput, SamplingParams
from octavo.weights.fetch import resolve_model

_log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
STEPS = 4.0  # a step takes at most so many times as long as is expected of a full one
_EXIT_ERRORS: dict[int, type[OctavoError]] = {2: ConfigError, 3: ModelError}


class Signal:
    """Wakes one waiter when something has changed since it looked last.

    `listener`, if set, is asked first: True when it took care of the change, and nobody need wake.
    """

    __slots__ = ("_changed", "_waiter", "listener")

    def __init__(self) -> None:
        self.listener: Callable[[], bool] | None = None
        self._changed = False
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Return when `set` was called since the last call. One waiter at a time."""
        if not self._changed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._changed = False

    def set(self) -> None:
        """Something has changed."""
        if self.listener is not None and self.listener():
            return
        self._changed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Stream:
    """One request on its way. `text.output` grows, and `signal` is set each time; or `failure` is set.

    A child's text can be complete before the engine has reported its end (a stop string); `finished` waits for the
    report, which carries the numbers for the usage. Times are of `time.monotonic`. `begun`: when each child got its
    first token; `paces`: for each child that has ended, seconds for each token after that.
    """

    __slots__ = (
        "arrived", "begun", "ended", "failure", "first_token", "last_token", "number", "paces", "running", "signal",
        "text", "tokens",
    )  # fmt: skip

    def __init__(self, number: int, text: RequestText, signal: Signal) -> None:
        self.number = number
        self.text = text
        self.signal = signal
        self.failure: OctavoError | None = None
        self.arrived = text.arrived
        self.first_token = 0.0
        self.last_token = 0.0
        self.ended = 0.0
        self.tokens = 0
        self.running = text.params.n
        self.begun = [0.0] * text.params.n
        self.paces: list[float] = []

    @property
    def finished(self) -> bool:
        """True when nothing more will come."""
        return self.running == 0 or self.failure is not None

    def fail(self, error: OctavoError) -> None:
        """Nothing more will come, because of `error`."""
        if not self.finished:
            self.failure = error
            self.signal.set()


class AsyncLLM:
    """A model and the process that runs it.

    Made by `start`, or by `open` and `launch`. Attributes once it runs: `facts`, `limits`, `numbers` (the engine's
    last ones), `last_sign` (when it last said anything), `tokenizer`, `name`. `failure` is set while there is no
    engine any more, until the next `launch`. `on_tokens` gets requests with the number of their first tokens,
    and for all others seconds since their last tokens, with the number of tokens that came after so long.
    """

    def __init__(self, config: EngineConfig, name: str, tokenizer: Tokenizer) -> None:
        self.config = config
        self.name = name
        self.tokenizer = tokenizer
        self.facts: Facts | None = None
        self.numbers: EngineNumbers | None = None
        self.last_sign = 0.0
        self.load_seconds = 0.0
        self.failure: OctavoError | None = None
        self.on_tokens: Callable[[Sequence[tuple[Stream, int]], Mapping[float, int]], None] | None = None
        self.on_end: Callable[[Stream], None] | None = None
        self.on_numbers: Callable[[EngineNumbers], None] | None = None
        self._limits: ModelLimits | None = None
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ClientEnd | None = None
        self._ready: asyncio.Future[None] | None = None
        self._gone: asyncio.Event = asyncio.Event()

    @classmethod
    def open(cls, config: EngineConfig) -> AsyncLLM:
        """Find the model and load its tokenizer; nothing runs yet. Raises ConfigError, ModelError.

        Reads files and may download some; the engine process then gets their place and looks for nothing again.
        """
        files = resolve_model(config.model.model, config.model.revision, weights=config.model.load_format == "auto")
        found = replace(config, model=replace(config.model, model=str(files.path), revision=None))
        return cls(found, files.name, open_tokenizer(files))

    @classmethod
    async def start(cls, model: str | None = None, **options: Any) -> AsyncLLM:
        """Open a model and run it. Keyword options are the fields of `octavo.config`."""
        config, notices = engine_config(model=model, **options)
        for notice in notices:
            _log.warning("%s", notice)
        llm = await asyncio.to_thread(cls.open, config)
        await llm.launch()
        return llm

    @property
    def limits(self) -> ModelLimits:
        """What requests must keep to."""
        if self._limits is None:
            raise EngineError("The engine is not running.", "Start it.")
        return self._limits

    @property
    def process_id(self) -> int | None:
        """The engine process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def streams(self) -> Sequence[Stream]:
        """Requests that are not finished."""
        return list(self._streams.values())

    async def launch(self) -> None:
        """Start the engine process and wait until it is ready. Raises what kept it from starting."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "octavo.engine.process", str(theirs.fileno())]
        if not sys.flags.debug and sys.flags.optimize:
            command.insert(1, "-" + "O" * sys.flags.optimize)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=engine_environment()
                )
        except OSError as error:
            ours.close()
            raise EngineError(f"The engine process cannot be started: {error}.", "Free memory or files.") from None
        loop = asyncio.get_running_loop()
        self._gone, self.failure, self.numbers = asyncio.Event(), None, None
        self._ready = loop.create_future()
        ours.setblocking(False)
        _, self._channel = await loop.create_unix_connection(
            lambda: ClientEnd(self._on_message, self._on_close), sock=ours
        )
        self._channel.send(Start(self.config, self.tokenizer.eos_ids))
        await self._ready
        if self.tokenizer.vocab_size > self.limits.vocab_size:
            await self.close()
            raise ModelError(
                f"The tokenizer has {self.tokenizer.vocab_size} ids, the model {self.limits.vocab_size}.",
                "Use the tokenizer that belongs to the model.",
            )

    def overdue(self, seconds: float) -> bool:
        """Whether the engine has said nothing for `seconds`, and no step that may still run explains it."""
        numbers = self.numbers
        if numbers is not None and (numbers.running or numbers.waiting):
            seconds += STEPS * numbers.full_step_seconds
        return time.monotonic() - self.last_sign > seconds

    async def gone(self) -> None:
        """Return when the engine process has ended or closed its end."""
        await self._gone.wait()

    async def close(self, seconds: float = 5.0) -> None:
        """End the engine process: ask it, and kill it when it does not go."""
        if self._channel is not None:
            self._channel.close()
        await self._reap(seconds)

    async def kill(self, dump_stacks: bool = False) -> None:
        """End the engine process at once; with `dump_stacks`, it first writes where its threads are to stderr."""
        process = self._process
        if process is not None and process.poll() is None:
            if dump_stacks:  # a stopped process takes signals again only when it is continued
                process.send_signal(signal.SIGUSR1)
                process.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.3)
            process.kill()
        await self._reap(5.0)

    async def _reap(self, seconds: float) -> None:
        process = self._process
        if process is None:
            return
        end = time.monotonic() + seconds
        while process.poll() is None:
            if time.monotonic() > end:
                process.kill()
            await asyncio.sleep(0.01)
        if self._channel is not None:
            self._channel.close()

    def submit(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        salt: str = "",
        tenant: str = "",
        signal: Signal | None = None,
        bad: tuple[tuple[int, ...], ...] | None = None,
        timeout: float = 0.0,
    ) -> Stream:
        """Start one request; raises RequestError when it cannot be served, EngineError when the engine is gone.

        Several requests may share a `signal`. `bad`: `bad_sequences` of the bad words, if they are known already.
        timeout: what is left of a deadline, in seconds; 0: as `params` say.
        """
        if self.failure is not None or self._channel is None:
            raise self.failure or EngineError("The engine is not running.", "Start it.")
        number = next(self._numbers)
        ids = cut_prompt(ids, params, self.limits)
        if bad is None:
            bad = bad_sequences(params.bad_words or (), self.tokenizer)
        request = build_request(number, ids, params, self.limits, salt, bad)
        request = msgspec.structs.replace(request, tenant=tenant, timeout=timeout or request.timeout)
        text = RequestText(str(number), prompt, ids, params, self.tokenizer)
        stream = Stream(number, text, signal or Signal())
        self._streams[number] = stream
        self._channel.send(Submit(request))
        return stream

    def abort(self, stream: Stream, reason: str = "abort") -> None:
        """End a request that nobody wants any more; its children that still run end with this reason."""
        if self._streams.pop(stream.number, None) is not None:
            if self._channel is not None:
                self._channel.send(Abort(stream.number, -1))
            for child in range(stream.text.params.n):
                stream.text.end(child, reason)
            stream.running = 0
            self._end(stream)
            stream.signal.set()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """Yield the growing result of one prompt, text or token ids. Closing the iterator ends the request."""
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        params = params or SamplingParams()
        bad = None
        if params.bad_words:
            bad = await asyncio.to_thread(bad_sequences, params.bad_words, self.tokenizer)
        stream = self.submit(ids, params, prompt=text, salt=cache_salt, bad=bad)
        try:
            while not stream.finished:
                await stream.signal.wait()
                if stream.failure is not None:
                    raise stream.failure
                yield stream.text.snapshot()
        finally:
            self.abort(stream)

    async def kv_text(self) -> str:
        """The engine's KV cache now, as lines to read."""
        return kv_text(await self.kv_state())

    async def kv_state(self) -> dict[str, Any]:
        """The engine's KV cache now (see `octavo.engine.inspect`)."""
        if self.failure is not None or self._channel is None:
            raise self.failure or EngineError("The engine is not running.", "Start it.")
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._channel.send(Ask(number))
        try:
            return await future
        finally:
            self._answers.pop(number, None)

    def _on_message(self, message: Any) -> None:
        self.last_sign = time.monotonic()
        if isinstance(message, Tokens):
            self._take_in(unpack(message))
        elif isinstance(message, Beat):
            self.numbers = message.numbers
            if self.on_numbers is not None:
                self.on_numbers(message.numbers)
        elif isinstance(message, Refused):
            stream = self._streams.pop(message.id, None)
            if stream is not None:
                kind = QueueFull if message.full else RequestError
                stream.fail(kind(message.cause, message.fix, message.param))
                self._end(stream)
        elif isinstance(message, Answer):
            future = self._answers.get(message.id)
            if future is not None and not future.done():
                future.set_result(message.data)
        elif isinstance(message, Ready):
            self.facts, self._limits = message.facts, message.limits
            self.load_seconds = message.load_seconds
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
        elif isinstance(message, Failed):
            self.failure = _EXIT_ERRORS.get(message.exit_code, EngineError)(message.cause, message.fix)

    def _on_close(self, reason: Exception | None) -> None:
        if self.failure is None:
            self.failure = EngineError("The engine process is gone.", "See the log; the server starts it again.")
        for stream in self._streams.values():
            stream.fail(self.failure)
            self._end(stream)
        self._streams.clear()
        waiting: list[asyncio.Future[Any]] = [*self._answers.values(), *([self._ready] if self._ready else [])]
        for future in waiting:
            if not future.done():
                future.set_exception(self.failure)
        self._channel = None
        self._gone.set()

    def _take_in(self, batch: TokenBatch) -> None:
        """New tokens become text; every stream that changed is woken once."""
        now = self.last_sign
        streams, stops = self._streams, {(e.request_id, e.child) for e in batch.ended if e.reason == STOP}
        touched: dict[Stream, int] = {}
        logprobs = batch.logprobs
        for number, first, entries in batch.prompts:
            if number in streams:
                streams[number].text.push_prompt(first, cast(Sequence[SampledLogprobs], entries))
        rows = zip(batch.request_id.tolist(), batch.child.tolist(), batch.token.tolist(), strict=True)
        for i, (number, child, token) in enumerate(rows):
            stream = streams.get(number)
            if stream is None or stream.text.output.outputs[child].finish_reason is not None:
                continue
            touched[stream] = touched.get(stream, 0) + 1
            stream.begun[child] = stream.begun[child] or now
            found: Any = logprobs.get(i) if logprobs else None
            if stream.text.push(child, token, found, ends=(number, child) in stops) and self._channel is not None:
                self._channel.send(Abort(number, child))
        for end in batch.ended:
            stream = streams.get(end.request_id)
            if stream is None:
                continue
            touched.setdefault(stream, 0)
            stream.text.report(end, REASONS[end.reason])
            stream.running -= 1
            count = len(stream.text.output.outputs[end.child].token_ids)
            if count > 1:
                stream.paces.append((now - stream.begun[end.child]) / (count - 1))
        self._wake(touched, now)

    def _wake(self, touched: Mapping[Stream, int], now: float) -> None:
        """Keep the times of streams that got so many tokens, and tell who waits for them."""
        begun: list[tuple[Stream, int]] = []
        gaps: dict[float, int] = {}
        for stream, count in touched.items():
            if count:
                if stream.last_token:
                    gap = now - stream.last_token
                    gaps[gap] = gaps.get(gap, 0) + count
                else:
                    stream.first_token = now
                    begun.append((stream, count))
                stream.last_token = now
                stream.tokens += count
        if self.on_tokens is not None and (begun or gaps):
            self.on_tokens(begun, gaps)
        for stream in touched:
            if stream.finished:
                self._streams.pop(stream.number, None)
                self._end(stream)
            stream.signal.set()

    def _end(self, stream: Stream) -> None:
        stream.ended = stream.ended or time.monotonic()
        stream.text.timed(stream.first_token, stream.last_token, stream.ended)
        if self.on_end is not None:
            self.on_end(stream)
