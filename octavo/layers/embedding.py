"""Token embedding: one row of the table per token. T tokens, V vocabulary, I features."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.base import Weights


class Embedding:
    """ids_T -> x_TI, times `scale` in the model dtype. Ids must lie in the vocabulary; admission has checked that."""

    def __init__(self, weights: Weights, name: str, vocab_size: int, size: int, scale: float) -> None:
        self.weight_VI = weights.take(name, vocab_size, size)
        self._scale = float(torch.tensor(scale, dtype=self.weight_VI.dtype))

    def __call__(self, ids_T: Tensor) -> Tensor:
        """Rows of the table."""
        x_TI = torch.nn.functional.embedding(ids_T, self.weight_VI)
        return x_TI if self._scale == 1.0 else x_TI * self._scale
