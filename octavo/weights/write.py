"""Writing one safetensors file: the header, then every tensor's bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from octavo.weights.checkpoint import PLAIN_DTYPES, Array

Stored = tuple[Array, str]
"""an array and its dtype tag (see `octavo.weights.checkpoint`): bfloat16 as uint16 with "BF16" """

TAGS = {"int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32", "uint8": "U8", "int8": "I8"}
"""numpy dtype -> tag, of those that mean one thing"""


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> int:
    """Write the file, aligned to 8 bytes; returns its size. What was there is replaced when all is written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (array, tag) in tensors.items():
        size = math.prod(array.shape) * PLAIN_DTYPES[tag].itemsize
        header[name] = {"dtype": tag, "shape": list(array.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text.encode())
        for array, _ in tensors.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    part.replace(path)
    return 8 + len(text) + end
