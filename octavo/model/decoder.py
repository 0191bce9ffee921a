"""The one forward pass. A new architecture is a new spec; new mathematics is a new layer; never a new forward.

Made once from a `ModelSpec` and the loaded tensors. The runner makes a `StepBatch` per step and calls
`forward`, picks the tokens that need logits, and calls `logits`, all under `torch.inference_mode()`.
Neither function reads a device value on the host, so both can be captured.

Shape letters: T tokens of the step, N tokens that need logits, I hidden features, V vocabulary,
H query heads, K key/value heads, D head dim, F = D/2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionShape, KVPool, Plan, StepBatch
from octavo.attention.choose import choose_backend
from octavo.errors import ModelError
from octavo.layers.attention import Attention
from octavo.layers.base import Weights
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import Mlp
from octavo.layers.norm import RmsNorm
from octavo.layers.rope import Rope
from octavo.model.rotary import inverse_frequencies
from octavo.model.spec import LayerSpec, ModelSpec


class _Layer:
    """One decoder block: norm, attention, norm, MLP, each added to the residual stream."""

    def __init__(self, weights: Weights, index: int, spec: ModelSpec, layer: LayerSpec) -> None:
        prefix = f"layers.{index}."
        self.attention_norm = RmsNorm(weights, f"{prefix}attn_norm", spec.hidden_size, spec.norm_eps)
        self.attention = Attention(
            weights,
            index,
            spec.hidden_size,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            layer.qkv_bias,
            layer.o_bias,
            spec.norm_eps if layer.qk_norm else None,
        )
        self.mlp_norm = RmsNorm(weights, f"{prefix}mlp_norm", spec.hidden_size, spec.norm_eps)
        self.mlp = Mlp(weights, prefix, spec.hidden_size, layer.mlp_size, layer.mlp_bias)


class Decoder:
    """A decoder-only transformer on one device.

    `params` holds every tensor of `weight_needs(spec, ...)` under its internal name, all in one dtype on one
    device; it is emptied. Raises `ModelError` for a missing, misshapen or unused tensor. `backend` names the
    attention backend; None takes the default of the device.
    """

    def __init__(self, spec: ModelSpec, params: dict[str, Tensor], backend: str | None = None) -> None:
        weights = Weights(params)
        self.spec = spec
        self.dtype, self.device = weights.dtype, weights.device
        shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, spec.softmax_scale, spec.attention_softcap)
        self.backend: AttentionBackend = choose_backend(shape, self.dtype, self.device, backend)
        factors_F = weights.take("rope_factors", spec.head_dim // 2) if spec.rope.kind == "factors" else None
        wide_F = None if factors_F is None else factors_F.float().cpu().numpy()
        frequencies_F = torch.from_numpy(inverse_frequencies(spec.rope, spec.head_dim, wide_F))
        self._rope = Rope(frequencies_F.to(self.device), self.dtype)
        self._embed = Embedding(weights, "embed", spec.vocab_size, spec.hidden_size, spec.embed_scale)
        self._layers = [_Layer(weights, index, spec, layer) for index, layer in enumerate(spec.layers)]
        self._norm = RmsNorm(weights, "norm", spec.hidden_size, spec.norm_eps)
        head_VI = self._embed.weight_VI if spec.tied_head else weights.take("head", spec.vocab_size, spec.hidden_size)
        self._head = Head(weights.ops, head_VI, spec.logit_scale, spec.logit_softcap)
        if weights.leftover():
            raise ModelError(f"The model has no use for the tensors {', '.join(weights.leftover()[:10])}.")

    def make_pool(self, num_blocks: int, block_size: int) -> KVPool:
        """A zeroed KV pool for this model; block 0 is padding."""
        return KVPool(
            len(self.spec.layers),
            num_blocks,
            block_size,
            self.spec.kv_heads,
            self.spec.head_dim,
            self.dtype,
            self.device,
        )

    def forward(self, batch: StepBatch, pool: KVPool, plan: Plan | None = None) -> Tensor:
        """Run all layers over the tokens of one step: final, normed hidden_TI. Writes their KV into `pool`.

        `plan` is `backend.plan(batch, pool.block_size)`, made here unless the caller has it already.
        """
        step_plan = self.backend.plan(batch, pool.block_size) if plan is None else plan

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            return self.backend.run(layer, q_THD, k_TKD, v_TKD, pool, step_plan)

        rope = self._rope(batch.positions_T)
        scale = self.spec.residual_scale
        stream_TI = self._embed(batch.ids_T)
        delta_TI: Tensor | None = None
        for layer in self._layers:
            if delta_TI is None:
                x_TI = layer.attention_norm(stream_TI)
            else:
                stream_TI, x_TI = layer.attention_norm.add(delta_TI, stream_TI)
            y_TI = _scaled(layer.attention(x_TI, rope, attend), scale)
            stream_TI, x_TI = layer.mlp_norm.add(y_TI, stream_TI)
            delta_TI = _scaled(layer.mlp(x_TI), scale)
        if delta_TI is None:
            return self._norm(stream_TI)
        return self._norm.add(delta_TI, stream_TI)[1]

    def logits(self, hidden_NI: Tensor) -> Tensor:
        """logits_NV of the given hidden states, float32 (float64 for a float64 model)."""
        return self._head(hidden_NI)


def _scaled(x_TI: Tensor, scale: float) -> Tensor:
    return x_TI if scale == 1.0 else x_TI * scale
