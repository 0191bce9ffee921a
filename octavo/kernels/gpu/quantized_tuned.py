"""Launches of the products with quantised weights, by kind and by the most tokens they are for; measured on an H200.

`octavo.kernels.gpu.quantized` reads the first row that has room for its tokens; benchmarks/gpu/quantized.py --tune
finds the values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Launch:
    """Outputs and (at most) tokens of a tile, warps, stages, programs that a multiprocessor should get; or, if given,
    programs that share a tile of outputs."""

    outputs: int
    tokens: int
    warps: int
    stages: int
    waves: float = 3.0
    raw: bool = False
    ahead: int = 0
    split: int = 0

    def halved(self) -> Launch:
        """For two products at once."""
        return replace(self, outputs=max(64, self.outputs // 2))


TUNED: dict[str, dict[int, Launch]] = {
    "int4": {16: Launch(128, 16, 4, 3), 32: Launch(128, 32, 4, 3), 64: Launch(128, 64, 8, 3)},
    "int8": {16: Launch(128, 16, 4, 4), 32: Launch(128, 32, 4, 4), 64: Launch(128, 64, 8, 3)},
    "fp8": {16: Launch(128, 16, 4, 4), 32: Launch(128, 32, 4, 4), 64: Launch(128, 64, 8, 3)},
}

MOST_TOKENS = {"int4": 64, "int8": 64, "fp8": 16}
"""beyond these, the weight is widened and left to the library, or, FP8, multiplied by it as it is"""
