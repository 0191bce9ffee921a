"""The gated MLP (Shazeer 2020): down(activation(gate(x)) * up(x)). T tokens, I features."""

from __future__ import annotations

from torch import Tensor

from octavo.layers.base import Weights
from octavo.layers.linear import gated_linear, linear


class Mlp:
    """x_TI -> y_TI with weights `<prefix>gate_up` and `<prefix>down`."""

    def __init__(
        self, weights: Weights, prefix: str, hidden_size: int, size: int, bias: bool, activation: str = "silu"
    ) -> None:
        self._gate_up = gated_linear(weights, f"{prefix}gate_up", size, hidden_size, bias, activation)
        self._down = linear(weights, f"{prefix}down", hidden_size, size, bias)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """The MLP of each token."""
        return self._down(self._gate_up(x_TI))
