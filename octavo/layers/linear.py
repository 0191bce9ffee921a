"""Matrix products with weights: made from names, returned as functions x_TI -> y_TO.

A weight is a tensor, quantised, or several of both over the same inputs (`octavo.kernels.quant`). Layers do not see
the difference.

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cpu import AddFn, LinearFn, Norm
from octavo.kernels.ops import Ops
from octavo.kernels.quant import JoinedWeight, Weight
from octavo.kernels.reference import gelu_and_mul, silu_and_mul
from octavo.layers.base import Weights


def linear(
    weights: Weights, name: str, outputs: int, inputs: int, bias: bool = False, norm: Norm | None = None
) -> LinearFn:
    """y = norm(x) W^T + b with W = `name` [O, I] and, with `bias`, b = `name`_bias [O]."""
    weight_OI = weights.take_weight(name, outputs, inputs)
    bias_O = weights.take(f"{name}_bias", outputs) if bias else None
    return product(weights.ops, weight_OI, bias_O, norm)


def linear_add(weights: Weights, name: str, outputs: int, inputs: int, bias: bool = False) -> AddFn:
    """(x, residual) -> residual + x W^T + b; the residual may be overwritten."""
    weight_OI = weights.take_weight(name, outputs, inputs)
    bias_O = weights.take(f"{name}_bias", outputs) if bias else None
    if isinstance(weight_OI, JoinedWeight):
        apply = product(weights.ops, weight_OI, bias_O)
        return lambda x_TI, residual_TO: apply(x_TI) + residual_TO
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
    weight_OI = weights.take_weight(name, 2 * size, inputs)
    bias_O = weights.take(f"{name}_bias", 2 * size) if bias else None
    if activation == "silu" and not isinstance(weight_OI, JoinedWeight):
        return weights.ops.gated_linear(weight_OI, bias_O, norm)
    gate = silu_and_mul if activation == "silu" else gelu_and_mul
    both = product(weights.ops, weight_OI, bias_O, norm)
    return lambda x_TI: gate(both(x_TI))


def product(ops: Ops, weight_OI: Weight, bias_O: Tensor | None, norm: Norm | None = None) -> LinearFn:
    """y = norm(x) W^T + b of any kind of weight."""
    if not isinstance(weight_OI, JoinedWeight):
        return ops.linear(weight_OI, bias_O, norm)
    sizes = [part.shape[0] for part in weight_OI.parts]
    biases = [None] * len(sizes) if bias_O is None else bias_O.split(sizes)
    parts = [ops.linear(part, bias, None) for part, bias in zip(weight_OI.parts, biases, strict=True)]

    def apply(x_TI: Tensor) -> Tensor:
        x_TI = x_TI if norm is None else ops.rms_norm(x_TI, *norm)
        return torch.cat([part(x_TI) for part in parts], dim=-1)

    return apply
