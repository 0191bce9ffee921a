"""Launches of the products with quantised weights, by kind and by the most tokens they are for; measured on an H200.

`octavo.kernels.gpu.quantized_linear` reads the first row that has room for its tokens; what
benchmarks/gpu/quantized.py --tune finds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """How the work is cut, and what a program does."""

    outputs: int
    """rows of a tile"""
    tokens: int
    """of a tile, at most"""
    warps: int
    stages: int
    waves: float = 3.0
    """programs that a multiprocessor should get"""
    raw: bool = False
    """4 bits: take zeros off sums instead of off codes"""
    split: int = 0
    """programs that share a tile; 0: what `waves` needs"""


TUNED: dict[str, dict[int, Launch]] = {
    "int4": {
        8: Launch(64, 8, 2, 3, 8.0, True),
        16: Launch(64, 16, 2, 3, 4.0, True),
        32: Launch(64, 32, 2, 3, 4.0),
        64: Launch(64, 64, 4, 3, 2.0),
        128: Launch(128, 128, 8, 3, 1.0),
    },
    "int8": {
        8: Launch(64, 8, 2, 3, 4.0),
        16: Launch(64, 16, 2, 3, 2.0),
        32: Launch(128, 32, 4, 3, 2.0),
        64: Launch(128, 64, 8, 3, 1.0),
    },
    "fp8": {
        8: Launch(64, 8, 2, 3, 4.0),
        16: Launch(64, 16, 2, 3, 2.0),
    },
}

MOST_TOKENS = {"int4": 128, "int8": 64, "fp8": 16}
"""beyond these, the weight is widened and left to the library, or, FP8, multiplied by it as it is"""
