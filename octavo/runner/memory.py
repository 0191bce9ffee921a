"""What a model takes on a device, by arithmetic: the same for `octavo plan`, which has no files, and for the engine.

Pure: from the list of needed tensors and how they are quantised, nothing is read and torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.quantization.scheme import Scheme
from octavo.weights.checkpoint import QUANTISED, Checkpoint
from octavo.weights.needs import Source, TensorNeed
from octavo.weights.quantized import QuantizedCheckpoint

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

LAYER_PRODUCTS = ("qkv", "o", "gate_up", "down")
"""the matrices of a layer that only products use, and which so can be quantised"""

ONLINE_GROUPS = (64, 32)
"""inputs that share a scale where plain weights become int4, the first that divides a row; else the whole row"""


def weight_bytes(
    needs: Sequence[TensorNeed],
    dtype: str,
    *,
    scheme: Scheme | None = None,
    stored: Checkpoint | None = None,
    quantization: str = "",
) -> dict[str, int]:
    """Bytes of all weights on a device by their kind: `dtype`, "float32" for what stays wide, "int4", "int8", "fp8".

    The checkpoint's own quantisation is told by its files (`stored`), or by its configuration alone (`scheme`).
    `quantization`: what its plain matrices become while they are loaded.
    """
    if isinstance(stored, QuantizedCheckpoint):
        scheme = stored.scheme
    total: dict[str, int] = {}
    for need in needs:
        name = need.name.rpartition(".")[2]
        width = need.shape[-1]
        for source in need.sources:
            rows = _rows(source)
            kind, count = dtype, math.prod((rows, width)[: len(need.shape)]) * ELEMENT_BYTES[dtype]
            if name in (*LAYER_PRODUCTS, "head") and scheme is not None and _quantised(source, scheme, stored):
                kind, count = scheme.kind, quantised_bytes(rows, width, scheme)
            elif name in LAYER_PRODUCTS and quantization:
                kind, count = quantization, online_bytes(rows, width, quantization)
            elif need.wide and ELEMENT_BYTES[dtype] < 4:
                kind, count = "float32", count * 4 // ELEMENT_BYTES[dtype]
            total[kind] = total.get(kind, 0) + count
    return total


def quantised_bytes(outputs: int, inputs: int, scheme: Scheme) -> int:
    """Bytes of one matrix of a quantised checkpoint, as it is held."""
    codes = outputs * inputs * scheme.bits // 8
    if scheme.kind == "fp8":
        blocks = -(-outputs // 128) * -(-inputs // 128)
        return codes + 4 * (blocks if scheme.group else outputs)
    groups = outputs * (inputs // scheme.group if scheme.group else 1)
    return codes + groups * (3 if scheme.zeros else 2) + (4 * inputs if scheme.ordered else 0)


def online_bytes(outputs: int, inputs: int, kind: str) -> int:
    """Bytes of one plain matrix that was quantised while loading."""
    if kind != "int4":
        return outputs * inputs + 4 * outputs
    group = next((size for size in ONLINE_GROUPS if inputs % size == 0), inputs)
    return outputs * inputs // 2 + 3 * outputs * (inputs // group)


def _rows(source: Source) -> int:
    shape = source.shape if source.rows is None else (source.rows[1] - source.rows[0], *source.shape[1:])
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]


def _quantised(source: Source, scheme: Scheme, stored: Checkpoint | None) -> bool:
    if stored is not None:
        return stored.info(source.name).dtype in QUANTISED
    return source.name.endswith(".weight") and scheme.covers(source.name.removesuffix(".weight"))
