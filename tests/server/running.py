"""A server in a process of its own, and a small client for it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODEL = "SmolLM2-135M-Instruct"


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_no_constant)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class Running:
    """`octavo serve` on a free port. Without a model by default: the fake engine with the embedded tokenizer."""

    def __init__(
        self,
        *options: str,
        fake: str | None = "fake",
        python: tuple[str, ...] = (),
        key: str | None = None,
        paths: tuple[str, ...] = (),
    ) -> None:
        self.key = key
        self.log = tempfile.TemporaryFile()
        fake_options = ["--load-format", fake] if fake else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join((*paths, str(ROOT)))}
        self.process = subprocess.Popen(
            [sys.executable, *python, "-m", "octavo", "serve", "--port", "0", *fake_options, *options],
            stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self.port = 0

    def wait_ready(self, seconds: float = 60.0) -> Running:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = re.search(r"ready on http://\S+:(\d+)", self.text)
            if found:
                self.port = int(found[1])
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.stop()
        raise AssertionError(f"the server did not start:\n{self.text}")

    @property
    def text(self) -> str:
        """Everything the server has written."""
        return os.pread(self.log.fileno(), 1 << 20, 0).decode("utf-8", "replace")

    @property
    def pids(self) -> list[int]:
        """Processes of the server's session that live."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
                except OSError:
                    continue
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(name))
        return found

    @property
    def engine_pid(self) -> int:
        return next(pid for pid in self.pids if pid != self.process.pid)

    def rss(self) -> int:
        """Bytes that the API process has in memory."""
        line = next(x for x in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if x[:5] == "VmRSS")
        return int(line.split()[1]) * 1024

    def files(self) -> int:
        """Open file descriptors of the API process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self, number: int = signal.SIGTERM, seconds: float = 15.0) -> int:
        """End the server and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
            self.process.wait(5)
            raise

    def __enter__(self) -> Running:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def head(self, path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST") -> bytes:
        """A request as bytes, for raw sockets."""
        fields = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
        if self.key:
            fields["authorization"] = f"Bearer {self.key}"
        fields |= headers or {}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def call(
        self, path: str, body: Any = None, *, headers: dict[str, str] | None = None, method: str | None = None,
        timeout: float = 30.0,
    ) -> Reply:  # fmt: skip
        """One request; `body` is JSON unless it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        fields = {"content-type": "application/json"} if data is not None else {}
        if self.key:
            fields["authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method or ("GET" if data is None else "POST"), path, data, fields | (headers or {}))
            reply = connection.getresponse()
            return Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def complete(self, prompt: Any = "Hello", **fields: Any) -> Reply:
        return self.call("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    def chat(self, text: Any = "Hello", **fields: Any) -> Reply:
        messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
        return self.call("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream that went well: parsed, `[DONE]` left out but checked."""
        reply = self.call(path, body | {"stream": True})
        assert reply.status == 200, reply
        return parse_events(reply.body)

    def metrics(self) -> dict[str, float]:
        """Every series of /metrics under its name with labels, less those that all have."""
        found = {}
        for line in self.call("/metrics").body.decode().splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = re.sub(r'model_name="[^"]*",engine="0",?', "", name).replace("{}", "")
                assert name not in found, name
                found[name] = float(value)
        return found

    def until(self, condition: Any, seconds: float = 10.0) -> None:
        """Wait for a condition that gets the metrics."""
        end = time.monotonic() + seconds
        while not condition(found := self.metrics()):
            short = {name: value for name, value in found.items() if "bucket" not in name and "vllm" not in name}
            assert time.monotonic() < end, short
            time.sleep(0.05)

    def idle(self, seconds: float = 10.0) -> None:
        """Wait until nothing runs and nothing waits, and no block is held."""
        names = ("octavo:num_requests_running", "octavo:num_requests_waiting", "octavo:kv_cache_usage_perc")
        self.until(lambda found: not any(found[name] for name in names), seconds)


def parse_events(body: bytes) -> list[Any]:
    """The JSON of the events before `[DONE]`, which must be last and once."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == "" and blocks.pop() == "data: [DONE]", body[-200:]
    assert all(block.startswith("data: {") for block in blocks)
    return [json.loads(block[6:]) for block in blocks]


def joined(events: list[Any], index: int = 0) -> str:
    """The text of one choice."""
    texts = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                texts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(texts)


def read_all(sock: socket.socket, seconds: float = 10.0) -> bytes:
    """Everything until the other end closes."""
    sock.settimeout(seconds)
    parts = []
    while True:
        try:
            part = sock.recv(1 << 16)
        except ConnectionError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)
