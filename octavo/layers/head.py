"""The output head: hidden states to logits. N tokens that need logits, V vocabulary, I features."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.kernels.quant import Weight
from octavo.kernels.reference import accumulate_dtype
from octavo.layers.linear import product


class Head:
    """logits = hidden W^T, scaled and soft-capped. The weight may be the embedding table (tied)."""

    def __init__(self, ops: Ops, weight_VI: Weight, scale: float, softcap: float) -> None:
        self.product = product(ops, weight_VI, None)
        self._scale = scale
        self._softcap = softcap

    def __call__(self, hidden_NI: Tensor) -> Tensor:
        """logits_NV in float32 (float64 for a float64 model)."""
        logits_NV = self.product(hidden_NI).to(accumulate_dtype(hidden_NI.dtype))
        if self._scale != 1.0:
            logits_NV = logits_NV * self._scale
        if self._softcap:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV
