"""Opens the models named on standard input, one a line, in this process; prints one JSON object for each.

Under an audit hook: whatever runs code or programs, unpickles, loads a library or opens a connection while a model
is opened is reported. A model that opens also generates two tokens and renders its chat template.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

_SUSPECT = {
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pickle.find_class",
    "ctypes.dlopen", "socket.connect", "socket.bind", "shutil.rmtree", "os.remove", "os.rename", "marshal.loads",
}  # fmt: skip
seen: list[str] = []
place = ""


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what must not happen while a model is opened."""
    if not place:
        return
    if event in _SUSPECT and not (event == "marshal.loads" and _importing()):
        seen.append(f"{event} {arguments!r}"[:200])
    elif event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(place):
        seen.append(f"exec of {arguments[0].co_filename}")
    elif event == "import" and str(arguments[1] or "").startswith(place):
        seen.append(f"import of {arguments[1]}")


def _importing() -> bool:
    """Python reads its own cached modules with marshal."""
    frame = sys._getframe(2)
    return "importlib" in frame.f_code.co_filename


def memory(name: str) -> int:
    """A value of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) << 10


def open_one(path: Path) -> dict[str, Any]:
    """What became of one model."""
    from octavo import LLM, SamplingParams
    from octavo.errors import OctavoError, RequestError

    Path("/proc/self/clear_refs").write_text("5")
    before, begin = memory("VmRSS"), time.monotonic()
    result: dict[str, Any] = {"path": str(path)}
    try:
        llm = LLM(str(path), device="torch-cpu", max_model_len=32, num_gpu_blocks_override=8)
        (output,) = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        result["opened"] = output.outputs[0].finish_reason
        try:
            llm.tokenize_chat([{"role": "user", "content": "x"}])
        except RequestError as error:
            result["template"] = str(error)
        llm.engine.close()
    except OctavoError as error:
        result |= {"refused": str(error), "code": error.exit_code}
    except Exception as error:  # the point of the exercise
        result["crashed"] = f"{type(error).__name__}: {error}"[:300]
    result |= {"seconds": time.monotonic() - begin, "bytes": memory("VmHWM") - before}
    return result


def main() -> None:
    """All models."""
    global place
    logging.disable(logging.CRITICAL)
    import octavo.engine.llm
    import octavo.model.decoder  # noqa: F401  so that imports are not counted

    paths = [Path(line) for line in sys.stdin.read().splitlines()]
    open_one(paths[0])  # warm: later imports inside functions
    sys.addaudithook(hook)
    for path in paths:
        place = str(path if path.is_dir() else path.parent)
        seen.clear()
        result = open_one(path)
        print(json.dumps(result | {"seen": list(seen)}), flush=True)


if __name__ == "__main__":
    main()
