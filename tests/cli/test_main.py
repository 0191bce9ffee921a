"""The dispatcher: what each kind of failure prints and returns, and that it imports nothing early."""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import ModuleType

import pytest

from octavo.cli import main as cli
from octavo.errors import ConfigError, EngineError, ModelError, OctavoError, RequestError


def plant(monkeypatch: pytest.MonkeyPatch, effect: BaseException | int) -> None:
    """Adds a command `probe` whose `run` returns or raises `effect`."""
    module = ModuleType("octavo.cli.probe")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--number", type=int, default=0)

    def run(args: argparse.Namespace) -> int:
        if isinstance(effect, BaseException):
            raise effect
        return effect + int(args.number)

    module.add_arguments, module.run = add_arguments, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.cli.probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("octavo.cli.probe", "a probe"))


def test_runs_the_command_and_returns_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 40)
    assert cli.main(["probe", "--number", "2"]) == 42


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError, 2), (ModelError, 3), (EngineError, 4), (RequestError, 1), (OctavoError, 1)]
)
def test_an_octavo_error_is_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[OctavoError], code: int
) -> None:
    plant(monkeypatch, error("block size 7 is not a power of two.", "Use 16."))
    assert cli.main(["probe"]) == code
    assert capsys.readouterr().err == "octavo: error: block size 7 is not a power of two. Use 16.\n"


def test_any_other_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, KeyboardInterrupt())
    assert cli.main(["probe"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert cli.main(["probe"]) == 2
    assert "pip install 'octavo[torch]'" in capsys.readouterr().err


def test_a_broken_import_of_our_own_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, ModuleNotFoundError("No module named 'octavo.nowhere'", name="octavo.nowhere"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["probe"])


def test_a_missing_command_module_breaks_only_that_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "later", cli.Command("octavo.cli.later", "comes later"))
    assert cli.main(["later"]) == 2
    assert "no command 'later'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    assert "comes later" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "code"), [([], 0), (["-h"], 0), (["--version"], 0), (["nonsense"], 2)])
def test_the_top_level(words: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == code


def test_a_closed_pipe_is_quiet() -> None:
    code = "import sys; from octavo.cli.main import main; sys.exit(main(['doctor', '--json']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == cli.BROKEN_PIPE
