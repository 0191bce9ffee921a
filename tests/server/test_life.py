"""Faults, health and exit codes: RELIABILITY F1, F3 to F6, F10, F11, F18 to F20; case B-68."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.engine.fake import FAULTS, TRIGGER
from tests.server.running import ROOT, Running, parse_events, read_all

LONG = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}
SLOW = ("--max-model-len", "8192", "--max-num-seqs", "64")


def open_streams(server: Running, count: int, **fields: object) -> list[socket.socket]:
    """Streams that have begun."""
    socks = []
    for i in range(count):
        sock = server.connect()
        body = json.dumps(LONG | {"prompt": f"stream {i}"} | fields).encode()
        sock.sendall(server.head("/v1/completions", body, {"connection": "close"}))
        socks.append(sock)
    for sock in socks:
        assert sock.recv(1, socket.MSG_PEEK)
    return socks


def events_of(data: bytes) -> list[str]:
    """The data lines of a chunked answer."""
    body = data.split(b"\r\n\r\n", 1)[1]
    out, at = b"", 0
    while at < len(body):
        size, _, rest = body[at:].partition(b"\r\n")
        length = int(size, 16)
        out += rest[:length]
        at += len(size) + 2 + length + 2
    return [line for line in out.decode().split("\n") if line]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_f1_f4_b68_the_engine_dies_or_hangs(how: int) -> None:
    """Not ready at once, every stream gets an error and closes, exit 4, nothing is left; a hang shows its stacks."""
    options = ("--watchdog-timeout", "2", "--max-num-batched-tokens", "64")  # few, or long steps would be expected
    with Running(*SLOW, *options, fake="fake:20").wait_ready() as server:
        socks = open_streams(server, 50)
        begin = time.monotonic()
        os.kill(server.engine_pid, how)
        if how == signal.SIGKILL:
            while server.call("/readyz").status != 503:
                assert time.monotonic() - begin < 1
            assert server.complete().status == 503
        for sock in socks:
            lines = events_of(read_all(sock))
            assert "[DONE]" not in lines[-1]
            assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "unavailable_error"
        assert server.process.wait(5 if how == signal.SIGKILL else 10) == 4
        assert time.monotonic() - begin < (5 if how == signal.SIGKILL else 10)
        assert not server.pids
        if how == signal.SIGSTOP:
            assert "engine/process.py" in server.text and "most recent call first" in server.text


def test_f2_supervise_starts_the_engine_again() -> None:
    """Ready again, the same answers, and counters that never fall."""
    with Running(*SLOW, "--supervise", fake="fake:1") as server:
        before = server.complete("canary", max_tokens=8).json["choices"]
        server.until(lambda found: found["octavo:engine_steps_total"] > 0)
        steps = server.metrics()["octavo:engine_steps_total"]
        for restarts in (1, 2):
            os.kill(server.engine_pid, signal.SIGKILL)
            server.until(lambda found: found["octavo:engine_up"] == 0, 2)
            end = time.monotonic() + 10
            while server.call("/readyz").status != 200:
                assert time.monotonic() < end, server.text
                time.sleep(0.05)
            assert server.complete("canary", max_tokens=8).json["choices"] == before
            assert server.metrics()["octavo:engine_restarts_total"] == restarts
            server.until(lambda found, least=steps: found["octavo:engine_steps_total"] >= least)
        server.idle()


def test_f3_the_engine_ends_with_the_api_process() -> None:
    with Running(*SLOW, fake="fake:20").wait_ready() as server:
        open_streams(server, 5)
        engine = server.engine_pid
        os.kill(server.process.pid, signal.SIGKILL)
        end = time.monotonic() + 5
        while Path(f"/proc/{engine}").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        server.process.wait(5)


def test_f5_sigterm_drains() -> None:
    """What runs ends whole; what is new is refused; exit 0."""
    with Running(*SLOW, fake="fake:5").wait_ready() as server:
        socks = open_streams(server, 50, max_tokens=150)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert server.call("/readyz").status == 503 and server.call("/livez").status == 200
        reply = server.complete()
        assert reply.status == 503 and int(reply.headers["retry-after"]) > 0
        for sock in socks:
            lines = events_of(read_all(sock))
            assert lines[-1] == "data: [DONE]"
            assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(5) == 0 and not server.pids


@pytest.mark.parametrize("how", ["deadline", "second signal", "interrupt"])
def test_f6_a_drain_cut_short(how: str) -> None:
    """What is left ends with finish reason "abort", in both modes; exit 5."""
    options = ("--shutdown-timeout", "0.5" if how == "deadline" else "60")
    with Running(*SLOW, *options, fake="fake:10").wait_ready() as server:
        socks = open_streams(server, 10)
        whole = open_whole(server)
        server.process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGTERM)
        if how == "second signal":
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
        for sock in socks:
            lines = events_of(read_all(sock))
            assert lines[-1] == "data: [DONE]"
            assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "abort"
        data = read_all(whole)
        assert b"200 OK" in data and b'"finish_reason":"abort"' in data
        assert server.process.wait(5) == 5 and not server.pids


def open_whole(server: Running) -> socket.socket:
    """A request without streaming that is running."""
    sock = server.connect()
    body = json.dumps(LONG | {"stream": False}).encode()
    sock.sendall(server.head("/v1/completions", body, {"connection": "close"}))
    server.until(lambda found: found["octavo:num_requests_running"] == 11)
    return sock


def test_f10_queue_flood() -> None:
    """From the bound on 429 with Retry-After; who was let in ends whole; the gauge keeps the bound."""
    with Running("--max-num-seqs", "4", "--max-num-queued-reqs", "8", fake="fake:5") as server:
        socks = []
        body = json.dumps(LONG | {"max_tokens": 120}).encode()
        for _ in range(80):
            sock = server.connect()
            sock.sendall(server.head("/v1/completions", body, {"connection": "close"}))
            socks.append(sock)
        most = 0.0
        for _ in range(5):
            most = max(most, server.metrics()["octavo:num_requests_waiting"])
            time.sleep(0.05)
        replies = [read_all(sock, 20) for sock in socks]
        served = [data for data in replies if b"200 OK" in data]
        refused = [data for data in replies if b" 429 " in data]
        assert len(served) >= 12 and len(served) + len(refused) == 80
        assert all(events_of(data)[-1] == "data: [DONE]" for data in served)
        assert all(b"retry-after: " in data for data in refused) and 0 < most <= 8
        server.idle()
        found = server.metrics()
        assert found['octavo:request_refusals_total{reason="queue_full"}'] == len(refused)
        big = server.call("/v1/completions", {"prompt": "x", "n": 13})
        assert big.status == 400 and big.error["param"] == "n"


def test_tokens_that_wait_are_capped() -> None:
    """429 for what would be one too many, with Retry-After; the times of all others are counted by phase."""
    with Running("--max-num-seqs", "1", "--max-num-queued-tokens", "50", fake="fake:20") as server:
        first = open_streams(server, 1, max_tokens=60)
        waiting = [server.connect() for _ in range(2)]
        for sock in waiting:
            body = json.dumps(LONG | {"prompt": [70] * 25, "max_tokens": 2}).encode()
            sock.sendall(server.head("/v1/completions", body, {"connection": "close"}))
        server.until(lambda found: found["octavo:num_requests_waiting"] == 2)
        text = server.call("/debug/kv.txt").body.decode()
        assert ": decode, " in text and text.count(": waiting, ") == 2
        for stream in (False, True):
            reply = server.complete([70] * 25, max_tokens=2, stream=stream)
            assert (reply.status, reply.error["code"]) == (429, "queue_full")
            assert int(reply.headers["retry-after"]) > 0
        assert all(b"[DONE]" in read_all(sock) for sock in first + waiting)
        assert server.complete([70] * 200, max_tokens=2).status == 200
        server.idle()
        found = server.metrics()
        assert found['octavo:request_refusals_total{reason="queue_full"}'] == 2
        assert found['octavo:request_success_total{finished_reason="error"}'] == 0
        for phase in ("queue", "prefill", "decode"):
            assert found[f"vllm:request_{phase}_time_seconds_count"] == 4
        assert found["vllm:request_queue_time_seconds_sum"] > 1.0 > found["vllm:request_prefill_time_seconds_sum"]


def test_f11_a_tiny_cache() -> None:
    """8 blocks, 64 requests: preemption, and everyone gets the right text; what can never fit is refused."""
    with Running("--num-gpu-blocks-override", "8", "--max-num-seqs", "8", fake="fake") as server:
        prompts = [f"request number {i} of many" for i in range(64)]
        alone = [server.complete(p, max_tokens=40, ignore_eos=True).json["choices"][0]["text"] for p in prompts[:8]]
        body = {"prompt": prompts, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        reply = server.call("/v1/completions", body).json
        assert [choice["text"] for choice in reply["choices"][:8]] == alone
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
        server.idle()
        assert server.metrics()["octavo:num_preemptions_total"] > 0
        assert server.complete([5] * 200).status == 400


def faulty(name: str) -> list[int]:
    return [9, *TRIGGER, next(token for token, what in FAULTS.items() if what == name)]


def test_f18_f19_faults_of_the_runner() -> None:
    """Bad numbers fail one request, a failed step fails those in it, a broken device ends the engine: exit 4."""
    with Running(*SLOW, fake="fake:5") as server:
        canary = server.complete("canary", max_tokens=8).json["choices"]
        neighbours = open_streams(server, 3, max_tokens=60)
        reply = server.complete(faulty("bad numbers"))
        assert reply.status == 500 and reply.error["type"] == "server_error"
        for sock in neighbours:
            assert events_of(read_all(sock))[-1] == "data: [DONE]"
        data = server.call("/v1/completions", {"prompt": faulty("bad numbers"), "stream": True})
        assert data.status == 500
        assert server.complete(faulty("a failed step")).status == 500
        assert server.complete("canary", max_tokens=8).json["choices"] == canary
        found = server.metrics()
        assert found['octavo:request_success_total{finished_reason="error"}'] == 3 and found["octavo:engine_up"] == 1
        server.idle()
        assert server.complete(faulty("a broken device")).status == 503
        assert server.process.wait(5) == 4 and not server.pids


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--port", "PORT"), 2, "cannot be had"),
        (("--block-size", "7"), 2, "block_size is 7"),
        (("--no-such-option",), 2, "no-such-option"),
        (("--port", "99999"), 2, "--port is 99999"),
        (("--max-model-len", "1000000"), 2, "max_model_len"),
        (("--num-gpu-blocks-override", "2", "--max-model-len", "4096"), 2, "Lower --max-model-len"),
        (("--model", "/nowhere/at/all"), 3, "/nowhere/at/all"),
    ],
)
def test_f20_start_up_failures(fake: Running, options: tuple[str, ...], code: int, words: str) -> None:
    """One clear line, the right exit code, nothing left."""
    options = tuple(option.replace("PORT", str(fake.port)) for option in options)
    begin = time.monotonic()
    command = [sys.executable, "-m", "octavo", "serve", "--load-format", "fake", "--port", "0", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.returncode == code and words in done.stderr and time.monotonic() - begin < 10
    assert "Traceback" not in done.stderr and "ready" not in done.stdout


def test_f15_a_damaged_model_is_refused_before_the_port_answers(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + b"\xff" * 64)
    command = [sys.executable, "-m", "octavo", "serve", "--model", str(file), "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.returncode == 3 and "broken.gguf" in done.stderr and "ready" not in done.stdout


def test_sigterm_while_loading() -> None:
    server = Running(fake="fake")
    time.sleep(0.3)
    server.stop()
    assert not server.pids


def test_old_spellings_start_the_same_server() -> None:
    """FEATURES S19, S20, S41, S45: the guides' command line runs, with notices."""
    options = ["--use-v2-block-manager", "--trust-remote-code", "--load-format", "fake", "--port", "0"]
    options += ["--served-model-name", "gpt-3.5-turbo, demo"]
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.entrypoints.api_server", *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert sum("note:" in line for line in lines) == 2 and "ready on" in lines[-1], lines
        port = int(lines[-1].split("127.0.0.1:")[1].split()[0])
        server = Running.__new__(Running)
        server.port, server.key = port, None
        assert [card["id"] for card in server.call("/v1/models").json["data"]] == ["gpt-3.5-turbo", "demo"]
        assert server.complete(model="demo").json["model"] == "demo"
        assert parse_events(server.call("/v1/completions", {"prompt": "x", "stream": True}).body)
    finally:
        process.terminate()
        assert process.wait(10) == 0


def test_f23_a_full_log_is_no_reason_not_to_serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve", "--load-format", "fake", "--port", str(port)],
            cwd=ROOT, stdout=full, stderr=full,
        )  # fmt: skip
    server = Running.__new__(Running)
    server.port, server.key = port, None
    try:
        end = time.monotonic() + 20
        while True:
            try:
                assert server.complete(faulty("bad numbers")).status == 500
                break
            except ConnectionRefusedError:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.05)
        assert server.complete(max_tokens=2).status == 200
    finally:
        process.terminate()
        assert process.wait(10) == 0
