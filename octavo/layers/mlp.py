"""The gated MLP (Shazeer 2020): down(activation(gate(x)) * up(x)). T tokens, I features."""

from __future__ import annotations

from torch import Tensor

from octavo.kernels.cpu import AddFn, LinearFn, Norm
from octavo.layers.base import Weights
from octavo.layers.linear import gated_linear, linear, linear_add


class Mlp:
    """x_TI -> y_TI with weights `<prefix>gate_up` and `<prefix>down`.

    With `before`, it is the whole sub-layer of a pre-norm model; see `octavo.layers.attention.Attention`.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        hidden_size: int,
        size: int,
        bias: bool,
        activation: str = "silu",
        before: Norm | None = None,
    ) -> None:
        self._gate_up = gated_linear(weights, f"{prefix}gate_up", size, hidden_size, bias, activation, before)
        self._down: LinearFn | None = None
        self._down_add: AddFn | None = None
        if before is None:
            self._down = linear(weights, f"{prefix}down", hidden_size, size, bias)
        else:
            self._down_add = linear_add(weights, f"{prefix}down", hidden_size, size, bias)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """The MLP of each token, or the stream after this sub-layer."""
        inside_TI = self._gate_up(x_TI)
        return self._down(inside_TI) if self._down is not None else self._down_add(inside_TI, x_TI)  # type: ignore[misc]
