"""Bounded reading of files and fields that a stranger wrote.

Everything in a model folder is untrusted. The helpers here open only regular files (a fifo or a device
would block or never end), refuse what is larger than the caller's limit before reading it, and turn every
damage into a `ModelError` that names the file. Links are followed: hub caches are built of them.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelError

MAX_JSON_BYTES = 16 << 20

T = TypeVar("T", int, float, str, bool, dict[str, Any], list[Any])


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put `path` in front of a ModelError that does not name it: for what was read out of a file before."""
    try:
        yield
    except ModelError as error:
        if str(path) in error.cause:
            raise
        raise ModelError(f"{path}: {error.cause}", error.fix) from None


def open_regular(path: Path) -> int:
    """Open `path` for reading and return the descriptor; refuse anything that is not a regular file."""
    try:
        # Without O_NONBLOCK the open of a fifo waits for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist.", "Check the path, or download the model again.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be opened ({error.strerror}).", "Check its permissions.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{path} is not a regular file.", "Replace it by the real file.")
    return descriptor


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ModelError(f"{path} has {size} bytes, more than the limit of {limit}.", "Check the file.")
        return file.read(limit)


def read_text(path: Path, limit: int) -> str:
    """The UTF-8 content of a regular file of at most `limit` bytes."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 at byte {error.start}.", "Download the file again.") from None


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a regular file of at most `limit` bytes."""
    try:
        value = json.loads(read_bytes(path, limit))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} holds no valid JSON ({error}).", "Download the file again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, not an object.", "Check the file.")
    return value


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The file as a read-only, memory-mapped array of bytes: nothing is read until it is touched."""
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size == 0:
            raise ModelError(f"{path} is empty.", "Download the file again.")
        return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    finally:
        os.close(descriptor)


@overload
def field(mapping: Mapping[str, Any], key: str, kind: type[T]) -> T: ...
@overload
def field(mapping: Mapping[str, Any], key: str, kind: type[T], default: T) -> T: ...
@overload
def field(mapping: Mapping[str, Any], key: str, kind: type[T], default: None) -> T | None: ...
def field(mapping: Mapping[str, Any], key: str, kind: type[T], default: Any = ...) -> Any:
    """`mapping[key]`, checked to be a `kind`; `default` when absent or null, ModelError when there is none.

    An int is taken where a float is asked for; a bool is never taken as a number.
    """
    value = mapping.get(key)
    if value is None:
        if default is ...:
            raise ModelError(f"the model's metadata has no {key!r}.", "Check that the files are complete.")
        return default
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ModelError(f"{key!r} in the model's metadata is a {type(value).__name__}, not a {kind.__name__}.")
    return value
