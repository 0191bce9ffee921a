"""Reading a request's body: bounded in size, time and depth, then typed.

The limit is charged before the work: a length that is announced too large is refused unread, and what comes without
a length is counted as it comes. All bodies being read together have a bound as well.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from octavo.server.problem import Problem

MAX_BODY = 16 << 20
MAX_BODIES = 256 << 20  # of all requests that are being read
BODY_SECONDS = 30.0
MAX_DEPTH = 64

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
    if depth(data) > MAX_DEPTH:
        raise Problem(400, f"The JSON is nested deeper than {MAX_DEPTH} levels. Flatten it.")
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


def depth(data: bytes) -> int:
    """The deepest nesting of arrays and objects, strings left out; may be too large for what is no JSON."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:  # the usual case, at the speed of memchr
        return 0
    level = deepest = 0
    for part in _outside_strings(data):
        for char in part:
            if char in b"[{":
                level += 1
                deepest = max(deepest, level)
                if deepest > MAX_DEPTH:
                    return deepest
            elif char in b"]}":
                level -= 1
    return deepest


def _outside_strings(data: bytes) -> list[bytes]:
    """The parts of JSON that are not inside of strings, brackets only."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = plain.split(b'"')[::2]
    return [part.translate(None, _NOT_BRACKETS) for part in outside]


_NOT_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
