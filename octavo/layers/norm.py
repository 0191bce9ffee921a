"""RMS norm (Zhang and Sennrich 2019). T tokens, I features."""

from __future__ import annotations

from torch import Tensor

from octavo.kernels.cpu import Norm
from octavo.layers.base import Weights


class RmsNorm:
    """x / rms(x) * weight over the last dim, computed in float32 or wider, rounded once at the end."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self._ops = weights.ops
        self._weight_I = weights.take(name, size, wide=True)
        self._eps = eps

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Norm of x."""
        return self._ops.rms_norm(x_TI, self._weight_I, self._eps)

    @property
    def parts(self) -> Norm:
        """(weight_I, eps), for a product that norms its input itself."""
        return self._weight_I, self._eps
