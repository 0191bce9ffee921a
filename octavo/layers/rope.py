"""Rotary position embedding (Su et al. 2021): cosines and sines of one step, shared by all layers.

All angles are computed in float32 from int64 positions and rounded to the model dtype at the end, which is
the arithmetic that the checkpoints were trained and published with. Half-split order: element i of a head
pairs with element i + D/2. The rotation itself is `kernels.reference.rotate`.

Shape letters: T tokens, D head dim, F = D/2 frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rope:
    """Makes the cosines and sines of a step from frequencies (radians per position, float32), times `magnitude`."""

    def __init__(self, frequencies_F: Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> None:
        self._frequencies_F = frequencies_F
        self._dtype = dtype
        self._magnitude = magnitude

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos_TD, sin_TD) as `kernels.reference.rotate` wants them: [cos, cos] and [-sin, sin]."""
        angles_TF = positions_T[:, None].to(torch.float32) * self._frequencies_F
        cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
        if self._magnitude != 1.0:
            cos_TF, sin_TF = cos_TF * self._magnitude, sin_TF * self._magnitude
        cos_TF, sin_TF = cos_TF.to(self._dtype), sin_TF.to(self._dtype)
        return torch.cat((cos_TF, cos_TF), dim=-1), torch.cat((-sin_TF, sin_TF), dim=-1)
