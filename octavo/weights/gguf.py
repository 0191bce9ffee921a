"""GGUF files (versions 2 and 3, little endian) as a `Checkpoint`, with a reader that trusts nothing.

Opening reads the header only: metadata, then the table of tensors. Every length is checked against the bytes
that are left before anything of that length is made, so a hostile file costs at most a few times its own size.
Format: docs/gguf.md of the ggml project. Layout:

    "GGUF" | version u32 | tensors u64 | entries u64 | entries x (key, type u32, value)
    | tensors x (name, dimensions u32, size u64 per dimension, type u32, offset u64) | padding | data
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from octavo.errors import ModelError
from octavo.files import map_file
from octavo.quantization import ggml
from octavo.weights.checkpoint import PLAIN_DTYPES, Array, TensorInfo, is_block_type

MAX_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ARRAY = 1 << 22
MAX_ARRAY_DEPTH = 4
MAX_KEY_BYTES = 1024
MAX_TENSOR_NAME_BYTES = 1024
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

MAX_PARTS = 1000
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SHOWN = 10
_AGAIN = "Download the file again."

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}


class GgufCheckpoint:
    """One GGUF file, or all parts of one that was split. `path` may name any part.

    `metadata` maps keys to int, float, bool, str, list, or a numpy array of numbers; it is that of the first part.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[Array, int]] = {}
        files = part_files(path)
        for number, file in enumerate(files):
            content = map_file(file)
            reader = _Reader(content.data, file)
            tensors = reader.header()
            metadata = reader.metadata()
            _check_part(reader, metadata, number, len(files))
            infos, offsets = _tensor_table(reader, tensors, metadata)
            for name, info in infos.items():
                if name in self._infos:
                    reader.fail(f"repeats the tensor {name!r} of {self._infos[name].file}")
                self._infos[name], self._places[name] = info, (content, offsets[name])
            self.metadata = self.metadata or metadata
        total = self.metadata.get("split.tensors.count", len(self._infos))
        if total != len(self._infos):
            raise ModelError(f"{path} and its parts have {len(self._infos)} tensors, not {total}.", _AGAIN)

    def names(self) -> list[str]:
        """All tensor names, in file order."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Facts about one tensor; KeyError when there is none of that name."""
        return self._infos[name]

    def read(self, name: str) -> Array:
        """A read-only view: elements for plain types, uint8 [..., row bytes] for block types."""
        info = self._infos[name]
        content, offset = self._places[name]
        raw = content[offset : offset + info.nbytes]
        if is_block_type(info.dtype):
            return raw.reshape(*info.shape[:-1], info.nbytes // math.prod(info.shape[:-1]))
        return raw.view(PLAIN_DTYPES[info.dtype]).reshape(info.shape)


def part_files(path: Path) -> list[Path]:
    """All parts of a split file, in order, from the name of any; [path] for a file that is whole."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= MAX_PARTS:
        raise ModelError(f"{path} is part {match[2]} of {match[3]}.", f"At most {MAX_PARTS} parts are read.")
    files = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        names = ", ".join(absent[:_SHOWN])
        raise ModelError(f"{path.parent} lacks {len(absent)} of {count} parts: {names}.", "Finish the download.")
    return files


def _check_part(reader: _Reader, metadata: dict[str, Any], number: int, count: int) -> None:
    """What a part says of itself fits its name."""
    claim = (metadata.get("split.no", 0), metadata.get("split.count", 1) or 1)
    if claim != (number, count):
        reader.fail(
            f"says that it is part {claim[0]} (from 0) of {claim[1]}, but it is read as part {number} of {count}",
            "Keep the names of the parts as they were: name-00001-of-00003.gguf.",
        )


class _Reader:
    """A cursor over the header that refuses to step outside the file."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def fail(self, what: str, fix: str = _AGAIN) -> NoReturn:
        raise ModelError(f"{self.path} {what}.", fix)

    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int, what: str) -> memoryview:
        if size > self.left():
            self.fail(f"is cut off: {what} needs {size} bytes at offset {self.at}, {self.left()} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str, limit: int | None = None) -> str:
        size = self.u64(what)
        if limit is not None and size > limit:
            self.fail(f"has {what} of {size} bytes, more than {limit}")
        try:
            return str(self.take(size, what), "utf-8")
        except UnicodeDecodeError:
            self.fail(f"has {what} that is not UTF-8, before offset {self.at}")

    def header(self) -> int:
        """Reads up to the counts; returns the number of tensors and leaves the number of entries next."""
        magic = bytes(self.take(4, "the magic number"))
        if magic != b"GGUF":
            self.fail(f"is not a GGUF file: it begins with {magic!r}")
        version = self.u32("the version")
        if version not in (2, 3):
            big_endian = version & 0xFFFF == 0
            kind = "big endian" if big_endian else f"version {version}"
            self.fail(f"is a GGUF file of {kind}", "Convert it to version 3, little endian.")
        tensors = self.u64("the tensor count")
        if tensors > MAX_TENSORS:
            self.fail(f"claims {tensors} tensors, more than {MAX_TENSORS}")
        return tensors

    def metadata(self) -> dict[str, Any]:
        count = self.u64("the metadata count")
        if count > MAX_ENTRIES:
            self.fail(f"claims {count} metadata entries, more than {MAX_ENTRIES}")
        result: dict[str, Any] = {}
        for _ in range(count):
            key = self.string("a metadata key", MAX_KEY_BYTES)
            if key in result:
                self.fail(f"has the metadata key {key!r} twice")
            result[key] = self.value(self.u32(f"the type of {key!r}"), key)
        return result

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            return np.frombuffer(self.take(dtype.itemsize, repr(key)), dtype)[0].item()
        if kind == _BOOL:
            flag = self.take(1, repr(key))[0]
            if flag > 1:
                self.fail(f"has the value {flag} for the boolean {key!r}")
            return bool(flag)
        if kind == _STRING:
            return self.string(repr(key))
        if kind == _ARRAY and depth < MAX_ARRAY_DEPTH:
            return self.array(key, depth)
        self.fail(f"has an unknown or too deeply nested value type {kind} for {key!r}")

    def array(self, key: str, depth: int) -> Any:
        kind, count = self.u32(f"the type of {key!r}"), self.u64(f"the length of {key!r}")
        # A nested array or a string takes at least 8 bytes even when it is empty.
        least = np.dtype(_NUMBERS[kind]).itemsize if kind in _NUMBERS else 1 if kind == _BOOL else 8
        if count > MAX_ARRAY or count * least > self.left():
            self.fail(f"claims {count} values for {key!r} with {self.left()} bytes left (limit {MAX_ARRAY})")
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            return np.frombuffer(self.take(count * dtype.itemsize, repr(key)), dtype).copy()
        if kind == _STRING:
            return self.strings(key, count)
        return [self.value(kind, key, depth + 1) for _ in range(count)]

    def strings(self, key: str, count: int) -> list[str]:
        """As `string`, `count` times, without a call per string: vocabularies have some 100,000."""
        unpack, data, at, end = struct.Struct("<Q").unpack_from, self.data, self.at, len(self.data)
        result = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > end:
                    self.fail(f"is cut off inside {key!r}, at offset {start}")
                result.append(str(data[start:at], "utf-8"))
        except (struct.error, UnicodeDecodeError):
            self.fail(f"is cut off or not UTF-8 inside {key!r}, near offset {at}")
        self.at = at
        return result


def _tensor_table(
    reader: _Reader, count: int, metadata: dict[str, Any]
) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Reads the tensor table and checks it as a whole: names, types, places. Returns infos and file offsets."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        reader.fail(f"has the alignment {alignment!r}, not a power of two from 8 to {MAX_ALIGNMENT}")
    infos: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    unsupported: Counter[str] = Counter()
    for _ in range(count):
        info, kind, offset = _tensor_entry(reader)
        if info.name in infos:
            reader.fail(f"has the tensor {info.name!r} twice")
        if offset % alignment:
            reader.fail(f"has the tensor {info.name!r} at offset {offset}, not a multiple of {alignment}")
        if kind.name not in ggml.READABLE:
            unsupported[kind.name] += 1
        infos[info.name], offsets[info.name] = info, offset
    if unsupported:
        found = ", ".join(f"{kind} ({number} tensors)" for kind, number in unsupported.items())
        reader.fail(f"has tensors of a type that is not supported: {found}", f"Use {', '.join(ggml.READABLE)}.")
    start = -(-reader.at // alignment) * alignment
    offsets = {name: start + offset for name, offset in offsets.items()}
    _check_places(reader, infos, offsets)
    return infos, offsets


def _tensor_entry(reader: _Reader) -> tuple[TensorInfo, ggml.GgmlType, int]:
    """One entry of the table: facts, type, and offset from the start of the data."""
    name = reader.string("a tensor name", MAX_TENSOR_NAME_BYTES)
    dimensions = reader.u32(f"the dimensions of {name!r}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        reader.fail(f"has {dimensions} dimensions for the tensor {name!r}, not 1 to {MAX_DIMENSIONS}")
    # The file gives the fastest dimension first.
    shape = tuple(reader.u64(f"the shape of {name!r}") for _ in range(dimensions))[::-1]
    kind = ggml.BY_CODE.get(code := reader.u32(f"the type of {name!r}"))
    if kind is None:
        reader.fail(f"has the unknown type {code} for the tensor {name!r}")
    if 0 in shape or shape[-1] % kind.block:
        reader.fail(f"has the shape {list(shape)} for the {kind.name} tensor {name!r}, blocks of {kind.block}")
    nbytes = math.prod(shape) // kind.block * kind.nbytes
    offset = reader.u64(f"the offset of {name!r}")
    return TensorInfo(name, kind.name, shape, nbytes, str(reader.path)), kind, offset


def _check_places(reader: _Reader, infos: dict[str, TensorInfo], offsets: dict[str, int]) -> None:
    """No tensor reaches past the end of the file or into another."""
    size, end, previous = len(reader.data), 0, ""
    for name in sorted(offsets, key=offsets.__getitem__):
        if offsets[name] < end:
            reader.fail(f"has the tensors {previous!r} and {name!r} in the same place")
        end, previous = offsets[name] + infos[name].nbytes, name
        if end > size:
            reader.fail(f"is cut off: the tensor {name!r} ends at {end}, the file at {size}")
