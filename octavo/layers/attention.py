"""The attention sub-layer: qkv product, what the step does between the products, output product.

Shape letters: T tokens, I features, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.cpu import AddFn, LinearFn, Norm
from octavo.layers.base import Weights
from octavo.layers.linear import linear, linear_add

HeadNorm = tuple[Tensor, float]
"""RMS norm of the query and key heads: weights [H + K, D] and eps"""

Mix = Callable[[int, Tensor, HeadNorm | None], Tensor]
"""(layer, qkv_TJD with J = H + 2K, norm) -> o_THD: norms, rotates, stores k and v, attends; bound to one step"""


class Attention:
    """Attention of one layer. `norm_eps` is None for models without RMS norm on the heads of q and k.

    With `before`, it is the whole sub-layer of a pre-norm model: x is the residual stream, which is normed first and
    to which the result is added (x may be overwritten).
    """

    def __init__(
        self,
        weights: Weights,
        layer: int,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        norm_eps: float | None,
        before: Norm | None = None,
    ) -> None:
        prefix = f"layers.{layer}."
        self._layer = layer
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        rows = (heads + 2 * kv_heads) * head_dim
        self._qkv = linear(weights, f"{prefix}qkv", rows, hidden_size, qkv_bias, before)
        self._o: LinearFn | None = None
        self._o_add: AddFn | None = None
        if before is None:
            self._o = linear(weights, f"{prefix}o", hidden_size, heads * head_dim, o_bias)
        else:
            self._o_add = linear_add(weights, f"{prefix}o", hidden_size, heads * head_dim, o_bias)
        self._norm: HeadNorm | None = None
        if norm_eps is not None:
            q_norm_D = weights.take(f"{prefix}q_norm", head_dim, wide=True)
            k_norm_D = weights.take(f"{prefix}k_norm", head_dim, wide=True)
            self._norm = torch.stack([q_norm_D] * heads + [k_norm_D] * kv_heads), norm_eps

    def __call__(self, x_TI: Tensor, mix: Mix) -> Tensor:
        """x_TI -> y_TI, or to the stream after this sub-layer."""
        heads, dim = self._heads, self._head_dim
        qkv_TJD = self._qkv(x_TI).view(x_TI.shape[0], heads + 2 * self._kv_heads, dim)
        o_TI = mix(self._layer, qkv_TJD, self._norm).reshape(x_TI.shape[0], heads * dim)
        return self._o(o_TI) if self._o is not None else self._o_add(o_TI, x_TI)  # type: ignore[misc]
