"""`ModelSpec`: everything the decoder must know about a model, as plain frozen values.

Made by one function per family from the Hugging Face config (`octavo.model.families`) or from GGUF
metadata (`octavo.model.gguf_keys`). `weight_needs` turns it into the list of tensors to load. The
decoder, the memory plan and dummy weights read only this; nobody looks at the config again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.weights.needs import Source, TensorNeed


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding. Frequencies: `octavo.layers.rope.inverse_frequencies`."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn", "factors"] = "default"
    """"factors": each frequency is divided by an entry of `factors`, or of the weight tensor `rope_factors` (GGUF)"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    """context length of the pre-training, for the kinds "llama3" and "yarn" """
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    """for kind "yarn": pairs that turn more often than this in the original context stay as they are ..."""
    beta_slow: float = 1.0
    """... and those that turn less often than this are divided by `factor`"""
    magnitude: float = 1.0
    """factor on cosines and sines"""


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    mlp_size: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation"""
    window: int = 0
    """0 = attention to all earlier tokens; else to the token itself and the window - 1 before it"""
    experts: int = 0
    """0 = one MLP; else so many of `mlp_size`, of which each token uses `experts_per_token`"""
    experts_per_token: int = 0
    norm_expert_weights: bool = True
    """the weights of a token's experts sum to 1"""


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer. Sizes are counts of elements; 0 means "off" for soft-caps."""

    architecture: str
    """family name, the same for both sources: "llama", "qwen3" ..."""
    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_positions: int
    norm_eps: float
    rope: RopeSpec
    tied_head: bool
    dtype: str
    """data type of the checkpoint: "float32", "float16", "bfloat16" or "float64" """
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    attention_scale: float = 0.0
    """factor on q . k before the softmax; 0 = head_dim ** -0.5"""
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    """factor on the output of each attention and MLP before it is added to the residual stream"""
    logit_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    window_rope: RopeSpec | None = None
    """rope of the layers with a window; None = `rope`"""
    post_norms: bool = False
    """RMS norm on the output of each attention and MLP, before it is added to the residual stream"""
    norm_offset: float = 0.0
    """added to the norm weights of a Hugging Face checkpoint (Gemma stores them less one)"""
    wide_norms: bool = False
    """norm weights stay float32 whatever the model runs in"""
    tensor_prefix: str = ""
    """before every tensor name of a Hugging Face checkpoint"""

    @property
    def softmax_scale(self) -> float:
        """The factor on q . k that is really used."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        needs = weight_needs(self, "hf")
        return sum(_elements(need.shape) for need in needs)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


_NAMES = {
    "hf": {
        "embed": "model.embed_tokens.{}",
        "norm": "model.norm.{}",
        "head": "lm_head.{}",
        "attn_norm": "model.layers.{layer}.input_layernorm.{}",
        "post_attn_norm": "model.layers.{layer}.post_attention_layernorm.{}",
        "mlp_norm": "model.layers.{layer}.post_attention_layernorm.{}",
        "post_mlp_norm": "model.layers.{layer}.post_feedforward_layernorm.{}",
        "q": "model.layers.{layer}.self_attn.q_proj.{}",
        "k": "model.layers.{layer}.self_attn.k_proj.{}",
        "v": "model.layers.{layer}.self_attn.v_proj.{}",
        "o": "model.layers.{layer}.self_attn.o_proj.{}",
        "q_norm": "model.layers.{layer}.self_attn.q_norm.{}",
        "k_norm": "model.layers.{layer}.self_attn.k_norm.{}",
        "gate": "model.layers.{layer}.mlp.gate_proj.{}",
        "up": "model.layers.{layer}.mlp.up_proj.{}",
        "down": "model.layers.{layer}.mlp.down_proj.{}",
        "router": "model.layers.{layer}.mlp.gate.{}",
        "experts_gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.{}",
        "experts_up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.{}",
        "experts_down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.{}",
    },
    "gguf": {
        "embed": "token_embd.{}",
        "norm": "output_norm.{}",
        "head": "output.{}",
        "rope_factors": "rope_freqs.{}",
        "attn_norm": "blk.{layer}.attn_norm.{}",
        "post_attn_norm": "blk.{layer}.post_attention_norm.{}",
        "mlp_norm": "blk.{layer}.ffn_norm.{}",
        "post_mlp_norm": "blk.{layer}.post_ffw_norm.{}",
        "q": "blk.{layer}.attn_q.{}",
        "k": "blk.{layer}.attn_k.{}",
        "v": "blk.{layer}.attn_v.{}",
        "o": "blk.{layer}.attn_output.{}",
        "q_norm": "blk.{layer}.attn_q_norm.{}",
        "k_norm": "blk.{layer}.attn_k_norm.{}",
        "gate": "blk.{layer}.ffn_gate.{}",
        "up": "blk.{layer}.ffn_up.{}",
        "down": "blk.{layer}.ffn_down.{}",
        "router": "blk.{layer}.ffn_gate_inp.{}",
        "experts_gate": "blk.{layer}.ffn_gate_exps.{}",
        "experts_up": "blk.{layer}.ffn_up_exps.{}",
        "experts_down": "blk.{layer}.ffn_down_exps.{}",
    },
}

# Families whose checkpoints differ from these names, or join what others keep apart.
_GEMMA = {"mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm.{}"}
_OTHER_NAMES = {
    ("gemma2", "hf"): _GEMMA,
    ("gemma3", "hf"): _GEMMA,
    ("phi3", "hf"): {
        "qkv": "model.layers.{layer}.self_attn.qkv_proj.{}",
        "gate_up": "model.layers.{layer}.mlp.gate_up_proj.{}",
    },
    ("phi3", "gguf"): {
        "qkv": "blk.{layer}.attn_qkv.{}",
        "gate_up": "blk.{layer}.ffn_up.{}",
        "rope_factors": "rope_factors_short.{}",
    },
}

Origin = Literal["hf", "gguf"]
_Parts = tuple[tuple[str, int], ...]
"""name and number of rows of the checkpoint tensors that one tensor is joined from"""


def weight_needs(spec: ModelSpec, source: Origin) -> list[TensorNeed]:
    """All tensors of `spec` under their internal names, each with the checkpoint tensors it comes from.

    Internal names: `embed`, `norm`, `head` (absent when tied), `rope_factors` (only for that kind), and per
    layer `layers.<i>.` + `attn_norm`, `qkv`, `qkv_bias`, `q_norm`, `k_norm`, `o`, `o_bias`, `post_attn_norm`,
    `mlp_norm`, `gate_up`, `gate_up_bias`, `down`, `down_bias`, `post_mlp_norm`; with experts `router`,
    `experts_gate`, `experts_up`, `experts_down` (all experts' rows one after the other) in place of the MLP's.
    Matrices are [out, in]. GGUF files of `llama` and `granite` keep the rows of q and k with interleaved pairs.
    """
    needs = _Needs(spec, source)
    hidden = spec.hidden_size
    found = [needs.joined("embed", (("embed", spec.vocab_size),), hidden)]
    for index, layer in enumerate(spec.layers):
        found += needs.attention(index, layer)
        found += needs.experts(index, layer) if layer.experts else needs.mlp(index, layer)
    found.append(needs.norm("norm"))
    if not spec.tied_head:
        found.append(needs.joined("head", (("head", spec.vocab_size),), hidden))
    if spec.rope.kind == "factors" and not spec.rope.factors:
        found.append(needs.joined("rope_factors", (("rope_factors", spec.head_dim // 2),)))
    return found


class _Needs:
    """Makes the needs of one model; `layer` -1 stands for tensors outside the layers."""

    def __init__(self, spec: ModelSpec, source: Origin) -> None:
        self._spec = spec
        self._source = source
        prefix = spec.tensor_prefix if source == "hf" else ""
        names = _NAMES[source] | _OTHER_NAMES.get((spec.architecture, source), {})
        self._names = {key: prefix + name for key, name in names.items()}

    def joined(self, name: str, parts: _Parts, width: int = 0, layer: int = -1, kind: str = "weight") -> TensorNeed:
        """A tensor of the rows of all parts, `width` columns wide (0: a vector)."""
        spec, tail = self._spec, (width,) if width else ()
        interleaved = self._source == "gguf" and spec.architecture in ("granite", "llama")
        heads = {"q": spec.heads, "k": spec.kv_heads} if interleaved else {}
        names = {key: self._names[key].format(kind, layer=layer) for key, _ in parts}
        sources = tuple(Source(names[key], (rows, *tail), heads.get(key, 0)) for key, rows in parts)
        return TensorNeed(_inside(layer, name), (sum(rows for _, rows in parts), *tail), sources)

    def norm(self, name: str, layer: int = -1, size: int = 0) -> TensorNeed:
        """A norm's weight, of `size` or as many as the hidden size."""
        spec, size = self._spec, size or self._spec.hidden_size
        source = Source(self._names[name].format("weight", layer=layer), (size,))
        offset = spec.norm_offset if self._source == "hf" else 0.0
        return TensorNeed(_inside(layer, name), (size,), (source,), offset, spec.wide_norms)

    def attention(self, index: int, layer: LayerSpec) -> list[TensorNeed]:
        """Everything up to the first addition to the residual stream."""
        spec = self._spec
        hidden, q_size, kv_size = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        qkv: _Parts = (("q", q_size), ("k", kv_size), ("v", kv_size))
        if "qkv" in self._names:
            qkv = (("qkv", q_size + 2 * kv_size),)
        needs = [self.norm("attn_norm", index), self.joined("qkv", qkv, hidden, index)]
        if layer.qkv_bias:
            needs.append(self.joined("qkv_bias", qkv, layer=index, kind="bias"))
        if layer.qk_norm:
            needs += [self.norm(name, index, spec.head_dim) for name in ("q_norm", "k_norm")]
        needs.append(self.joined("o", (("o", hidden),), q_size, index))
        if layer.o_bias:
            needs.append(self.joined("o_bias", (("o", hidden),), layer=index, kind="bias"))
        return [*needs, self.norm("post_attn_norm", index)] if spec.post_norms else needs

    def mlp(self, index: int, layer: LayerSpec) -> list[TensorNeed]:
        """The gated MLP and its norms."""
        spec, hidden, size = self._spec, self._spec.hidden_size, layer.mlp_size
        gate_up: _Parts = (("gate", size), ("up", size))
        if "gate_up" in self._names:
            gate_up = (("gate_up", 2 * size),)
        needs = [self.norm("mlp_norm", index), self.joined("gate_up", gate_up, hidden, index)]
        if layer.mlp_bias:
            needs.append(self.joined("gate_up_bias", gate_up, layer=index, kind="bias"))
        needs.append(self.joined("down", (("down", hidden),), size, index))
        if layer.mlp_bias:
            needs.append(self.joined("down_bias", (("down", hidden),), layer=index, kind="bias"))
        return [*needs, self.norm("post_mlp_norm", index)] if spec.post_norms else needs

    def experts(self, index: int, layer: LayerSpec) -> list[TensorNeed]:
        """The router and the experts' MLPs: one checkpoint tensor for each expert, or one of three dimensions."""
        hidden, size, count = self._spec.hidden_size, layer.mlp_size, layer.experts
        needs = [self.norm("mlp_norm", index), self.joined("router", (("router", count),), hidden, index)]
        for name, rows, width in (
            ("experts_gate", size, hidden),
            ("experts_up", size, hidden),
            ("experts_down", hidden, size),
        ):
            pattern = self._names[name]
            if "{expert}" in pattern:
                names = [pattern.format("weight", layer=index, expert=expert) for expert in range(count)]
                sources = tuple(Source(one, (rows, width)) for one in names)
            else:
                sources = (Source(pattern.format("weight", layer=index), (count, rows, width)),)
            needs.append(TensorNeed(_inside(index, name), (count * rows, width), sources))
        return needs


def _inside(layer: int, name: str) -> str:
    return name if layer < 0 else f"layers.{layer}.{name}"
