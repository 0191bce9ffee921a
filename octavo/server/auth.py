"""Who may call what. Deny by default: without a key only the routes of `OPEN` answer.

Only `scope["path"]` decides, never a header; a path that is not exactly a known one needs a key like any other. Keys
are held as digests and compared in constant time, on bytes. With no key at all, which only a loopback address allows,
the Host header must name this machine, so that a page of another site cannot reach the server through a name of its
own. What shows everyone's requests needs the admin key as soon as there are several others.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.config import ServerConfig
from octavo.env import key as key_variable
from octavo.errors import ConfigError
from octavo.server.problem import Problem

OPEN = frozenset({"/livez", "/readyz", "/health", "/", "/static/page.js", "/static/page.css"})
ADMIN = frozenset({"/metrics", "/debug/kv", "/debug/kv.txt", "/debug/requests", "/debug/steps"})
MIN_KEY_BYTES = 8
_MAX_KEY_FILE = 1 << 16


@dataclass(frozen=True, slots=True)
class Keys:
    """Digests of the keys. Both empty: there is no key, and everything is open."""

    api: tuple[bytes, ...] = field(default=())
    admin: tuple[bytes, ...] = field(default=())

    @property
    def needed(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api or self.admin)


def load_keys(config: ServerConfig) -> Keys:
    """The keys of the options, the key file and the environment. ConfigError for one that is too short."""
    api = _split(config.api_key or key_variable("OCTAVO_API_KEY"))
    if config.api_key_file is not None:
        api += _read_keys(Path(config.api_key_file))
    admin = _split(config.admin_key or key_variable("OCTAVO_ADMIN_KEY"))
    for text in (*api, *admin):
        if len(text.encode()) < MIN_KEY_BYTES or not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError(
                f"A key has {len(text)} characters or odd ones.", f"Give printable ASCII, {MIN_KEY_BYTES} or longer."
            )
    if admin and not api:
        raise ConfigError("There is an admin key but no API key.", "Give --api-key as well.")
    return Keys(tuple(map(_digest, api)), tuple(map(_digest, admin)))


def check_bind(host: str, keys: Keys, insecure: bool) -> None:
    """Refuse to listen to other machines without a key. Raises ConfigError."""
    if not is_loopback(host) and not keys.needed and not insecure:
        raise ConfigError(
            f"{host} is reachable from other machines and there is no API key.",
            "Give --api-key (or --api-key-file, or OCTAVO_API_KEY), or --insecure-no-auth if that is really meant.",
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware: lets a request through, or answers it. Sets `state.tenant`, a text for each key."""

    def __init__(self, app: ASGIApp, keys: Keys, check_host: bool) -> None:
        self._app = app
        self._keys = keys
        self._check_host = check_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http":
            try:
                self._admit(scope)
            except Problem as problem:
                await problem.response()(scope, receive, send)
                return
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        path, headers = scope["path"], scope["headers"]
        scope["state"]["tenant"] = ""
        if path in OPEN:
            return
        if not self._keys.needed:
            if self._check_host and not _names_loopback(headers):
                raise Problem(421, "The Host header does not name this machine. Use localhost or 127.0.0.1.")
            return
        given = _bearer(headers)
        digest = b"" if given is None else _digest_bytes(given)
        admin, api = _matches(digest, self._keys.admin), _matches(digest, self._keys.api)
        if not api and not admin:
            raise Problem(
                401,
                "A valid key is needed. Send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if path in ADMIN and not admin:
            if self._keys.admin:
                raise Problem(403, "This route needs the admin key.")
            if len(set(self._keys.api)) > 1:  # it would show each of them what the others do
                raise Problem(403, "There are several API keys and no admin key. Start the server with --admin-key.")
        scope["state"]["tenant"] = sha256(b"octavo-tenant" + digest).hexdigest()[:32]


def _bearer(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    found = [value for name, value in headers if name == b"authorization"]
    if len(found) != 1:
        return None
    scheme, _, token = found[0].partition(b" ")
    return token if scheme.lower() == b"bearer" and token else None


def _matches(digest: bytes, known: Sequence[bytes]) -> bool:
    """Whether `digest` is one of `known`; takes the same time whichever it is."""
    found = False
    for one in known:
        found |= hmac.compare_digest(digest, one)
    return found


def _names_loopback(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return False
    host, _, port = hosts[0].rpartition(":") if not hosts[0].endswith("]") else (hosts[0], "", "")
    return is_loopback(host if host and port.isdigit() else hosts[0])


def _digest(text: str) -> bytes:
    return _digest_bytes(text.encode())


def _digest_bytes(data: bytes) -> bytes:
    return sha256(data).digest()


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _read_keys(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MAX_KEY_FILE:
            raise ConfigError(f"{path} is larger than a file of keys may be ({_MAX_KEY_FILE} bytes).", "Shorten it.")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The key file {path} cannot be read: {error}.", "Check --api-key-file.") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"The key file {path} holds no key.", "Write one key a line.")
    return keys
