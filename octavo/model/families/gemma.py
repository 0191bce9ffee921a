"""Gemma 2 and 3, text: windows on most layers, norms before and after each sub-layer, GELU, scaled embeddings.

Gemma 3 adds norms on query and key heads and a rope of its own for the layers with a window; Gemma 2 caps attention
scores and logits instead. Checkpoints hold norm weights less one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.files import field
from octavo.model.families.common import llama_like, number, refuse, rope_of, size, windows
from octavo.model.spec import LayerSpec, ModelSpec

# Fields that configs of the larger Gemma 3 models leave out.
_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def gemma2_spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `Gemma2ForCausalLM`: every other layer has a window."""
    return _gemma(config, "gemma2", qk_norm=False, full_every=2, theta=10000.0)


def gemma3_spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `Gemma3ForCausalLM`: five layers with a window, then one without."""
    config = _GEMMA3 | dict(config)
    refuse(config.get("use_bidirectional_attention"), "attention to later tokens")
    every = size(config, "sliding_window_pattern", 6)
    ropes = field(config, "rope_parameters", dict, None)
    if ropes is None:  # as written before transformers 5
        base = _gemma(config, "gemma3", qk_norm=True, full_every=every, theta=1e6)
        local = {"rope_theta": number(config, "rope_local_base_freq", 10000.0)}
    else:
        full, local = ropes.get("full_attention") or {}, ropes.get("sliding_attention") or {}
        base = _gemma(config | {"rope_parameters": full}, "gemma3", qk_norm=True, full_every=every, theta=1e6)
    return replace(base, window_rope=rope_of({"rope_parameters": local}))


def gemma3_text_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The language model of `Gemma3ForConditionalGeneration`; its image tower is not used."""
    text = field(config, "text_config", dict)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "dtype", "torch_dtype") if key in config}
    return replace(gemma3_spec({**ends, **text}), tensor_prefix="language_model.")


def _gemma(
    config: Mapping[str, Any], architecture: str, *, qk_norm: bool, full_every: int, theta: float
) -> ModelSpec:
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    refuse(activation != "gelu_pytorch_tanh", f"the activation {activation!r}")
    bias = field(config, "attention_bias", bool, False)
    base = llama_like(
        {"tie_word_embeddings": True, **config},
        architecture,
        head_dim=256,
        theta=theta,
        windows=windows(config, lambda index: (index + 1) % full_every != 0),
        layer=LayerSpec(0, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm),
    )
    return replace(
        base,
        attention_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        embed_scale=math.sqrt(base.hidden_size),
        attention_softcap=_cap(config, "attn_logit_softcapping"),
        logit_softcap=_cap(config, "final_logit_softcapping"),
        activation="gelu_tanh",
        post_norms=True,
        norm_offset=1.0,
        wide_norms=True,
    )


def _cap(config: Mapping[str, Any], key: str) -> float:
    return 0.0 if config.get(key) is None else number(config, key)
