"""uvicorn's connection with the limits that it lacks: size and time of request heads, and readers that stall.

The application sees only whole heads; bodies are bounded in `octavo.server.body`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD = 64 << 10
HEAD_SECONDS = 10.0
IDLE_SECONDS = 75.0
STALL_SECONDS = 30.0  # with a full buffer, until the reader is taken for dead


def chunk_writer(send: Send) -> Callable[[], Callable[[bytes], None] | None]:
    """How to send more of a chunked body without a task: None while that is not possible.

    `send` is the connection's own. It is not possible while its reader is behind or after it has gone, before the
    response has begun, and for a `send` that is none of uvicorn's.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return lambda: None
    flow, transport = cycle.flow, cycle.transport

    def write(data: bytes) -> None:
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def ready() -> Callable[[bytes], None] | None:
        if flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return None
        return write

    return ready


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    What is neither body nor done (a head, trailers, extensions of chunks) may be `MAX_HEAD` long. A request that goes
    on after its response is complete has as much time to end as a head.
    """

    _in_head = True
    _in_request = False
    _progress = False  # some body came, or a request ended, in the last piece of data
    _loose_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Called by the loop."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse, b"408 Request Timeout")

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self.transport.is_closing():
            return
        self._progress = False
        super().data_received(data)
        self._loose_bytes = 0 if self._progress else self._loose_bytes + len(data)
        if self._loose_bytes > MAX_HEAD:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._in_head = self._in_request = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse, b"408 Request Timeout")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, for trailers too: the application has its headers already and gets no more."""
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._progress, self._in_request = True, False
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called when a response has been written."""
        super().on_response_complete()
        if self._in_request and not self.transport.is_closing():
            self._rest_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        """Called by the loop: the reader is behind."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Called by the loop."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self, status: bytes) -> None:
        """Answer without the application, and close."""
        self._stop_timers()
        if not self.transport.is_closing():
            cycle = self.cycle
            answered = cycle is not None and cycle.response_started
            if self._loose_bytes and not (answered and not (self._in_head and cycle.response_complete)):
                self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._rest_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._rest_timer = self._stall_timer = None
