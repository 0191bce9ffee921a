"""Many clients: S13, S14, F7 to F9, B-38, B-70, B-76, B-77. All to this machine, bounded in count and time."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time

import pytest

from tests.server.running import Running

STREAM = {"prompt": "x", "ignore_eos": True, "temperature": 0, "stream": True}


async def open_stream(
    server: Running, gate: asyncio.Semaphore, **fields: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = json.dumps(STREAM | fields).encode()
    writer.write(server.head("/v1/completions", body, {"connection": "close"}))
    return reader, writer


async def whole_stream(server: Running, gate: asyncio.Semaphore, **fields: object) -> bool:
    """Whether the stream came to its `[DONE]`."""
    reader, writer = await open_stream(server, gate, **fields)
    tail = b""
    try:
        while data := await reader.read(1 << 16):
            tail = (tail + data)[-64:]
    finally:
        writer.close()
    return b"[DONE]" in tail


async def broken_stream(server: Running, gate: asyncio.Semaphore, rng: random.Random, **fields: object) -> bool:
    """Close at a random point: before the head is sent, before the first byte, or in the middle."""
    reader, writer = await open_stream(server, gate, **fields)
    point = rng.randrange(3)
    if point:
        await writer.drain()
    if point == 2:
        await reader.read(1)
        await asyncio.sleep(rng.random() * 0.05)
    writer.transport.abort()
    return False


def counts(found: dict[str, float]) -> dict[str, float]:
    name = "octavo:request_success_total"
    return {key[len(name) + 18 : -2]: value for key, value in found.items() if key.startswith(name)}


@pytest.mark.parametrize("streams", [2000])
def test_s13_many_streams_at_once(streams: int) -> None:
    """All complete; at most 150 KiB a stream; file descriptors back to base. The engine stands until all are in."""
    options = ("--max-num-seqs", "256", "--max-num-queued-reqs", str(streams), "--num-gpu-blocks-override", "9000")
    with Running(*options, "--max-model-len", "256") as server:
        server.complete(max_tokens=2)
        rss, files, peak = server.rss(), server.files(), 0

        async def run() -> list[bool]:
            nonlocal peak
            gate = asyncio.Semaphore(100)
            os.kill(server.engine_pid, signal.SIGSTOP)
            tasks = [asyncio.create_task(whole_stream(server, gate, max_tokens=24)) for _ in range(streams)]
            end = time.monotonic() + 60
            while server.call("/debug/requests").json["seats"]["taken"] < streams and time.monotonic() < end:
                await asyncio.sleep(0.1)
            os.kill(server.engine_pid, signal.SIGCONT)
            assert time.monotonic() < end
            while not all(task.done() for task in tasks):
                peak = max(peak, server.rss())
                await asyncio.sleep(0.1)
            return [task.result() for task in tasks]

        assert all(asyncio.run(run()))
        assert (peak - rss) / streams < 150 << 10, (peak - rss) / streams
        server.idle()
        assert abs(server.files() - files) <= 5
        assert counts(server.metrics())["length"] == streams + 1


@pytest.mark.parametrize("requests", [1000, pytest.param(5000, marks=pytest.mark.slow)])
def test_s14_f7_abort_storm(requests: int) -> None:
    """Half of the clients leave at random points, some all at once: nothing is left, the counters add up."""
    options = ("--max-num-seqs", "64", "--max-num-queued-reqs", "4000", "--max-model-len", "512")
    with Running(*options, fake="fake:1") as server:
        server.complete(max_tokens=2)
        files = server.files()
        rng = random.Random(11)

        async def run() -> list[bool]:
            gate = asyncio.Semaphore(60)
            live = asyncio.Semaphore(150)

            async def one(i: int) -> bool:
                async with live:
                    if i % 2:
                        return await broken_stream(server, gate, rng, max_tokens=480, prompt=f"leaver {i}")
                    return await whole_stream(server, gate, max_tokens=8, prompt=f"stayer {i}")

            return await asyncio.gather(*(one(i) for i in range(requests)))

        assert sum(asyncio.run(run())) == requests // 2
        server.idle()
        found = server.metrics()
        ended = counts(found)
        assert ended["length"] == requests // 2 + 1 and ended["error"] == 0
        assert 0 < ended["abort"] <= requests // 2
        state = server.call("/debug/kv").json
        assert state["free_blocks"] == state["total_blocks"] and not state["tables"] and not any(state["owners"])
        assert server.call("/debug/requests").json["seats"]["taken"] == 0
        assert abs(server.files() - files) <= 5


def test_f7_500_clients_leave_in_one_instant() -> None:
    """Nothing of theirs is left, and the streams of others come to their end."""
    options = ("--max-num-seqs", "600", "--max-model-len", "8192", "--num-gpu-blocks-override", "90000")
    with Running(*options, fake="fake:20") as server:

        async def run() -> list[bool]:
            gate = asyncio.Semaphore(100)
            leavers = [await open_stream(server, gate, max_tokens=8000) for _ in range(500)]
            await asyncio.gather(*(reader.read(1) for reader, _ in leavers))
            others = [asyncio.create_task(whole_stream(server, gate, max_tokens=50)) for _ in range(8)]
            await asyncio.sleep(0.5)
            for _, writer in leavers:
                writer.transport.abort()
            return await asyncio.gather(*others)

        assert all(asyncio.run(run()))
        server.idle()
        ended = counts(server.metrics())
        assert (ended["abort"], ended["length"], ended["error"]) == (500, 8, 0)
        assert server.call("/debug/requests").json["seats"]["taken"] == 0


def test_b38_requests_that_were_cancelled_while_queued_do_not_run() -> None:
    with Running("--max-num-seqs", "4", "--max-model-len", "2048", fake="fake:5") as server:
        before = server.metrics()["octavo:engine_generated_tokens_total"]

        async def run() -> None:
            gate = asyncio.Semaphore(60)
            ids = list(range(500, 900))
            streams = [await open_stream(server, gate, prompt=[i, *ids], max_tokens=200) for i in range(60)]
            await asyncio.sleep(0.3)
            for _, writer in streams:
                writer.transport.abort()

        asyncio.run(run())
        begin = time.monotonic()
        assert server.complete(max_tokens=4).status == 200
        assert time.monotonic() - begin < 3
        server.idle()
        assert server.metrics()["octavo:engine_generated_tokens_total"] - before < 60 * 200 / 4


def test_b70_300_requests_at_the_same_time(fake: Running) -> None:
    files = fake.files()

    async def run() -> list[bool]:
        gate = asyncio.Semaphore(300)
        return await asyncio.gather(*(whole_stream(fake, gate, max_tokens=1) for _ in range(300)))

    assert all(asyncio.run(run()))
    time.sleep(0.3)
    assert abs(fake.files() - files) <= 5


def test_f8_slow_readers_cost_little() -> None:
    """Readers that do not read: their streams are cut from the results when they read, never queued up."""
    options = ("--max-num-seqs", "64", "--max-model-len", "1024", "--num-gpu-blocks-override", "9000")
    with Running(*options) as server:
        server.complete(max_tokens=2)
        rss, slow, count = server.rss(), [], 12
        ask = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900}
        ask |= {"logprobs": True, "top_logprobs": 20}
        for _ in range(count):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            body = json.dumps(STREAM | ask).encode()
            sock.sendall(server.head("/v1/chat/completions", body, {"connection": "close"}))
            slow.append(sock)

        begin = time.monotonic()
        assert server.call("/livez").status == 200  # an engine that is faster than the API process leaves it time
        assert time.monotonic() - begin < 2

        async def fast() -> list[bool]:
            gate = asyncio.Semaphore(20)
            return await asyncio.gather(*(whole_stream(server, gate, max_tokens=20) for _ in range(20)))

        assert all(asyncio.run(fast()))
        server.until(lambda found: found["octavo:num_requests_running"] == 0, 30)
        time.sleep(0.2)
        assert server.call("/debug/requests").json["seats"]["taken"] == count  # all computed, none of them read
        assert (server.rss() - rss) / count < 4 << 20  # the results themselves, with 21 log-probabilities a token
        for sock in slow:
            sock.close()
        server.idle()
        server.until(lambda _: server.call("/debug/requests").json["seats"]["taken"] == 0)


def test_a_slow_reader_gets_the_same_text() -> None:
    """In larger pieces, in order, although tokens are written past its task while it keeps up."""
    with Running("--max-model-len", "8192", "--num-gpu-blocks-override", "9000") as server:
        body = {"prompt": "slow", "max_tokens": 6000, "ignore_eos": True, "temperature": 0}
        whole = server.call("/v1/completions", body).json["choices"][0]["text"]
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(20)
            sock.connect(("127.0.0.1", server.port))
            ask = json.dumps(body | {"stream": True}).encode()
            sock.sendall(server.head("/v1/completions", ask, {"connection": "close"}))
            data = sock.recv(500)
            server.idle(30)  # all tokens are there, and most of them unsent
            while part := sock.recv(4096):
                data += part
    _, _, rest = data.partition(b"\r\n\r\n")
    joined, events, largest = b"", 0, 0
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        joined, rest = joined + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    pieces = []
    for event in joined.decode().split("\n\n")[:-2]:
        pieces.append(json.loads(event[6:])["choices"][0]["text"])
        events, largest = events + 1, max(largest, len(pieces[-1]))
    assert "".join(pieces) == whole and 10 < events < 5500 and largest > 1000


@pytest.mark.slow
def test_f9_slow_senders_are_closed(fake: Running) -> None:
    """Idle connections and heads that drip are closed after the limit; health answers meanwhile."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        idle = [await asyncio.open_connection("127.0.0.1", fake.port) for _ in range(300)]
        drip = [await asyncio.open_connection("127.0.0.1", fake.port) for _ in range(20)]
        begin = time.monotonic()
        for step in range(40):
            for _, writer in drip:
                if not writer.is_closing():
                    writer.write(b"GET /livez HTTP/1.1\r\nx: " if step == 0 else b"y")
            asked = time.monotonic()
            assert (await loop.run_in_executor(None, fake.call, "/livez")).status == 200
            assert time.monotonic() - asked < 0.5
            if all(reader.at_eof() for reader, _ in idle + drip):
                break
            await asyncio.sleep(0.5)
            for reader, _ in drip:
                if reader._buffer:  # type: ignore[attr-defined]
                    assert reader._buffer.startswith(b"HTTP/1.1 408")  # type: ignore[attr-defined]
                    await reader.read(1000)
        assert 8 < time.monotonic() - begin < 19

    asyncio.run(run())


def test_a_huge_head_is_refused(fake: Running) -> None:
    before = fake.rss()
    for lines in (b"x: " + b"y" * (10 << 20), b"".join(b"x%d: y\r\n" % i for i in range(200_000))):
        with fake.connect() as sock:
            try:
                sock.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + lines)
                data = sock.recv(1000)
            except ConnectionError:
                data = b""
        assert data == b"" or data.split(b" ")[1] in (b"431", b"400")
    assert fake.rss() - before < 20 << 20 and fake.call("/livez").status == 200


def test_b76_b77_counters(fake: Running) -> None:
    """Each kind of end counts once; tokens rise by what the usages say; nothing ever falls."""
    fake.idle()
    before = fake.metrics()
    prompt = generated = 0
    last = before

    def scrape() -> dict[str, float]:
        nonlocal last
        found = fake.metrics()
        for name, value in found.items():
            if any(part in name for part in ("_total", "_count", "_sum", "_bucket")):
                assert value >= last.get(name, 0.0), name
        last = found
        return found

    for body in (
        {"prompt": list(range(300, 364)), "max_tokens": 5},
        {"prompt": list(range(300, 364)), "max_tokens": 5},
        {"prompt": "n of them", "n": 3, "max_tokens": 4},
    ):
        usage = fake.call("/v1/completions", body | {"ignore_eos": True}).json["usage"]
        prompt, generated = prompt + usage["prompt_tokens"], generated + usage["completion_tokens"]
        scrape()
    assert fake.complete(temperature=-1).status == 400
    text = fake.complete("stops", max_tokens=20).json
    prompt, generated = prompt + text["usage"]["prompt_tokens"], generated + text["usage"]["completion_tokens"]
    usage = fake.complete("stops", max_tokens=20, stop=[text["choices"][0]["text"][8:12]]).json["usage"]
    prompt, generated = prompt + usage["prompt_tokens"], generated + usage["completion_tokens"]
    found = scrape()
    grown = {name: found[name] - before[name] for name in found}
    assert grown["octavo:prompt_tokens_total"] == grown["vllm:prompt_tokens_total"] == prompt
    assert grown["octavo:generation_tokens_total"] == generated
    assert grown["octavo:time_to_first_token_seconds_count"] == 5
    ended = {name: value - counts(before)[name] for name, value in counts(found).items()}
    assert ended == {"length": 4, "stop": 1, "repetition": 0, "timeout": 0, "abort": 0, "error": 0}
    buckets = [value for name, value in found.items() if name.startswith("octavo:e2e_request_latency_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == found["octavo:e2e_request_latency_seconds_count"]
    fake.until(lambda now: now["octavo:prefix_cache_hits_total"] > before["octavo:prefix_cache_hits_total"])


def test_metrics_format_and_legacy_names(fake: Running) -> None:
    """HELP and TYPE once for each family; labels are closed sets; old names only when asked for."""
    for method in ("BREW", "GET", "PROPFIND"):
        fake.call("/nope/" + method, method=method)
    text = fake.call("/metrics").body.decode()
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)) and "BREW" not in text and "nope" not in text
    assert "vllm:num_requests_running" in families and "vllm_pending_requests" not in families
    with Running("--legacy-metrics") as server:
        found = server.metrics()
    for name in (
        "vllm:gpu_memory_utilization", "avg_time_per_token_ms", "memory_fragmentation_ratio", "vllm_pending_requests",
        "vllm_throughput_tokens", "vllm_mem_usage",
    ):  # fmt: skip
        assert name in found


def test_debug_kv_agrees_with_the_gauges() -> None:
    with Running("--num-gpu-blocks-override", "100", "--max-model-len", "1024", fake="fake:10") as server:

        async def run() -> None:
            gate = asyncio.Semaphore(9)
            ids = list(range(700, 764))
            streams = [await open_stream(server, gate, prompt=[*ids, i], max_tokens=400) for i in range(3)]
            for reader, _ in streams:
                await reader.read(1)
            state = server.call("/debug/kv").json
            held = [block for table in state["tables"] for block in table["blocks"]]
            assert len(state["tables"]) == 3 and len(state["owners"]) == state["total_blocks"] == 100
            for block, owners in enumerate(state["owners"], 1):
                assert held.count(block) == owners
            assert len(set(held)) == state["used_blocks"] == 100 - state["free_blocks"]
            assert max(state["owners"]) == 3  # the common beginning is shared
            table = server.call("/debug/requests").json
            numbers = {n for row in table["requests"] for n in row["engine_ids"]}
            assert numbers == {t["request"] for t in state["tables"]} and table["seats"]["taken"] == 3
            for _, writer in streams:
                writer.transport.abort()

        asyncio.run(run())
        server.idle()
