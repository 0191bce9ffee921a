"""Writers of small model files for tests, independent of the readers under test."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """Type and value: bool, int (u32), float (f32), str, or a list of one of these."""
    kind, body = _gguf_typed(value)
    return struct.pack("<I", kind) + body


def _gguf_typed(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, gguf_string(value)
        case list():
            typed = [_gguf_typed(item) for item in value]
            kind = typed[0][0] if typed else 4
            return 9, struct.pack("<IQ", kind, len(value)) + b"".join(body for _, body in typed)
    raise TypeError(value)


def gguf_tensor(name: str, dims: tuple[int, ...], code: int, offset: int) -> bytes:
    """One entry of the tensor table; `dims` fastest first, as in the file."""
    head = gguf_string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    return head + struct.pack("<IQ", code, offset)


def gguf_bytes(
    metadata: dict[str, Any], tensors: list[bytes], data: bytes, version: int = 3, alignment: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(gguf_string(key) + gguf_value(value) for key, value in metadata.items()) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def safetensors_header(header: dict[str, Any] | str | bytes, data: bytes = b"") -> bytes:
    """The header as bytes, text, or an object that is padded so that the data is aligned."""
    if isinstance(header, dict):
        header = json.dumps(header)
        header += " " * (-len(header) % 8)
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw)) + raw + data


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Plain numpy tensors; uint16 arrays are written as BF16."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64", "int32": "I32"}
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": names[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    path.write_bytes(safetensors_header(header, data))
