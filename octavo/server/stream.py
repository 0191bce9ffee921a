"""Answers on their way out: all at once, or as server-sent events.

A stream starts when there is something to say, so that what goes wrong before gets its own status. After that an
error is an event of its own, and the stream ends without `[DONE]`: who sees `[DONE]` has everything. A client that
reads slowly gets larger pieces, never a growing queue: what is sent is cut from the result as it is then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.server.http import chunk_writer
from octavo.server.job import ClientGone, Job, as_problem
from octavo.server.problem import Problem, json_response
from octavo.server.shape import Shape
from octavo.types import CompletionOutput

_log = logging.getLogger(__name__)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class Writer:
    """Makes the events of a job. `interval`: tokens of one event; the first and the last never wait."""

    def __init__(
        self,
        job: Job,
        shape: Shape,
        model: str,
        interval: int,
        usage: bool,
        silent: bool,
        *,
        running_usage: bool = False,
        prompts: bool = False,
    ) -> None:
        """`silent`: tokens without text are not worth an event.

        running_usage: every event has the usage so far. prompts: the first event of a choice has the prompt's ids.
        """
        self._job = job
        self._shape = shape
        self._interval = interval
        self._usage = usage
        self._silent = silent
        self._running_usage = running_usage
        self._prompts = prompts
        head = {"id": shape.prefix + job.id, "object": shape.chunk_kind, "created": job.created, "model": model}
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._open = [_Cursor(i, choice, stream.text.output.prompt_token_ids) for i, stream, choice in job.choices]
        if not running_usage:
            for cursor in self._open:
                cursor.frame = self._framed(cursor.index)

    def _framed(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands around the text in the events in the middle of a choice, if nothing else changes."""
        frame = self._shape.frame(index)
        return None if frame is None else (self._head + frame[0], frame[1] + b"]}\n\n")

    def fresh(self) -> bytes:
        """Events for all that is new; may be empty."""
        events, ended = [], False
        for cursor in self._open:
            choice, tokens, frame = cursor.choice, cursor.tokens, cursor.frame
            last = choice.finish_reason is not None
            count = len(choice.token_ids)
            if not last and count - tokens < (self._interval if cursor.begun else 1):
                continue
            text = choice.text[cursor.chars :]
            if self._silent and not text and not last:
                continue
            if frame is not None and cursor.begun and not last:
                events.append(frame[0] + _json(text) + frame[1])
                cursor.chars, cursor.tokens = len(choice.text), count
                continue
            events.append(
                b"%b%b]%b}\n\n"
                % (
                    self._head,
                    self._shape.event(cursor.index, choice, text, slice(tokens, count), not cursor.begun, last),
                    self._rest(cursor),
                )
            )
            cursor.chars, cursor.tokens, cursor.begun, cursor.ended = len(choice.text), count, True, last
            ended |= last
        if ended:
            self._open = [cursor for cursor in self._open if not cursor.ended]
        return events[0] if len(events) == 1 else b"".join(events)

    def _rest(self, cursor: _Cursor) -> bytes:
        """Fields of an event beside its choice."""
        rest = b""
        if self._prompts and not cursor.begun:
            rest += b',"prompt_token_ids":' + msgspec.json.encode(cursor.prompt)
        if self._running_usage:
            rest += b',"usage":' + msgspec.json.encode(self._job.usage())
        return rest

    def end(self) -> bytes:
        """The last events of a job that went well."""
        if not self._usage:
            return DONE
        return self._head + b'],"usage":' + msgspec.json.encode(self._job.usage()) + b"}\n\n" + DONE


class _Cursor:
    """How much of a choice was sent."""

    __slots__ = ("begun", "chars", "choice", "ended", "frame", "index", "prompt", "tokens")

    def __init__(self, index: int, choice: CompletionOutput, prompt: list[int]) -> None:
        self.index = index
        self.choice = choice
        self.prompt = prompt
        self.chars = 0
        self.tokens = 0
        self.begun = False
        self.ended = False
        self.frame: tuple[bytes, bytes] | None = None


class EventStream(Response):
    """The answer to a streaming request. Owns the job and closes it.

    Once it has begun, tokens in the middle of a lone prompt's answer are written as they come, by `_at_once`; its
    task wakes for all else: an end, an error, a reader that is behind.
    """

    def __init__(self, job: Job, writer: Writer) -> None:
        self.job = job
        self.writer = writer
        self.background = None
        self.status_code = 200
        self._sending = False  # the task has something in its hands that must go first
        self._ready = chunk_writer(_nowhere)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by Starlette."""
        started = False
        try:
            while True:
                await self.job.changed()
                data = self.writer.fresh()
                over = self.job.finished
                if over:
                    data += self.writer.end()
                if data and not started:
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    started = True
                    send = scope["state"].get("send", send)  # events pass by the layers in between
                    self._ready = chunk_writer(send)
                    self.job.listen(self._at_once)
                if data:
                    self._sending = True
                    await send({"type": "http.response.body", "body": data, "more_body": not over})
                    self._sending = False
                if over:
                    return
        except ClientGone:
            return
        except Exception as error:
            problem = as_problem(error)
            if problem.status == 500 and not isinstance(error, Problem):
                _log.exception("A stream failed.")
            if not started:
                await problem.response()(scope, receive, send)
                return
            event = b"data: " + msgspec.json.encode(problem.body()) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": False})
        finally:
            self.job.close()

    def _at_once(self) -> bool:
        """Write what is new, if the connection takes it and nothing has ended."""
        write = None if self._sending or not self.job.flowing else self._ready()
        if write is None:
            return False
        data = self.writer.fresh()
        if data:
            write(data)
        return True


async def _nowhere(message: Message) -> None:
    """A `send` before there is one."""


async def whole(job: Job, shape: Shape, model: str, extra: Callable[[], dict[str, Any]]) -> Response:
    """The answer to a request that does not stream; closes the job. Raises Problem, ClientGone."""
    try:
        while not job.finished:
            await job.changed()
        job.check()
        job.strip()
        data = {
            "id": shape.prefix + job.id,
            "object": shape.kind,
            "created": job.created,
            "model": model,
            "choices": [shape.choice(index, choice) for index, _, choice in job.choices],
            "usage": job.usage(),
        }
        return json_response(data | extra())
    finally:
        job.close()
