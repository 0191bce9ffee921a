"""Who may call what: S5, B-69. Every route, every bad form, with and without keys."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.app import build_app
from octavo.server.auth import ADMIN as ADMIN_ROUTES
from octavo.server.auth import OPEN, Guard, Keys, check_bind, is_loopback, load_keys
from octavo.server.problem import json_response
from tests.server.running import ROOT, Running, read_all

KEY, OTHER, ADMIN = "key-0123456789", "other-0123456789", "admin-0123456789"


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with Running("--api-key", f"{KEY},{OTHER}", "--admin-key", ADMIN) as server:
        yield server


def all_routes() -> list[tuple[str, str]]:
    """Method and path of every route that the application has."""

    class Stub:
        metrics = None

    app = build_app(Stub(), Keys(), False)  # type: ignore[arg-type]
    routes = app._app._app.routes  # type: ignore[attr-defined]
    return [(next(iter(r.methods - {"HEAD"})), r.path.replace("{model:path}", "x")) for r in routes]


ROUTES = all_routes()


def test_the_routes_are_the_known_ones() -> None:
    assert {path for _, path in ROUTES} >= {"/v1/completions", "/metrics", "/debug/kv", "/tokenize"}
    assert set(OPEN) <= {path for _, path in ROUTES}
    assert set(OPEN) == {"/livez", "/readyz", "/health", "/", "/static/page.js", "/static/page.css"}


def bad_forms(method: str, path: str) -> list[bytes]:
    """Requests without a valid key, as bytes."""

    def request(target: str, *fields: str, verb: str = method, host: str = "localhost") -> bytes:
        lines = [f"{verb} {target} HTTP/1.1", f"host: {host}", "connection: close", "content-length: 2", *fields]
        lines.append("content-type: application/json")
        return ("\r\n".join(lines) + "\r\n\r\n{}").encode("latin-1")

    good = f"authorization: Bearer {KEY}"
    return [
        request(path),
        request(path, "authorization: Bearer wrong-0123456789"),
        request(path, f"authorization: Bearer {KEY[:-1]}"),
        request(path, f"authorization: Bearer {KEY}x"),
        request(path, f"authorization: Bearer {KEY.upper()}"),
        request(path, "authorization: Bearer \xe9\xe9\xe9\xe9\xe9\xe9\xe9\xe9"),
        request(path, "authorization: Bearer "),
        request(path, f"authorization: Basic {KEY}"),
        request(path, f"authorization: {KEY}"),
        request(path, good, good),
        request(path, "authorization: Bearer x", good),
        request(f"{path}?api_key={KEY}"),
        request(path, host="a/?x="),
        request(path, host="a/#"),
        request("/" + path),
        request("/v1/.." + path),
        request(path.replace("/", "/%2e/", 1)),
        request(path.upper()),
        request(f"http://localhost{path}"),
        request(f"http://user@localhost{path}"),
        request(path, verb="OPTIONS"),
        request(path, verb="PUT"),
        request(path, verb="TRACE"),
        request(path, f"x-api-key: {KEY}"),
        request(path, f"cookie: authorization=Bearer {KEY}"),
    ]


def status(server: Running, data: bytes) -> int:
    with server.connect() as sock:
        sock.sendall(data)
        reply = read_all(sock)
    return int(reply.split(b" ", 2)[1])


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[1] not in OPEN])
def test_s5_nothing_without_a_key(locked: Running, method: str, path: str) -> None:
    for data in bad_forms(method, path):
        assert status(locked, data) in (400, 401, 405), data


@pytest.mark.parametrize("path", sorted(OPEN))
def test_s5_open_routes(locked: Running, path: str) -> None:
    assert locked.call(path, headers={"authorization": ""}).status == 200
    for data in bad_forms("GET", path):
        assert status(locked, data) < 500


def test_b69_the_right_key(locked: Running) -> None:
    for key in (KEY, OTHER):
        for scheme in ("Bearer", "bearer", "BEARER"):
            headers = {"authorization": f"{scheme} {key}"}
            assert locked.call("/v1/models", headers=headers).status == 200
            assert locked.call("/v1/completions", {"prompt": "x"}, headers=headers).status == 200
            for path in ("/metrics", "/debug/kv", "/debug/requests", "/debug/steps"):
                assert locked.call(path, headers=headers).status == 403
    headers = {"authorization": f"Bearer {ADMIN}"}
    for path in ("/metrics", "/debug/kv", "/debug/requests", "/debug/steps", "/v1/models"):
        assert locked.call(path, headers=headers).status == 200


def test_several_keys_without_an_admin_key_do_not_see_each_other() -> None:
    """/metrics and /debug tell of everyone's requests: for a sole key only, until there is an admin key."""

    async def status(path: str, *keys: str) -> tuple[int, str]:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await json_response({})(scope, receive, send)

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        loaded = load_keys(ServerConfig(api_key=",".join(keys)))
        headers = [(b"authorization", b"Bearer " + KEY.encode())]
        scope = {"type": "http", "path": path, "headers": headers, "state": {}}
        await Guard(app, loaded, False)(scope, None, send)  # type: ignore[arg-type]
        return sent[0]["status"], sent[1]["body"].decode()

    for path in sorted(ADMIN_ROUTES):
        code, text = asyncio.run(status(path, KEY, OTHER))
        assert code == 403 and "--admin-key" in text
        assert asyncio.run(status(path, KEY))[0] == asyncio.run(status(path, KEY, KEY))[0] == 200
    assert asyncio.run(status("/v1/models", KEY, OTHER))[0] == 200


def test_d8_tenants_do_not_share_the_cache(locked: Running) -> None:
    """Two keys, one prompt: the other key's blocks are never hit, and a client's salt does not change that."""
    ids = list(range(2000, 2100))

    def cached(key: str, **fields: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        reply = locked.call("/v1/completions", {"prompt": ids, "max_tokens": 1} | fields, headers=headers)
        return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEY) == 0 and cached(KEY) > 0
    assert cached(OTHER) == 0 and cached(OTHER) > 0
    assert cached(KEY, cache_salt="s") == 0 and cached(OTHER, cache_salt="s") == 0 and cached(KEY, cache_salt="s") > 0


def test_host_header_is_checked_without_a_key(fake: Running) -> None:
    """A page of another site cannot reach a server without a key through a name of its own (DNS rebinding)."""
    for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "127.0.0.1"):
        assert fake.call("/v1/models", headers={"host": host}).status == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", ""):
        assert fake.call("/v1/models", headers={"host": host}).status == 421
    reply = fake.call("/v1/models", headers={"origin": "http://" + "evil.example"})
    assert not any(name.startswith("access-control") for name in reply.headers)


def test_a_bind_that_others_reach_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.com"):
        with pytest.raises(ConfigError, match="--api-key"):
            check_bind(host, Keys(), insecure=False)
        check_bind(host, Keys(api=(b"x",)), insecure=False)
        check_bind(host, Keys(), insecure=True)
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        assert is_loopback(host)
        check_bind(host, Keys(), insecure=False)


def test_keys_of_options_files_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfile-key-012345\n\n")
    monkeypatch.setenv("OCTAVO_API_KEY", "environment-key")
    assert len(load_keys(ServerConfig(api_key_file=str(file))).api) == 2
    assert len(load_keys(ServerConfig(api_key="option-key-1,option-key-2")).api) == 2
    for config in (
        ServerConfig(api_key="short"),
        ServerConfig(api_key="ключ-ключ-ключ"),
        ServerConfig(api_key_file=str(tmp_path / "none")),
    ):
        with pytest.raises(ConfigError):
            load_keys(config)
    monkeypatch.delenv("OCTAVO_API_KEY")
    with pytest.raises(ConfigError, match="no API key"):
        load_keys(ServerConfig(admin_key=ADMIN))


def test_b74_only_the_http_port_listens(locked: Running) -> None:
    """IPC has no name and no port; the engine's command line and environment hold no key."""
    listening = set()
    for line in (
        Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    ):
        fields = line.split()
        if fields[3] == "0A":
            listening.add((fields[9], int(fields[1].rsplit(":")[-1], 16)))
    inodes = set()
    for pid in locked.pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink()))
            if found:
                inodes.add(found[1])
    assert {port for inode, port in listening if inode in inodes} == {locked.port}
    environment = Path(f"/proc/{locked.engine_pid}/environ").read_bytes()
    command = Path(f"/proc/{locked.engine_pid}/cmdline").read_bytes()
    assert not any(key.encode() in environment + command for key in (KEY, OTHER, ADMIN))


def test_refusal_exits_with_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", "--host", "0.0.0.0", "--load-format", "fake"],
        cwd=ROOT, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert done.returncode == 2 and "--insecure-no-auth" in done.stderr
