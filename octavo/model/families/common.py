"""Reading a Hugging Face config: checked fields, rope in both spellings, refusals that name key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.files import field
from octavo.model.spec import LayerSpec, ModelSpec, RopeSpec

DTYPES = ("float32", "float16", "bfloat16", "float64")

# No model comes near these; what is beyond them is a damaged or hostile config.
MAX_SIZE = 1 << 22
MAX_LAYERS = 1 << 12
MAX_POSITIONS = 1 << 26


def size(config: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    """An integer from 1 to `most`; ModelError when it is missing or not one."""
    value: int | None = field(config, key, int, default) if default is not None else field(config, key, int)
    if value is None or not 1 <= value <= most:
        raise ModelError(f"The model's {key} is {value}.", f"It must be from 1 to {most}.")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite positive number; ModelError when it is missing or not one."""
    value = field(config, key, float, default) if default is not None else field(config, key, float)
    if value is None or not 0 < value < math.inf:
        raise ModelError(f"The model's {key} is {value}.", "It must be a positive number.")
    return value


def refuse(condition: object, what: str) -> None:
    """ModelError when the config asks for something that would silently compute another function."""
    if condition:
        raise ModelError(f"The model asks for {what}, which is not supported.", "See the list of models in the docs.")


def rope_of(config: Mapping[str, Any]) -> RopeSpec:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = field(config, "rope_parameters", dict, None) or field(config, "rope_scaling", dict, None) or {}
    theta = number(scaling if "rope_theta" in scaling else config, "rope_theta", 10000.0)
    kind = field(scaling, "rope_type", str, None) or field(scaling, "type", str, "default")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", number(scaling, "factor"))
    refuse(kind != "llama3", f"rope type {kind!r}")
    low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
    refuse(low >= high, f"low_freq_factor {low} and high_freq_factor {high}")
    original = size(scaling, "original_max_position_embeddings", most=MAX_POSITIONS)
    return RopeSpec(theta, "llama3", number(scaling, "factor"), low, high, original)


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """`eos_token_id` and the like: none, one id, or a list of ids, all inside the vocabulary."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    top = size(config, "vocab_size")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < top for i in ids):
        raise ModelError(f"The model's {key} is {value!r}.", f"It must be ids from 0 to {top - 1}.")
    return tuple(ids)


def llama_like(config: Mapping[str, Any], architecture: str, *, qk_norm: bool, head_dim: int = 0) -> ModelSpec:
    """The spec of a decoder with the tensors of Llama. `head_dim`: used when the config is silent."""
    refuse(config.get("hidden_act", "silu") != "silu", f"the activation {config.get('hidden_act')!r}")
    refuse(config.get("quantization_config"), "quantised weights")
    refuse(config.get("use_sliding_window"), "a sliding attention window")
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    kv_heads = size(config, "num_key_value_heads", heads)
    dim = size(config, "head_dim", head_dim or max(hidden // heads, 1))
    if heads % kv_heads or dim < 2 or dim % 2:
        raise ModelError(
            f"The model has {heads} query heads, {kv_heads} key/value heads of {dim}.",
            "Query heads must be a multiple of key/value heads, and the head size even. Check config.json.",
        )
    bias = field(config, "attention_bias", bool, False)
    layer = LayerSpec(
        mlp_size=size(config, "intermediate_size"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=field(config, "mlp_bias", bool, False),
        qk_norm=qk_norm,
    )
    dtype = field(config, "dtype", str, None) or field(config, "torch_dtype", str, "float32")
    refuse(dtype not in DTYPES, f"the data type {dtype!r}")
    bos = token_ids(config, "bos_token_id")
    return ModelSpec(
        architecture=architecture,
        vocab_size=size(config, "vocab_size"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        layers=(layer,) * size(config, "num_hidden_layers", most=MAX_LAYERS),
        max_positions=size(config, "max_position_embeddings", most=MAX_POSITIONS),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope_of(config),
        tied_head=field(config, "tie_word_embeddings", bool, False),
        dtype=dtype,
        bos_id=bos[0] if bos else None,
        eos_ids=token_ids(config, "eos_token_id"),
    )
