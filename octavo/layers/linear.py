"""Matrix products with weights: made from names, returned as functions x_TI -> y_TO.

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from octavo.kernels.cpu import AddFn, LinearFn, Norm
from octavo.kernels.reference import gelu_and_mul
from octavo.layers.base import Weights


def linear(
    weights: Weights, name: str, outputs: int, inputs: int, bias: bool = False, norm: Norm | None = None
) -> LinearFn:
    """y = norm(x) W^T + b with W = `name` [O, I] and, with `bias`, b = `name`_bias [O]."""
    weight_OI = weights.take(name, outputs, inputs)
    bias_O = weights.take(f"{name}_bias", outputs) if bias else None
    return weights.ops.linear(weight_OI, bias_O, norm)


def linear_add(weights: Weights, name: str, outputs: int, inputs: int, bias: bool = False) -> AddFn:
    """(x, residual) -> residual + x W^T + b; the residual may be overwritten."""
    weight_OI = weights.take(name, outputs, inputs)
    bias_O = weights.take(f"{name}_bias", outputs) if bias else None
    return weights.ops.linear_add(weight_OI, bias_O)


def gated_linear(
    weights: Weights,
    name: str,
    size: int,
    inputs: int,
    bias: bool = False,
    activation: str = "silu",
    norm: Norm | None = None,
) -> LinearFn:
    """activation(gate(norm(x))) * up(norm(x)), gate and up being the two halves of the rows of `name` [2 * size, I].

    `activation`: "silu", or "gelu_tanh" (GELU by its tanh formula).
    """
    weight_OI = weights.take(name, 2 * size, inputs)
    bias_O = weights.take(f"{name}_bias", 2 * size) if bias else None
    if activation == "silu":
        return weights.ops.gated_linear(weight_OI, bias_O, norm)
    product = weights.ops.linear(weight_OI, bias_O, norm)
    return lambda x_TI: gelu_and_mul(product(x_TI))
