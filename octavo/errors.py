"""Typed errors. Every refusal names its cause, the number that decided, and what to do about it.

A user-facing error is one `OctavoError` with the text `cause. fix`. Classes tell the caller what
kind of thing is wrong (and the command line which exit code to use):

- `ConfigError` (exit 2): options that do not fit together or do not fit this machine.
- `ModelError` (exit 3): a model folder or file that cannot be loaded as it is.
- `RequestError` (HTTP 400): one request is refused; the engine and all other requests go on. `QueueFull` (HTTP 429):
  it would be taken later.
- `EngineError` (exit 4): the device or an invariant of the engine is broken; the engine stops.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose.

    `cause` says what is wrong, with the numbers; `fix` says what the user can do (may be empty).
    """

    exit_code = 1

    def __init__(self, cause: str, fix: str = "") -> None:
        self.cause = cause
        self.fix = fix
        super().__init__(f"{cause} {fix}".strip())


class ConfigError(OctavoError, ValueError):
    """Options that contradict each other, the model or the machine."""

    exit_code = 2


class ModelError(OctavoError, ValueError):
    """A model folder or file that is unsupported, incomplete or damaged."""

    exit_code = 3


class RequestError(OctavoError, ValueError):
    """One request that cannot be served; nothing else is affected. `param` names the field."""

    exit_code = 1

    def __init__(self, cause: str, fix: str = "", param: str | None = None) -> None:
        self.param = param
        super().__init__(cause, fix)


class QueueFull(RequestError):
    """One request that the engine does not take now, because too much waits already."""


class EngineError(OctavoError, RuntimeError):
    """The device or an invariant of the engine is broken: the engine cannot go on."""

    exit_code = 4


def invariant(condition: object, message: str) -> None:
    """Raise `EngineError` when one of our own invariants is broken. Survives `python -O`, unlike `assert`."""
    if not condition:
        raise EngineError(f"internal invariant broken: {message}", "Please report this with the log.")
