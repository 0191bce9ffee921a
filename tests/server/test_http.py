"""F8, F9 on a scaled clock: connections that send or read too slowly are closed, others are not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from octavo.server import http
from octavo.server.http import BoundedProtocol

SECONDS = 1.0


async def endless(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    """An application that sends until the client goes away."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await receive()  # the body, which is empty
    gone = asyncio.create_task(receive())
    while scope["path"] == "/endless" and not gone.done():
        await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
        await asyncio.sleep(0)
    gone.cancel()
    await send({"type": "http.response.body", "body": b"end"})


def run(use: Callable[[int, set], Awaitable[None]], app: Any = endless) -> None:
    """Use a server: a function of its port and of its open connections."""

    async def body() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=BoundedProtocol, lifespan="off", log_config=None, ws="none")
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await asyncio.wait_for(use(sock.getsockname()[1], server.server_state.connections), 20)
        finally:
            server.should_exit = server.force_exit = True
            await serving

    asyncio.run(body())


def test_f9_idle_connections_and_dripping_heads_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(port: int, connections: set) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        drip = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        for _, writer in drip:
            writer.write(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(4):
            await asyncio.sleep(SECONDS / 8)
            for _, writer in drip:
                writer.write(b"y")
        assert len(connections) == 60
        for reader, _ in idle:
            assert await reader.read() == b""
        for reader, _ in drip:
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # the clock of a head starts anew with each request
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n")
            await asyncio.sleep(SECONDS / 2)
            writer.write(b"\r\n")
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()

    monkeypatch.setattr(http, "HEAD_SECONDS", SECONDS)
    run(use)


def test_f8_a_reader_that_stalls_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(port: int, connections: set) -> None:
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", port))
        stalled.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        while not connections:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        while len(connections) > 1 or not connections:  # the one that reads goes on
            assert await reader.read(1 << 16)
        assert await reader.read(1 << 16)
        writer.transport.abort()
        stalled.close()

    monkeypatch.setattr(http, "STALL_SECONDS", 2 * SECONDS)
    run(use)


def chunked(path: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()


async def whole_body(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    """An application that answers with the names of its headers, before or after the body."""
    while scope["path"] == "/body" and (await receive()).get("more_body"):
        pass
    names = b" ".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": names})


def test_what_follows_a_body_is_bounded() -> None:
    """Trailers and extensions of chunks, many or one without an end; short trailers change nothing."""

    async def use(port: int, connections: set) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(chunked("/body") + b"1;name=value\r\nx\r\n0\r\nauthorization: Bearer x\r\n\r\n")
        assert b"host transfer-encoding\r\n" in await reader.readuntil(b"0\r\n\r\n")
        writer.write(chunked("/body") + b"".join(b"1\r\nx\r\n" for _ in range(3 * http.MAX_HEAD)) + b"0\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()
        for begin, again in ((b"0\r\n", b"x: y\r\n"), (b"0\r\nx: ", b"yyyy"), (b"1;a=", b"bbbb")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(chunked("/body") + begin)
            with contextlib.suppress(ConnectionError):
                for _ in range(64):
                    writer.write(again * (http.MAX_HEAD // 64))
                    await writer.drain()
                    await asyncio.sleep(0)
                assert (await reader.read()).startswith(b"HTTP/1.1 431")
            writer.close()

    run(use, whole_body)


def test_a_body_that_goes_on_after_its_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(port: int, connections: set) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(chunked("/early"))
        assert b"200 OK" in await reader.readuntil(b"0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while connections:
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(SECONDS / 20)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # one that ends in time is left alone
            writer.write(chunked("/early"))
            assert b"200 OK" in await reader.readuntil(b"0\r\n\r\n")
            writer.write(b"0\r\n\r\n")
            await asyncio.sleep(SECONDS / 2)
        writer.close()

    monkeypatch.setattr(http, "HEAD_SECONDS", SECONDS / 4)
    run(use, whole_body)
