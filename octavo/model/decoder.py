"""The one forward pass. A new architecture is a new spec; new mathematics is a new layer; never a new forward.

Made once from a `ModelSpec` and the loaded tensors. The runner makes a `StepBatch` per step and calls
`forward`, picks the tokens that need logits, and calls `logits`, all under `torch.inference_mode()`.
Neither function reads a device value on the host, so both can be captured.

Shape letters: T tokens of the step, N tokens that need logits, I hidden features, V vocabulary,
H query heads, K key/value heads, J = H + 2K, D head dim, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionShape, KVPool, StepBatch
from octavo.attention.choose import choose_backend
from octavo.errors import ModelError
from octavo.kernels.ops import Ops
from octavo.kernels.quant import Weight, kind_of
from octavo.layers.attention import Attention, HeadNorm, Mix
from octavo.layers.base import Weights
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import Mlp
from octavo.layers.moe import Moe
from octavo.layers.norm import RmsNorm
from octavo.layers.rope import Rope
from octavo.model.rotary import inverse_frequencies
from octavo.model.spec import LayerSpec, ModelSpec, RopeSpec

HeadMaker = Callable[[int, Tensor, HeadNorm | None], tuple[Tensor, Tensor, Tensor]]
"""(layer, qkv_TJD, norm) -> (q_THD, k_TKD, v_TKD), normed and rotated"""


class _Layer:
    """One decoder block: norm, attention, norm, MLP; in some families a norm after each, too.

    Where nothing lies between a product and the sum with the stream, the sub-layers do norm and sum themselves.
    """

    def __init__(self, weights: Weights, index: int, spec: ModelSpec, layer: LayerSpec) -> None:
        prefix, hidden = f"layers.{index}.", spec.hidden_size

        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights, prefix + name, hidden, spec.norm_eps)

        self._attention_norm, self._mlp_norm = norm("attn_norm"), norm("mlp_norm")
        self._after_attention = norm("post_attn_norm") if spec.post_norms else None
        self._after_mlp = norm("post_mlp_norm") if spec.post_norms else None
        self._scale = spec.residual_scale
        plain = self._scale == 1.0 and not spec.post_norms
        self._attention_adds, self._mlp_adds = plain, plain and not layer.experts
        self._attention = Attention(
            weights,
            index,
            hidden,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            layer.qkv_bias,
            layer.o_bias,
            spec.norm_eps if layer.qk_norm else None,
            self._attention_norm.parts if self._attention_adds else None,
        )
        self._mlp: Callable[[Tensor], Tensor]
        if layer.experts:
            chosen, normalise = layer.experts_per_token, layer.norm_expert_weights
            self._mlp = Moe(weights, prefix, hidden, layer.mlp_size, layer.experts, chosen, normalise)
        else:
            before = self._mlp_norm.parts if self._mlp_adds else None
            self._mlp = Mlp(weights, prefix, hidden, layer.mlp_size, layer.mlp_bias, spec.activation, before)

    def __call__(self, stream_TI: Tensor, mix: Mix) -> Tensor:
        """The residual stream after this block; the one before may be overwritten."""
        if self._attention_adds:
            stream_TI = self._attention(stream_TI, mix)
        else:
            y_TI = self._attention(self._attention_norm(stream_TI), mix)
            stream_TI = self._sum(y_TI, self._after_attention, stream_TI)
        if self._mlp_adds:
            return self._mlp(stream_TI)
        return self._sum(self._mlp(self._mlp_norm(stream_TI)), self._after_mlp, stream_TI)

    def _sum(self, y_TI: Tensor, norm: RmsNorm | None, stream_TI: Tensor) -> Tensor:
        y_TI = y_TI if norm is None else norm(y_TI)
        return (y_TI if self._scale == 1.0 else y_TI * self._scale) + stream_TI


def _unlike(spec: ModelSpec, params: Mapping[str, Weight]) -> list[int]:
    """The first layer of each kind: of one `LayerSpec`, with weights of the same kinds."""
    kinds: dict[int, list[object]] = {index: [layer] for index, layer in enumerate(spec.layers)}
    for name, weight in sorted(params.items()):
        prefix, _, rest = name.partition(".")
        index, _, name = rest.partition(".")
        if prefix == "layers":
            kinds[int(index)].append((name, kind_of(weight)))
    first: dict[tuple[object, ...], int] = {}
    return [index for index, kind in kinds.items() if first.setdefault(tuple(kind), index) == index]


class Decoder:
    """A decoder-only transformer on one device.

    `params` holds every tensor of `weight_needs(spec, ...)` under its internal name, all in one dtype on one device
    (wide norms in float32 at least), matrices of products possibly quantised; it is emptied. Raises `ModelError` for
    a missing, misshapen or unused tensor. `backend` names the attention backend; None takes the default of the
    device. Layers with the same attention window share one: `backends` by window, `backend` that of the first layer.

    `fp8_kv`: the backends must be able to use KV pools in FP8. `kv_scales_L2K` (`KVPool.scales_L2K`) is then set by
    who has them, and pools made before are in the model's dtype. `ops`: kernels in place of the device's.
    `unlike`: the first layer of each kind; the others of that kind run the same kernels.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: dict[str, Weight],
        backend: str | None = None,
        fp8_kv: bool = False,
        ops: Ops | None = None,
    ) -> None:
        self.unlike = _unlike(spec, params)
        weights = Weights(params, ops)
        self.spec = spec
        self.kv_scales_L2K: Tensor | None = None
        self.dtype, self.device = weights.dtype, weights.device
        self._ops = weights.ops
        self._windows = [layer.window for layer in spec.layers]
        self.backends: dict[int, AttentionBackend] = {}
        for window in dict.fromkeys(self._windows):
            shape = AttentionShape(
                spec.heads, spec.kv_heads, spec.head_dim, spec.softmax_scale, spec.attention_softcap, window
            )
            self.backends[window] = choose_backend(shape, self.dtype, self.device, backend, fp8_kv)
        self.backend = self.backends[self._windows[0]]
        self._rope = self._make_rope(spec.rope, weights)
        self._window_rope = self._rope if spec.window_rope is None else self._make_rope(spec.window_rope, weights)
        self.embed = Embedding(weights, "embed", spec.vocab_size, spec.hidden_size, spec.embed_scale)
        self.layers = [_Layer(weights, index, spec, layer) for index, layer in enumerate(spec.layers)]
        self._norm = RmsNorm(weights, "norm", spec.hidden_size, spec.norm_eps)
        head_VI: Weight = self.embed.weight_VI
        if not spec.tied_head:
            head_VI = weights.take_weight("head", spec.vocab_size, spec.hidden_size)
        self._head = Head(weights.ops, head_VI, spec.logit_scale, spec.logit_softcap)
        if weights.leftover():
            raise ModelError(f"The model has no use for the tensors {', '.join(weights.leftover()[:10])}.")

    def _make_rope(self, rope: RopeSpec, weights: Weights) -> Rope:
        head_dim, factors_F = self.spec.head_dim, None
        if rope.kind == "factors" and not rope.factors:
            factors_F = weights.take("rope_factors", head_dim // 2).float().cpu().numpy()
        frequencies_F = torch.from_numpy(inverse_frequencies(rope, head_dim, factors_F))
        return Rope(frequencies_F.to(self.device), self.dtype, rope.magnitude)

    def make_pool(self, num_blocks: int, block_size: int) -> KVPool:
        """A zeroed KV pool for this model, in FP8 once `kv_scales_L2K` is set; block 0 is padding."""
        return KVPool(
            len(self.spec.layers),
            num_blocks,
            block_size,
            self.spec.kv_heads,
            self.spec.head_dim,
            self.dtype,
            self.device,
            self.kv_scales_L2K,
        )

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """Run all layers over the tokens of one step: final, normed hidden_TI. Writes their KV into `pool`."""
        plans = {window: backend.plan(batch, pool.block_size) for window, backend in self.backends.items()}
        heads = self.head_maker(batch.positions_T)

        def mix(layer: int, qkv_TJD: Tensor, norm: HeadNorm | None) -> Tensor:
            window = self._windows[layer]
            return self.backends[window].run(layer, *heads(layer, qkv_TJD, norm), pool, plans[window])

        return self.normed(self.forward_with(batch.ids_T, mix))

    def head_maker(self, positions_T: Tensor) -> HeadMaker:
        """What makes the heads of tokens at these positions out of a qkv product."""
        rope = self._rope(positions_T)
        window_rope = rope if self._window_rope is self._rope else self._window_rope(positions_T)
        heads, both = self.spec.heads, self.spec.heads + self.spec.kv_heads

        def make(layer: int, qkv_TJD: Tensor, norm: HeadNorm | None) -> tuple[Tensor, Tensor, Tensor]:
            qk_TJD = qkv_TJD[:, :both]
            if norm is not None:
                qk_TJD = self._ops.rms_norm(qk_TJD, *norm)
            qk_TJD = self._ops.rotate(qk_TJD, *(window_rope if self._windows[layer] else rope))
            return qk_TJD[:, :heads], qk_TJD[:, heads:], qkv_TJD[:, both:]

        return make

    def forward_with(self, ids_T: Tensor, mix: Mix, layers: Sequence[int] | None = None) -> Tensor:
        """The residual stream after all layers, with the caller's way to do what lies between the products.

        `layers`: only after these, which is no model any more but runs its kernels.
        """
        stream_TI = self.embed(ids_T)
        for layer in self.layers if layers is None else [self.layers[index] for index in layers]:
            stream_TI = layer(stream_TI, mix)
        return stream_TI

    def normed(self, stream_TI: Tensor) -> Tensor:
        """The last norm, of any of the tokens."""
        return self._norm(stream_TI)

    def rope_table(self, positions: int, window: int = 0) -> Tensor:
        """rope_PD: cosines, then sines, of the first `positions` positions, for layers with or without a window."""
        cos_PD, sin_PD = (self._window_rope if window else self._rope)(torch.arange(positions, device=self.device))
        half = self.spec.head_dim // 2
        return torch.cat((cos_PD[:, :half], sin_PD[:, half:]), dim=-1)

    def logits(self, hidden_NI: Tensor) -> Tensor:
        """logits_NV of the given hidden states, float32 (float64 for a float64 model)."""
        return self._head(hidden_NI)

    def raw_logits(self, hidden_NI: Tensor) -> Tensor:
        """The head's product in the model dtype: `logits` before `spec.logit_scale` and `spec.logit_softcap`."""
        return self._head.product(hidden_NI)
