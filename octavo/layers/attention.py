"""The attention sub-layer: qkv product, q/k norm, rotation, attention over the cache, output product.

Shape letters: T tokens, I features, H query heads, K key/value heads, J = H + K, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.layers.base import Weights
from octavo.layers.linear import linear

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_THD, k_TKD, v_TKD) -> o_THD: stores k and v of this step, then attends; bound to batch and pool"""


class Attention:
    """Attention of one layer. Query and key heads lie side by side, so norm and rotation take both at once.

    `norm_eps` is None for models without RMS norm on the heads of q and k.
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
    ) -> None:
        prefix = f"layers.{layer}."
        self._layer, self._ops = layer, weights.ops
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        rows = (heads + 2 * kv_heads) * head_dim
        self._qkv = linear(weights, f"{prefix}qkv", rows, hidden_size, qkv_bias)
        self._o = linear(weights, f"{prefix}o", hidden_size, heads * head_dim, o_bias)
        self._norm: tuple[Tensor, float] | None = None
        if norm_eps is not None:
            q_norm_D = weights.take(f"{prefix}q_norm", head_dim)
            k_norm_D = weights.take(f"{prefix}k_norm", head_dim)
            self._norm = torch.stack([q_norm_D] * heads + [k_norm_D] * kv_heads), norm_eps

    def __call__(self, x_TI: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x_TI -> y_TI, with the step's (cos_TD, sin_TD)."""
        heads, both = self._heads, self._heads + self._kv_heads
        qkv_TJD = self._qkv(x_TI).view(x_TI.shape[0], both + self._kv_heads, self._head_dim)
        qk_TJD, v_TKD = qkv_TJD[:, :both], qkv_TJD[:, both:]
        if self._norm is not None:
            norm_JD, eps = self._norm
            qk_TJD = self._ops.rms_norm(qk_TJD, norm_JD, eps)
        qk_TJD = self._ops.rotate(qk_TJD, *rope)
        o_THD = attend(self._layer, qk_TJD[:, :heads], qk_TJD[:, heads:], v_TKD)
        return self._o(o_THD.reshape(x_TI.shape[0], heads * self._head_dim))
