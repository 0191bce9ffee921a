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
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    """"factors": each frequency is divided by an entry of the weight tensor `rope_factors` (GGUF)"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    """context length of the pre-training, for kind "llama3" """


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    mlp_size: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation"""


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer. Sizes are counts of elements; 0 means "off" for soft-caps."""

    architecture: str
    """family name, the same for both sources: "llama", "qwen3" """
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
        "mlp_norm": "model.layers.{layer}.post_attention_layernorm.{}",
        "q": "model.layers.{layer}.self_attn.q_proj.{}",
        "k": "model.layers.{layer}.self_attn.k_proj.{}",
        "v": "model.layers.{layer}.self_attn.v_proj.{}",
        "o": "model.layers.{layer}.self_attn.o_proj.{}",
        "q_norm": "model.layers.{layer}.self_attn.q_norm.{}",
        "k_norm": "model.layers.{layer}.self_attn.k_norm.{}",
        "gate": "model.layers.{layer}.mlp.gate_proj.{}",
        "up": "model.layers.{layer}.mlp.up_proj.{}",
        "down": "model.layers.{layer}.mlp.down_proj.{}",
    },
    "gguf": {
        "embed": "token_embd.{}",
        "norm": "output_norm.{}",
        "head": "output.{}",
        "rope_factors": "rope_freqs.{}",
        "attn_norm": "blk.{layer}.attn_norm.{}",
        "mlp_norm": "blk.{layer}.ffn_norm.{}",
        "q": "blk.{layer}.attn_q.{}",
        "k": "blk.{layer}.attn_k.{}",
        "v": "blk.{layer}.attn_v.{}",
        "o": "blk.{layer}.attn_output.{}",
        "q_norm": "blk.{layer}.attn_q_norm.{}",
        "k_norm": "blk.{layer}.attn_k_norm.{}",
        "gate": "blk.{layer}.ffn_gate.{}",
        "up": "blk.{layer}.ffn_up.{}",
        "down": "blk.{layer}.ffn_down.{}",
    },
}


def weight_needs(spec: ModelSpec, source: Literal["hf", "gguf"]) -> list[TensorNeed]:
    """All tensors of `spec` under their internal names, each with the checkpoint tensors it comes from.

    Internal names: `embed`, `norm`, `head` (absent when tied), `rope_factors` (only for that kind), and per
    layer `layers.<i>.` + `attn_norm`, `qkv`, `qkv_bias`, `q_norm`, `k_norm`, `o`, `o_bias`, `mlp_norm`,
    `gate_up`, `gate_up_bias`, `down`, `down_bias`. Matrices are [out, in]. GGUF files of arch `llama` keep
    the rows of q and k with interleaved rotary pairs; files of arch `qwen3` do not.
    """
    names = _NAMES[source]
    hidden = spec.hidden_size

    def need(name: str, key: str, *shape: int) -> TensorNeed:
        return TensorNeed(name, shape, (Source(names[key].format("weight"), shape),))

    needs = [need("embed", "embed", spec.vocab_size, hidden)]
    for index, layer in enumerate(spec.layers):
        needs += _layer_needs(spec, layer, index, source)
    needs.append(need("norm", "norm", hidden))
    if not spec.tied_head:
        needs.append(need("head", "head", spec.vocab_size, hidden))
    if spec.rope.kind == "factors":
        needs.append(need("rope_factors", "rope_factors", spec.head_dim // 2))
    return needs


def _layer_needs(
    spec: ModelSpec, layer: LayerSpec, index: int, source: Literal["hf", "gguf"]
) -> list[TensorNeed]:
    hidden, mlp = spec.hidden_size, layer.mlp_size
    q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    interleaved = source == "gguf" and spec.architecture == "llama"
    rope_heads = {"q": spec.heads, "k": spec.kv_heads} if interleaved else {}

    def need(
        name: str, parts: tuple[tuple[str, int], ...], width: int = 0, kind: str = "weight"
    ) -> TensorNeed:
        tail = (width,) if width else ()
        sources = tuple(
            Source(_NAMES[source][key].format(kind, layer=index), (rows, *tail), rope_heads.get(key, 0))
            for key, rows in parts
        )
        return TensorNeed(f"layers.{index}.{name}", (sum(rows for _, rows in parts), *tail), sources)

    qkv = (("q", q_size), ("k", kv_size), ("v", kv_size))
    gate_up = (("gate", mlp), ("up", mlp))
    needs = [need("attn_norm", (("attn_norm", hidden),)), need("qkv", qkv, hidden)]
    if layer.qkv_bias:
        needs.append(need("qkv_bias", qkv, kind="bias"))
    if layer.qk_norm:
        needs.append(need("q_norm", (("q_norm", spec.head_dim),)))
        needs.append(need("k_norm", (("k_norm", spec.head_dim),)))
    needs.append(need("o", (("o", hidden),), q_size))
    if layer.o_bias:
        needs.append(need("o_bias", (("o", hidden),), kind="bias"))
    needs += [need("mlp_norm", (("mlp_norm", hidden),)), need("gate_up", gate_up, hidden)]
    if layer.mlp_bias:
        needs.append(need("gate_up_bias", gate_up, kind="bias"))
    needs.append(need("down", (("down", hidden),), mlp))
    if layer.mlp_bias:
        needs.append(need("down_bias", (("down", hidden),), kind="bias"))
    return needs
