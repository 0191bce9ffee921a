"""Safetensors files, one or many shards, as a `Checkpoint`.

The header is checked as strictly as the format's own library does (which cannot deliver bfloat16 to numpy): no
key twice, offsets that match shapes and types, and tensors that cover the data without overlap or hole. Layout
of a file: header length u64 | JSON header | data. There is no checksum: a flipped weight loads.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec

from octavo.errors import ModelError
from octavo.files import map_file, read_json
from octavo.weights.checkpoint import PLAIN_DTYPES, Array, TensorInfo

MAX_HEADER_BYTES = 32 << 20
_INDEX = "model.safetensors.index.json"
_MAX_NAME = 1024
_SHOWN = 10
_AGAIN = "Download the file again."


class _Entry(msgspec.Struct):
    """What the header says of one tensor."""

    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=16)]
    data_offsets: tuple[int, int]


class SafetensorsCheckpoint:
    """The tensors of one or several safetensors files, memory-mapped."""

    def __init__(self, files: list[Path]) -> None:
        """Opens every file and checks its header; ModelError names the file and the tensor."""
        self._infos: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[Array, int]] = {}
        for path in files:
            content = map_file(path)
            start, entries = _header(path, content)
            for name, (info, offset) in entries.items():
                if name in self._infos:
                    raise ModelError(f"{path} repeats the tensor {name!r} of {self._infos[name].file}.", _AGAIN)
                self._infos[name] = info
                self._places[name] = content, start + offset

    @classmethod
    def from_folder(cls, folder: Path) -> SafetensorsCheckpoint:
        """The shards of `model.safetensors.index.json`, else `model.safetensors`, else the only such file."""
        index = folder / _INDEX
        if index.exists():
            return cls._from_index(folder, index)
        single = folder / "model.safetensors"
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder} has no safetensors file.", "Download the model's safetensors files.")
        if len(files) > 1:
            raise ModelError(f"{folder} has {len(files)} safetensors files but no {_INDEX}.", "Download the index.")
        return cls(files)

    @classmethod
    def _from_index(cls, folder: Path, index: Path) -> SafetensorsCheckpoint:
        shards = read_json(index, MAX_HEADER_BYTES).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ModelError(f"{index} has no weight_map from tensor names to file names.", _AGAIN)
        files = sorted(set(shards.values()))
        for file in files:
            # A name is never a path: an index must not reach outside its folder.
            if not file.endswith(".safetensors") or Path(file).name != file:
                raise ModelError(f"{index} names {file!r}, which is not a safetensors file of the folder.", _AGAIN)
        absent = [file for file in files if not (folder / file).exists()]
        if absent:
            raise ModelError(
                f"{folder} lacks {len(absent)} of the {len(files)} files in its index: {', '.join(absent[:_SHOWN])}.",
                "Finish the download.",
            )
        checkpoint = cls([folder / file for file in files])
        for name, file in shards.items():
            if name not in checkpoint._infos or Path(checkpoint._infos[name].file).name != file:
                raise ModelError(f"{index} places the tensor {name!r} in {file}, which lacks it.", _AGAIN)
        return checkpoint

    def names(self) -> list[str]:
        """All tensor names, file after file."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Facts about one tensor; KeyError when there is none of that name."""
        return self._infos[name]

    def read(self, name: str) -> Array:
        """A read-only view of the tensor; possibly not aligned, when the file is not."""
        info = self._infos[name]
        content, offset = self._places[name]
        dtype = PLAIN_DTYPES[info.dtype]
        return content[offset : offset + info.nbytes].view(dtype).reshape(info.shape)


def _header(path: Path, content: Array) -> tuple[int, dict[str, tuple[TensorInfo, int]]]:
    """Where the data starts, and each tensor's facts and offset into it."""
    length = int.from_bytes(content[:8].tobytes(), "little")
    if len(content) < 8 or length > min(MAX_HEADER_BYTES, len(content) - 8):
        raise ModelError(
            f"{path} is cut off or damaged: {len(content)} bytes for a header of {length} bytes "
            f"(limit {MAX_HEADER_BYTES}).",
            _AGAIN,
        )
    entries = {name: _place(path, name, entry) for name, entry in _parse(path, content[8 : 8 + length].tobytes())}
    end, previous = 0, ""
    for name, (info, offset) in sorted(entries.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if offset != end:
            kind = "overlap" if offset < end else "leave a hole"
            raise ModelError(f"{path} is damaged: the tensors {previous!r} and {name!r} {kind}.", _AGAIN)
        end, previous = offset + info.nbytes, name
    if 8 + length + end != len(content):
        raise ModelError(
            f"{path} has {len(content)} bytes, but its header describes {8 + length + end} (last: {previous!r}).",
            _AGAIN,
        )
    return 8 + length, entries


def _parse(path: Path, header: bytes) -> list[tuple[str, _Entry]]:
    """The header's entries, by name."""
    name = ""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = []
        for name, text in raw.items():
            if len(name) > _MAX_NAME:
                name = name[:_MAX_NAME]
                raise ValueError(f"its name has more than {_MAX_NAME} characters")
            entries.append((name, msgspec.json.decode(text, type=_Entry)))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        place = f" for the tensor {name!r}" if name else ""
        raise ModelError(f"{path} has a damaged header{place} ({error}).", _AGAIN) from None
    # A parser keeps the last of two equal keys; every tensor has this field once, so counting shows the rest.
    if header.count(b'"data_offsets"') != len(entries):
        raise ModelError(f"{path} has a damaged header: a tensor is described twice.", _AGAIN)
    return entries


def _place(path: Path, name: str, entry: _Entry) -> tuple[TensorInfo, int]:
    """Facts and offset of one tensor of the header."""
    if entry.dtype not in PLAIN_DTYPES:
        raise ModelError(f"{path} has the type {entry.dtype!r} for {name!r}.", f"Use {', '.join(PLAIN_DTYPES)}.")
    nbytes = math.prod(entry.shape) * PLAIN_DTYPES[entry.dtype].itemsize
    start, stop = entry.data_offsets
    if start < 0 or stop - start != nbytes:
        raise ModelError(f"{path} gives {name!r} the bytes {start} to {stop}, but its shape needs {nbytes}.", _AGAIN)
    return TensorInfo(name, entry.dtype, tuple(entry.shape), nbytes, str(path)), start
