"""S6: fuzzed requests; S7: the poison corpus; S8: doubling. After all of it the canary's answer is the same."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

import pytest

from tests.server import fuzz
from tests.server.poison import POISON
from tests.server.running import Running

CANARY = {"prompt": "The canary sings", "max_tokens": 8, "temperature": 0}
OPTIONS = ("--max-model-len", "256", "--num-gpu-blocks-override", "2000")


async def send(server: Running, data: bytes, seconds: float = 10.0) -> bytes:
    """The answer up to the end of the connection; the sending side is closed first, as a hasty client does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(data)
        parts = []
        async with asyncio.timeout(seconds):
            while part := await reader.read(1 << 16):
                parts.append(part)
                if is_whole(b"".join(parts[:4]), parts[-1]):
                    break
        return b"".join(parts)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def is_whole(first: bytes, last: bytes) -> bool:
    """Whether a kept-alive answer is complete: enough for requests that forgot `connection: close`."""
    head, _, body = first.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length: "):
            return len(body) >= int(line.split()[1])
    return last.endswith(b"0\r\n\r\n")


def incomplete(data: bytes) -> bool:
    """Whether the server has a right to wait for more."""
    head, found, body = data.partition(b"\r\n\r\n")
    if not found:
        return True
    lengths = [
        line.split(b":")[1].strip() for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    ]
    if b"chunked" in head.lower():
        return b"0\r\n\r\n" not in body
    return bool(lengths) and lengths[0].isdigit() and len(body) < int(lengths[0])


@pytest.mark.parametrize(
    ("requests", "python"),
    [
        (1500, ("-O",)),
        pytest.param(10_000, (), marks=pytest.mark.slow),
        pytest.param(10_000, ("-O",), marks=pytest.mark.slow),
    ],
)
def test_s6_fuzz(requests: int, python: tuple[str, ...]) -> None:
    """No 5xx but 503 and a deadline's 504, no hang, no restart, no growth, the canary the same every 100 requests."""
    with Running(*OPTIONS, python=python) as server:
        canary = server.call("/v1/completions", CANARY).json["choices"]
        rng = random.Random(20)
        seen: Counter[str] = Counter()
        rss = 0

        async def one(data: bytes) -> None:
            waits = incomplete(data)
            try:
                answer = await send(server, data, 0.2 if waits else 10.0)
            except TimeoutError:
                assert waits, data
                answer = b""
            status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/") else "none"
            seen[status] += 1
            assert not status.startswith("5") or status in ("503", "504"), (data, answer)

        async def some(batch: list[bytes]) -> None:
            await asyncio.gather(*map(one, batch))

        for i in range(requests // 100):
            batch = [fuzz.request(rng) for _ in range(100)]
            for at in range(0, 100, 20):
                asyncio.run(some(batch[at : at + 20]))
            assert server.call("/v1/completions", CANARY).json["choices"] == canary
            if i == 2:
                rss = server.rss()
        assert server.rss() - rss < 50 << 20
        assert seen["200"] > requests // 20 and seen["400"] > requests // 4, seen
        server.idle()
        assert server.metrics()["octavo:engine_restarts_total"] == 0 and server.process.poll() is None
        assert "Traceback" not in server.text, server.text[-3000:]


@pytest.mark.parametrize("python", [(), ("-O",)])
def test_s7_poison(python: tuple[str, ...]) -> None:
    """One entry for each shape of a published fault: the right refusal, the same canary, also without assertions."""
    assert len(POISON) >= 80
    with Running(*OPTIONS, python=python) as server:
        canary = server.call("/v1/completions", CANARY).json["choices"]
        wrong = []
        for name, (path, body, statuses) in POISON.items():
            begin = time.monotonic()
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = server.call(path, data)
            again = server.call("/v1/completions", CANARY)
            if reply.status not in statuses or again.status != 200 or again.json["choices"] != canary:
                wrong.append((name, reply.status, reply.body[:200]))
            if time.monotonic() - begin > 5:
                wrong.append((name, "slow", b""))
        assert not wrong
        server.idle()
        assert "Traceback" not in server.text


PART = {"type": "text", "text": "a"}


def tool(number: int) -> dict[str, object]:
    return {"type": "function", "function": {"name": f"f{number}"}}


KNOBS = {
    "prompt": lambda n: ("/v1/completions", {"prompt": "ab " * n, "max_tokens": 1}),
    "spaces": lambda n: ("/v1/completions", {"prompt": " " * n, "max_tokens": 1}),
    "ids": lambda n: ("/v1/completions", {"prompt": [5] * n, "max_tokens": 1}),
    "prompts": lambda n: ("/v1/completions", {"prompt": ["a"] * n, "max_tokens": 1}),
    "messages": lambda n: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * (n // 8)}),
    "parts": lambda n: ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * n}]}),
    "stops": lambda n: ("/v1/completions", {"prompt": "a", "stop": ["a"] * n}),
    "stop": lambda n: ("/v1/completions", {"prompt": "a", "stop": "a" * n}),
    "stop_ids": lambda n: ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * n}),
    "bias": lambda n: ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(n)}}),
    "tools": lambda n: ("/v1/chat/completions", {"messages": [], "tools": [tool(i) for i in range(n)]}),
    "unknown": lambda n: ("/v1/completions", {"prompt": "", **{f"x{i}": i for i in range(n)}}),
    "model": lambda n: ("/v1/completions", {"prompt": "a", "model": "a" * n}),
    "salt": lambda n: ("/v1/completions", {"prompt": "a", "cache_salt": "a" * n}),
    "brackets": lambda n: ("/v1/completions", b'{"prompt":' + b"[]," * n),
    "quotes": lambda n: ("/v1/completions", b'{"prompt":"' + b'\\"[' * n + b'"}'),
    "backslashes": lambda n: ("/v1/completions", b'{"prompt":"' + b"\\\\" * n + b'[","max_tokens":1}'),
    "tokenize": lambda n: ("/tokenize", {"prompt": "word " * n}),
    "letters": lambda n: ("/tokenize", {"prompt": "a" * n}),
    "detokenize": lambda n: ("/detokenize", {"tokens": [300] * n}),
}  # fmt: skip


@pytest.mark.slow
def test_s8_doubling() -> None:
    """Twice the input takes less than 2.6 times as long, for each thing that a client can make larger."""
    with Running("--max-model-len", "8192") as server:
        slow = []
        for name, make in KNOBS.items():
            times = []
            for n in (4000, 8000, 16000, 32000):
                path, body = make(n)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                times.append(min(timed(server, path, data) for _ in range(5)))
            ratios = [b / a for a, b in zip(times, times[1:], strict=False) if b > 0.05]  # a collection costs more
            if ratios and max(ratios) >= 2.6:
                slow.append((name, times))
        assert not slow


def timed(server: Running, path: str, data: bytes) -> float:
    begin = time.perf_counter()
    assert server.call(path, data).status < 500
    return time.perf_counter() - begin
