"""Reading a Hugging Face config: checked fields, rope in both spellings, refusals that name key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.files import field
from octavo.model.spec import LayerSpec, ModelSpec, RopeSpec

DTYPES = ("float32", "float16", "bfloat16", "float64")


def size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of the config; ModelError when it is missing or not one."""
    value: int | None = field(config, key, int, default) if default is not None else field(config, key, int)
    if value is None or value < 1:
        raise ModelError(f"The model's {key} is {value}.", "Check config.json.")
    return value


def refuse(condition: object, what: str) -> None:
    """ModelError when the config asks for something that would silently compute another function."""
    if condition:
        raise ModelError(f"The model asks for {what}, which is not supported.", "See the list of models in the docs.")


def rope_of(config: Mapping[str, Any]) -> RopeSpec:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = field(config, "rope_parameters", dict, None) or field(config, "rope_scaling", dict, None) or {}
    theta = field(scaling, "rope_theta", float, None) or field(config, "rope_theta", float, 10000.0)
    kind = field(scaling, "rope_type", str, None) or field(scaling, "type", str, "default")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", field(scaling, "factor", float))
    refuse(kind != "llama3", f"rope type {kind!r}")
    return RopeSpec(
        theta,
        "llama3",
        field(scaling, "factor", float),
        field(scaling, "low_freq_factor", float),
        field(scaling, "high_freq_factor", float),
        size(scaling, "original_max_position_embeddings"),
    )


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """`eos_token_id` and the like: none, one id, or a list of ids."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"The model's {key} is {value!r}.", "Check config.json.")
    return tuple(ids)


def llama_like(config: Mapping[str, Any], architecture: str, *, qk_norm: bool, head_dim: int = 0) -> ModelSpec:
    """The spec of a decoder with the tensors of Llama. `head_dim`: used when the config is silent."""
    refuse(config.get("hidden_act", "silu") != "silu", f"the activation {config.get('hidden_act')!r}")
    refuse(config.get("quantization_config"), "quantised weights")
    refuse(config.get("use_sliding_window"), "a sliding attention window")
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    kv_heads = size(config, "num_key_value_heads", heads)
    dim = field(config, "head_dim", int, None) or head_dim or hidden // heads
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
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    refuse(dtype not in DTYPES, f"the data type {dtype!r}")
    bos = token_ids(config, "bos_token_id")
    return ModelSpec(
        architecture=architecture,
        vocab_size=size(config, "vocab_size"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        layers=(layer,) * size(config, "num_hidden_layers"),
        max_positions=size(config, "max_position_embeddings"),
        norm_eps=field(config, "rms_norm_eps", float, 1e-6),
        rope=rope_of(config),
        tied_head=field(config, "tie_word_embeddings", bool, False),
        dtype=dtype,
        bos_id=bos[0] if bos else None,
        eos_ids=token_ids(config, "eos_token_id"),
    )
