"""The engine's end of the socket: what it waits for, and for how long."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from octavo.engine import channel
from octavo.engine.channel import EngineEnd
from octavo.engine.wire import Abort, Answer, frame


@pytest.fixture
def ends() -> Iterator[tuple[EngineEnd, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield EngineEnd(ours), theirs


def fill(end: EngineEnd) -> None:
    """Queue more than the socket takes."""
    while True:
        end.send(Answer(1, {"x": "y" * 100_000}))
        before = len(end._unsent)
        end.flush()
        if len(end._unsent) == before:
            return


def test_a_client_that_asks_but_does_not_read_costs_no_processor(ends: tuple[EngineEnd, socket.socket]) -> None:
    """Unread messages from the client do not end the wait for room to write."""
    end, client = ends
    fill(end)
    client.sendall(frame(Abort(1, -1)))
    tries = 0

    def count(seconds: float, events: int, wait: object = end._wait) -> None:
        nonlocal tries
        tries += 1
        wait(seconds, events)  # type: ignore[operator]

    end._wait = count  # type: ignore[method-assign]
    end.drain(0.3)
    assert tries <= 3
    assert [type(message) for message in end.receive(1.0)] == [Abort]


def test_flush_waits_when_the_client_is_far_behind(
    ends: tuple[EngineEnd, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, client = ends
    fill(end)
    client.sendall(frame(Abort(1, -1)))
    monkeypatch.setattr(channel, "MAX_UNSENT", len(end._unsent))
    waits = []

    def read_some(seconds: float, events: int) -> None:
        waits.append(events)
        client.setblocking(False)
        try:
            while client.recv(1 << 20):
                pass
        except BlockingIOError:
            pass

    end._wait = read_some  # type: ignore[method-assign]
    end.flush()
    assert not end._unsent or len(end._unsent) < channel.MAX_UNSENT
    assert set(waits) <= {channel.select.POLLOUT} and waits


def test_a_client_that_is_gone_ends_every_wait(ends: tuple[EngineEnd, socket.socket]) -> None:
    end, client = ends
    fill(end)
    client.close()
    end.drain(5.0)
    assert end.closed
