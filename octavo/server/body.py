"""Reading a request's body: bounded in size, time and depth, then typed.

The limit is charged before the work: a length that is announced too large is refused unread, and what comes without
a length is counted as it comes. All bodies being read together have a bound as well.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from octavo.server.problem import Problem

MAX_BODY = 16 << 20
MAX_BODIES = 256 << 20  # of all requests that are being read
BODY_SECONDS = 30.0
MAX_DEPTH = 64
MAX_VALUES = 1 << 20
MAX_CONTAINERS = 200_000

T = TypeVar("T")
_reading = 0
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


async def read_json(request: Request, kind: type[T]) -> T:
    """The body as a `kind`. Raises Problem."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise Problem(415, f"The content type is {content_type[:80]!r}. Send 'Content-Type: application/json'.")
    return parse(await read(request), kind)


async def read(request: Request) -> bytes:
    """The bytes of the body. Raises Problem."""
    announced = request.headers.get("content-length", "")
    length = int(announced[:20]) if announced.isdigit() else 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if length > MAX_BODY:
                await _discard(request, length)
                raise _too_large()
            return await _read(request)
    except TimeoutError:
        raise Problem(408, f"The body did not arrive within {BODY_SECONDS:.0f} s.", headers=_CLOSE) from None
    except ClientDisconnect:
        raise Problem(400, "The client went away while it sent the body.") from None


async def _read(request: Request) -> bytes:
    global _reading
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            _reading += len(part)
            if size > MAX_BODY:
                raise _too_large()
            if _reading > MAX_BODIES:
                raise Problem(
                    503, "Too many large requests at once. Try again.", headers={"retry-after": "1"} | _CLOSE
                )
            parts.append(part)
        return b"".join(parts)
    finally:
        _reading -= size


async def _discard(request: Request, length: int) -> None:
    """Read a body that is little too large, so that the client is there to read the refusal; keep nothing."""
    if length <= 4 * MAX_BODY:
        async for _ in request.stream():
            pass


_CLOSE = {"connection": "close"}


def _too_large() -> Problem:
    return Problem(413, f"The body is larger than {MAX_BODY} bytes. Send less.", headers=_CLOSE)


def parse(data: bytes, kind: type[T]) -> T:
    """JSON bytes as a `kind`. Raises Problem that names the field at fault."""
    check_size(data)
    try:
        made: T = decoder(kind).decode(data)
        return made
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at ")
        param = place.strip("`").removeprefix("$.").removeprefix("$") or None
        raise Problem(400, f"{text}{f' at {param}' if param else ''}. Mend it.", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"The body is not valid JSON ({_short(error)}).") from None


def _short(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of one kind of body, made once: that evaluates the annotations of the class."""
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]


def check_size(data: bytes) -> None:
    """Raise Problem for JSON that is nested too deeply, or holds more values than are worth reading."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH and data.count(b",") <= MAX_VALUES:
        return  # the usual case, at the speed of memchr
    deepest, containers, values = measure(data)
    if values > MAX_VALUES or containers > MAX_CONTAINERS:
        raise Problem(
            400,
            f"The JSON holds more than {MAX_VALUES} values, or {MAX_CONTAINERS} arrays and objects. Send less.",
        )
    if deepest > MAX_DEPTH:
        raise Problem(400, f"The JSON is nested deeper than {MAX_DEPTH} levels. Flatten it.")


def measure(data: bytes) -> tuple[int, int, int]:
    """The deepest nesting, the number of arrays and objects, and of commas, strings left out.

    Counts no further than a piece beyond the limits. For what is no JSON the numbers mean little.
    """
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_MARKS)
    level = deepest = containers = values = 0
    inside = np.uint8(0)
    for at in range(0, len(marks), _PIECE):
        piece = np.frombuffer(marks, np.uint8, min(_PIECE, len(marks) - at), at)
        quotes = piece == ord('"')
        parity = (np.cumsum(quotes, dtype=np.uint8) + inside) & 1  # survives the wrapping
        inside = parity[-1]
        piece = piece[(parity == 0) & ~quotes]
        brackets = piece[piece != ord(",")]
        values += len(piece) - len(brackets)
        opens = (brackets == ord("[")) | (brackets == ord("{"))
        containers += int(np.count_nonzero(opens))
        levels = level + np.cumsum(np.where(opens, 1, -1))
        deepest = max(deepest, int(levels.max(initial=0)))
        level = int(levels[-1]) if len(levels) else level
        if values > MAX_VALUES or containers > MAX_CONTAINERS or deepest > MAX_DEPTH:
            break
    return deepest, containers, values


_PIECE = 1 << 16
_NOT_MARKS = bytes(sorted(set(range(256)) - set(b'[]{},"')))
