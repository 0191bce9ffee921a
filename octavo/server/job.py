"""One request of a client under way: its seats, its streams in the engine, its deadline, and its end.

    job = Job(service, ...)          # takes the seats; raises Problem
    try:
        job.submit(...)              # for each prompt
        ... await job.changed() ...  # until job.finished
    finally:
        job.close()

Whatever ends it (all tokens there, an error, the deadline, a client that went away), `close` ends what still runs in
the engine and gives the seats back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Receive

from octavo.engine.async_llm import AsyncLLM, Signal, Stream
from octavo.errors import OctavoError, QueueFull
from octavo.server.admit import Gate
from octavo.server.problem import Problem, problem_of
from octavo.types import CompletionOutput, SamplingParams

BadWords = tuple[tuple[int, ...], ...]  # as token sequences


class ClientGone(Exception):
    """The client closed the connection."""


class Job:
    """See the module's contract. `streams`: one for each prompt, `params.n` choices each."""

    def __init__(self, llm: AsyncLLM, gate: Gate, route: str, params: SamplingParams, prompts: int) -> None:
        seats = params.n * prompts
        gate.take(seats)
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.route = route
        self.params = params
        self.streams: list[Stream] = []
        self.only_prompt = False  # the prompt is to be scored: the one token that was generated is nobody's
        self.failure: Problem | ClientGone | None = None
        self.on_close: Callable[[Job], None] | None = None
        self._llm = llm
        self._gate = gate
        self._seats = seats
        self._begin = time.monotonic()
        self._signal = Signal()
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = 0.0  # that it may take; 0: any
        self._watch: asyncio.Task[None] | None = None

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    @property
    def finished(self) -> bool:
        """True when nothing more will come."""
        if self.failure is not None:
            return True
        for stream in self.streams:
            if not stream.finished:
                return False
        return True

    @property
    def choices(self) -> list[tuple[int, Stream, CompletionOutput]]:
        """Index, stream and result of every choice, in order."""
        n = self.params.n
        return [(i * n + c.index, s, c) for i, s in enumerate(self.streams) for c in s.text.output.outputs]

    def watch(self, receive: Receive) -> None:
        """End the job when the client goes away; the body must have been read."""
        self._watch = asyncio.get_running_loop().create_task(self._until_gone(receive))

    def end_after(self, seconds: float) -> None:
        """End the job with 504 when it takes longer. The engine keeps the time too: it stops at once."""
        self._seconds = seconds
        if seconds:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._too_late)

    def submit(self, ids: Sequence[int], prompt: str | None, salt: str, tenant: str, bad: BadWords) -> None:
        """Send one prompt to the engine. Raises RequestError, EngineError, Problem."""
        left = self._seconds - self.age if self._seconds else 0.0
        if left < 0:
            raise self._late()
        stream = self._llm.submit(
            ids, self.params, prompt=prompt, salt=salt, tenant=tenant, signal=self._signal, bad=bad, timeout=left
        )
        self.streams.append(stream)

    @property
    def flowing(self) -> bool:
        """Whether there is one prompt, and nothing has ended or failed."""
        stream = self.streams[0]
        whole = stream.running == self.params.n and stream.failure is None
        return whole and self.failure is None and len(self.streams) == 1

    def listen(self, listener: Callable[[], bool]) -> None:
        """Let `listener` take care of what is new; where it returns False, `changed` returns as ever."""
        self._signal.listener = listener

    async def changed(self) -> None:
        """Return when there is something new. Raises Problem when the job failed, ClientGone when nobody listens."""
        await self._signal.wait()
        self.check()

    def check(self) -> None:
        """Raise what went wrong, if anything."""
        if self.failure is not None:
            raise self.failure
        for stream in self.streams:
            if isinstance(stream.failure, QueueFull):
                raise self._gate.full(str(stream.failure))
            if stream.failure is not None:
                raise problem_of(stream.failure)
            if stream.running == self.params.n:  # nothing has ended
                continue
            for choice in stream.text.output.outputs:
                if choice.finish_reason == "error":
                    raise Problem(500, "The model's numbers were not finite; this request failed, others go on.")
                if choice.finish_reason == "timeout":
                    raise self._late()

    def strip(self) -> None:
        """Take the token of `only_prompt` out of the results."""
        if self.only_prompt:
            for _, _, choice in self.choices:
                choice.text, choice.finish_reason, choice.stop_reason = "", "length", None
                choice.token_ids.clear()
                if choice.logprobs is not None:
                    choice.logprobs.clear()

    def fail(self, failure: Problem | ClientGone) -> None:
        """End the job from outside."""
        if self.failure is None:
            self.failure = failure
            self._signal.set()

    def cut(self) -> None:
        """End what still runs with finish reason "abort": the client gets what there is."""
        late = isinstance(self.failure, Problem) and self.failure.status == 504
        for stream in self.streams:
            self._llm.abort(stream, "timeout" if late else "abort")

    def close(self) -> None:
        """Give everything back; call it once, whatever happened."""
        self._signal.listener = None
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        self.cut()
        self._gate.release(self._seats, self.age)
        if self.on_close is not None:
            self.on_close(self)

    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape."""
        outputs = [stream.text.output for stream in self.streams]
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        }

    def _too_late(self) -> None:
        self.fail(self._late())

    def _late(self) -> Problem:
        return Problem(
            504,
            f"The request took longer than {self._seconds:g} s. Ask for less, or give a larger timeout_s.",
            param="timeout_s",
            code="deadline_exceeded",
            extra={"usage": self.usage()},
        )

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGone())


def as_problem(error: Exception) -> Problem:
    """What a client is told about an error that a handler may raise."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, OctavoError):
        return problem_of(error)
    return Problem(500, "The server failed on this request.")
