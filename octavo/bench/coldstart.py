"""Start a command, wait for its first token, watch its memory, end it: workload E of `octavo bench versus`.

The command is split like a shell would, but runs without one, in a session of its own, so that all of its processes
can be ended together. What it writes goes to a file that is shown when it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from octavo.bench.online import ask
from octavo.bench.workloads import BenchRequest
from octavo.errors import ConfigError

PROMPT = BenchRequest([504, 3575, 282, 4649, 314], 1)
PATIENCE = 300.0  # seconds; the slowest engine that we know takes about 110
PAUSE = 0.005


class Started:
    """A command that has given its first token. `seconds`: from its start until then."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        self.process, self.seconds = process, seconds
        self._peaks: dict[int, int] = {}
        self.peak_bytes()

    def peak_bytes(self) -> int:
        """The most memory its processes ever had resident, added up; of those alive now or when last asked."""
        for pid in _session(self.process.pid):
            self._peaks[pid] = max(self._peaks.get(pid, 0), _peak(pid))
        return sum(self._peaks.values())


@contextlib.contextmanager
def start(command: str, url: str) -> Iterator[Started]:
    """Run `command` until the block ends. With `url` it is a server there, else the first token is its first output.

    Raises ConfigError when it ends or stays silent first.
    """
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        try:
            process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.DEVNULL,
                stdout=log if url else output,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{command!r} cannot be run: {error}.", "Check the command.") from None
        try:
            _wait(process, url, log, output, begin + PATIENCE)
            yield Started(process, time.perf_counter() - begin)
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: IO[bytes], output: IO[bytes], until: float) -> None:
    while not (_answers(url) if url else os.fstat(output.fileno()).st_size):
        # A command that prints all at once may have ended just now.
        if process.poll() is not None and not os.fstat(output.fileno()).st_size:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 2000))
            last = log.read().decode(errors="replace")
            raise ConfigError(f"The command ended with code {process.returncode} before a token: {last}")
        if time.perf_counter() > until:
            raise ConfigError(
                f"There was no token within {PATIENCE:.0f} seconds.", "Check the command and the address."
            )
        time.sleep(PAUSE)


def _answers(url: str) -> bool:
    place = url.removeprefix("http://").rstrip("/")
    host, _, port = place.partition("/")[0].partition(":")
    try:
        return asyncio.run(ask(host, int(port or 80), None, PROMPT)).whole
    except (OSError, ValueError, IndexError):
        return False


def _session(leader: int) -> Iterator[int]:
    """Processes of the session that `leader` began."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(path.name)) == leader:
                yield int(path.name)


def _peak(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
