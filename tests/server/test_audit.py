"""RELIABILITY D1 to D3, D7: an audit hook watches both server processes while the poison corpus runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.poison import POISON
from tests.server.running import Running

# Python imports this before anything else, in both processes. Nothing is reported before the flag exists, because
# start-up imports modules, binds the port and starts the engine.
HOOK = """
import os, sys
def hook(event, args, flag={flag!r}):
    if event == "pickle.find_class":
        report = True
    elif event in ("exec", "compile"):
        name = args[0].co_filename if event == "exec" else str(args[1])
        report = name.startswith("<") and name not in ("<template>", "<frozen importlib._bootstrap>")
    else:
        report = event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.bind",
                           "socket.connect", "ctypes.dlopen")
    if report and os.path.exists(flag):
        os.write(2, f"AUDIT {{event}} {{args!r:.200}}\\n".encode())
sys.addaudithook(hook)
"""


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """The flag that arms the hook."""
    flag = tmp_path / "armed"
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(flag=str(flag)))
    return flag


def test_nothing_is_unpickled_compiled_started_or_connected(watched: Path) -> None:
    with Running("--max-model-len", "256", paths=(str(watched.parent),)) as server:
        server.chat(max_tokens=2)
        watched.touch()
        for path, body, _ in POISON.values():
            server.call(path, body if isinstance(body, bytes) else json.dumps(body).encode())
        for path in ("/metrics", "/debug/kv", "/debug/requests", "/", "/v1/models", "/health"):
            assert server.call(path).status == 200
        assert server.events("/v1/completions", {"prompt": "x"})
        assert "AUDIT" not in server.text, server.text


def test_the_hook_sees_both_processes(watched: Path) -> None:
    """The watch itself is watched: a start with the flag set is full of reports."""
    watched.touch()
    with Running(paths=(str(watched.parent),)) as server:
        reports = server.text
        assert "AUDIT socket.bind" in reports and "AUDIT subprocess.Popen" in reports
