"""The life of a server: bind, load, serve, drain, end; and what happens when the engine dies.

Everything that can be refused is refused before the port answers: options and a port in use (exit code 2), the model
(3). The engine process is watched: its end, or silence for `watchdog_timeout` (its stacks are written to the log
first), makes the server not ready at once and ends what was under way with an error. Then the server exits with code
4, or with `supervise` starts the engine again, which must then be ready in `watchdog_timeout`, or `SLOWER` times as
long as before.

SIGTERM drains: nothing new is let in, what runs may end within `shutdown_timeout`; exit code 0, or 5 when something
was cut off. A second SIGTERM, or SIGINT, cuts at once. SIGQUIT writes all stacks and kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import resource
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn

from octavo.config import EngineConfig, ServerConfig
from octavo.engine.async_llm import AsyncLLM, Stream
from octavo.errors import ConfigError, EngineError, OctavoError, QueueFull
from octavo.metrics.server import ServerMetrics
from octavo.server.app import build_app
from octavo.server.auth import Keys, check_bind, is_loopback, load_keys
from octavo.server.http import IDLE_SECONDS, BoundedProtocol
from octavo.server.service import Service

_log = logging.getLogger(__name__)

CUT_SHORT = 5
ENGINE_DIED = 4
CUT_SECONDS = 2.0  # that clients have to take the rest of what was cut off
BACKLOG = 2048
SEND_BUFFER = 128 << 10
MAX_RESTARTS = 5  # in a row
STEADY_SECONDS = 60.0  # after which the engine counts as well again
SLOWER = 4.0  # how much longer than the last start another may take
_SPARE_FILES = 128


def serve(engine: EngineConfig, config: ServerConfig) -> int:
    """Run a server until it is told to end; returns the exit code. Raises ConfigError, ModelError."""
    import uvloop

    keys = load_keys(config)
    check_bind(config.host, keys, config.insecure_no_auth)
    with bind(config.host, config.port) as sock:
        faulthandler.register(signal.SIGQUIT, all_threads=True, chain=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Server(engine, config, keys).run(sock))


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port but does not listen yet. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: the kernel holds no more than this for a reader that does not read.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        sock.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"Port {port} of {host} cannot be had: {error}.", "Give another --port or --host."
        ) from None
    return sock


class Server:
    """One engine, one listener."""

    def __init__(self, engine: EngineConfig, config: ServerConfig, keys: Keys) -> None:
        self._config = config
        self._keys = keys
        self._llm = AsyncLLM.open(engine)
        self._metrics = ServerMetrics(config.legacy_metrics)
        self._service = Service(self._llm, config, self._metrics)
        self._signals = 0
        self._told = asyncio.Event()
        self._llm.on_tokens, self._llm.on_end = self._on_tokens, self._on_end
        self._llm.on_numbers = self._metrics.beat

    async def run(self, sock: socket.socket) -> int:
        """Load, serve, end; returns the exit code."""
        begin = time.monotonic()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            if not await self._load():
                return 0
            http = _Http(build_app(self._service, self._keys, check_host=is_loopback(self._config.host)))
            serving = asyncio.create_task(http.serve([sock]))
            try:
                await self._listen(http, serving)
                self._announce(sock, time.monotonic() - begin)
                return await self._live(serving)
            finally:
                http.should_exit = True
                await asyncio.wait((serving,))
        finally:
            self._service.close()
            await self._llm.close()

    async def _listen(self, http: _Http, serving: asyncio.Task[None]) -> None:
        """Return when the port answers. Raises ConfigError when it does not: another process may have been faster."""
        while not http.started and not serving.done():
            await asyncio.sleep(0.005)
        if serving.done():
            error = serving.exception()
            raise ConfigError(
                f"Port {self._config.port} of {self._config.host} cannot be listened on: {error}.",
                "Give another --port.",
            )

    async def _load(self, limit: float | None = None) -> bool:
        """Start the engine; False when a signal came first. Raises what kept it from starting within `limit`."""
        loading = asyncio.create_task(self._llm.launch())
        told = asyncio.create_task(self._told.wait())
        await asyncio.wait((loading, told), return_when=asyncio.FIRST_COMPLETED, timeout=limit)
        told.cancel()
        if not loading.done():
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError, OctavoError):
                await loading
            if self._told.is_set():
                return False
            await self._llm.kill(dump_stacks=True)
            raise EngineError(f"The engine was not ready after {limit:.0f} s; its stacks are in the log.")
        await loading
        self._open_gate()
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        return True

    def _open_gate(self) -> None:
        facts = self._llm.facts
        if facts is None:
            return
        self._service.gate.running = facts.max_num_seqs
        config = {"block_size": facts.block_size, "num_gpu_blocks": facts.blocks - 1, "cache_dtype": facts.dtype}
        config["enable_prefix_caching"] = facts.prefix_cache
        self._metrics.name(
            self._service.names[0], facts.block_size, {name: str(value) for name, value in config.items()}
        )

    def _announce(self, sock: socket.socket, seconds: float) -> None:
        host, port = sock.getsockname()[:2]
        facts = self._llm.facts
        where = f"[{host}]" if ":" in host else host
        with contextlib.suppress(OSError):  # a full disk behind stdout is no reason not to serve
            print(f"{self._service.names[0]}: {facts.line() if facts is not None else ''}", flush=True)
            print(f"Octavo is ready on http://{where}:{port} after {seconds:.1f} s", flush=True)

    async def _live(self, serving: asyncio.Task[None]) -> int:
        """Serve until told to end or the engine is lost for good."""
        restarts, since = 0, time.monotonic()
        while True:
            gone = asyncio.create_task(self._llm.gone())
            told = asyncio.create_task(self._told.wait())
            watch = asyncio.create_task(self._watch())
            await asyncio.wait((gone, told, serving), return_when=asyncio.FIRST_COMPLETED)
            for task in (gone, told, watch):
                task.cancel()
            if self._told.is_set():
                return await self._drain()
            if serving.done():
                _log.error("The HTTP server has ended by itself: %s", serving.exception())
                return ENGINE_DIED
            self._service.gate.running = 0
            self._metrics.lost()
            _log.error("The engine process is gone: %s", self._llm.failure)
            await self._llm.kill()
            restarts = 0 if time.monotonic() - since > STEADY_SECONDS else restarts
            if not self._config.supervise or restarts >= MAX_RESTARTS:
                await asyncio.sleep(0.5)  # the streams' last events
                return ENGINE_DIED
            await asyncio.sleep(min(0.25 * 2**restarts, 10.0))
            restarts += 1
            await self._start_again()
            since = time.monotonic()

    async def _start_again(self) -> None:
        self._metrics.restarts.add()
        try:
            if await self._load(max(self._config.watchdog_timeout, SLOWER * self._llm.load_seconds)):
                _log.warning("The engine runs again.")
        except OctavoError as error:
            _log.error("The engine could not be started again: %s", error)

    async def _watch(self) -> None:
        """End an engine that says nothing for too long."""
        limit = self._config.watchdog_timeout
        while True:
            await asyncio.sleep(min(0.5, limit / 4))
            if self._llm.overdue(limit):
                silent = time.monotonic() - self._llm.last_sign
                _log.error("The engine has said nothing for %.1f s; its stacks follow.", silent)
                await self._llm.kill(dump_stacks=True)
                return

    def _on_signal(self, number: int) -> None:
        self._signals += 2 if number == signal.SIGINT else 1
        self._told.set()

    async def _drain(self) -> int:
        """Let what runs end, as long as it may; then cut it off."""
        service = self._service
        service.gate.closed = "The server is shutting down. Try another one."
        end = time.monotonic() + self._config.shutdown_timeout
        while service.jobs and self._signals < 2 and time.monotonic() < end and self._llm.failure is None:
            await asyncio.sleep(0.02)
        if self._llm.failure is not None:
            return ENGINE_DIED
        cut = len(service.jobs)
        for job in list(service.jobs):
            job.cut()
        end = time.monotonic() + CUT_SECONDS
        while service.jobs and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if cut:
            _log.warning("%d requests were cut off.", cut)
        return CUT_SHORT if cut else 0

    def _on_tokens(self, begun: Sequence[tuple[Stream, int]], gaps: Mapping[float, int]) -> None:
        for stream, count in begun:
            prompt = len(stream.text.output.prompt_token_ids)
            self._metrics.first(count, prompt, stream.first_token - stream.arrived)
        for seconds, count in gaps.items():
            self._metrics.more(count, seconds)

    def _on_end(self, stream: Stream) -> None:
        if isinstance(stream.failure, QueueFull):  # the gate counts it
            return
        first = stream.text.output.outputs[0]
        reason = "error" if stream.failure is not None else first.finish_reason or "abort"
        prompt = len(stream.text.output.prompt_token_ids)
        self._metrics.ended(reason, prompt, stream.tokens, stream.ended - stream.arrived, stream.paces)
        self._metrics.phases(stream.text.metrics)


class _Http(uvicorn.Server):
    """uvicorn, which leaves the signals to us."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                log_config=None,
                backlog=BACKLOG,
                timeout_keep_alive=int(IDLE_SECONDS),
                timeout_graceful_shutdown=3,
                limit_concurrency=raise_file_limit() - _SPARE_FILES,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The supervisor handles them."""
        yield


def raise_file_limit() -> int:
    """Allow this process as many open files as it may have; returns how many, at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wish = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wish:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wish, hard))
    return max(soft, wish)
