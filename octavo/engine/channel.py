"""The two ends of the socket between API process and engine process.

`EngineEnd` never blocks a step: it reads what is there, and writes what the socket takes. `ClientEnd` lives in an
asyncio loop. The socket is one half of a pair made by the client, so it has no name in the file system, and each end
sees at once when the other process is gone.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from typing import Any

from octavo.engine.wire import Frames, FromEngine, Message, ToEngine, WireError, frame

_READ = 1 << 18
_TURN = 1 << 14  # bytes that the client takes in before others have their turn: a thousand tokens
# The engine waits for a client that has left this much unread: it makes tokens for nobody.
MAX_UNSENT = 4 << 20


class EngineEnd:
    """The engine's end: blocking only where asked to."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = Frames(ToEngine)
        self._unsent = bytearray()
        self._selector = select.poll()
        self.closed = False

    def receive(self, seconds: float) -> list[Any]:
        """Messages that have arrived; waits up to `seconds` for the first. WireError for what is none."""
        if seconds:
            self._wait(seconds, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        messages: list[Any] = []
        while not self.closed:
            try:
                data = self._sock.recv(_READ)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                self.closed = True
            messages += self._frames.feed(data)
            if len(data) < _READ:
                break
        return messages

    def send(self, message: Message) -> None:
        """Queue a message; `flush` sends it."""
        self._unsent += frame(message)

    def flush(self) -> None:
        """Send what the socket takes now; wait only when the client is `MAX_UNSENT` behind."""
        while self._unsent and not self.closed:
            try:
                sent = self._sock.send(memoryview(self._unsent)[:_READ])
            except BlockingIOError:
                if len(self._unsent) < MAX_UNSENT:
                    return
                self._wait(1.0, select.POLLOUT)  # only that: a client that goes on asking must not keep us turning
                continue
            except OSError:
                self.closed = True
                return
            del self._unsent[:sent]

    def drain(self, seconds: float) -> None:
        """Send all that is queued, but try no longer than about `seconds`."""
        for _ in range(max(1, int(seconds * 10))):
            self.flush()
            if not self._unsent or self.closed:
                return
            self._wait(0.1, select.POLLOUT)

    def _wait(self, seconds: float, events: int) -> None:
        self._selector.register(self._sock, events)
        self._selector.poll(seconds * 1000)


class ClientEnd(asyncio.BufferedProtocol):
    """The client's end. `on_message` gets every message, `on_close` is called once with the reason or None.

    Little is read at a time, so that an engine that is faster than its client does not keep the loop from others.
    """

    def __init__(self, on_message: Callable[[Any], None], on_close: Callable[[Exception | None], None]) -> None:
        self._on_message = on_message
        self._on_close = on_close
        self._frames = Frames(FromEngine)
        self._buffer = bytearray(_TURN)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = transport  # type: ignore[assignment]

    def get_buffer(self, sizehint: int) -> bytearray:
        """Called by asyncio."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by asyncio."""
        if nbytes == _TURN and self._transport is not None:  # there is more; libuv would go on reading it for seconds
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)
        try:
            for message in self._frames.feed(memoryview(self._buffer)[:nbytes]):
                self._on_message(message)
        except WireError:
            self.close()
            raise

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._transport = None
        self._on_close(exc)

    def send(self, message: Message) -> None:
        """Send a message; nothing happens when the connection is gone."""
        if self._transport is not None:
            self._transport.write(frame(message))

    def close(self) -> None:
        """End the connection, and with it the engine process."""
        if self._transport is not None:
            self._transport.abort()
