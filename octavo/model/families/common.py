"""Reading a Hugging Face config: checked fields, rope in both spellings, refusals that name key and value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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


def rope_of(config: Mapping[str, Any], theta: float = 10000.0) -> RopeSpec:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    `theta`: the base when the config names none.
    """
    scaling = field(config, "rope_parameters", dict, None) or field(config, "rope_scaling", dict, None) or {}
    theta = number(scaling if "rope_theta" in scaling else config, "rope_theta", theta)
    kind = field(scaling, "rope_type", str, None) or field(scaling, "type", str, "default")
    refuse(scaling.get("partial_rotary_factor", 1.0) != 1.0, "heads that are rotated in part")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", number(scaling, "factor"))
    if kind == "yarn":
        return _yarn(config, scaling, theta)
    refuse(kind != "llama3", f"rope type {kind!r}")
    low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
    refuse(low >= high, f"low_freq_factor {low} and high_freq_factor {high}")
    original = size(scaling, "original_max_position_embeddings", most=MAX_POSITIONS)
    return RopeSpec(theta, "llama3", number(scaling, "factor"), low, high, original)


def _yarn(config: Mapping[str, Any], scaling: Mapping[str, Any], theta: float) -> RopeSpec:
    refuse(any(key in scaling for key in ("mscale", "mscale_all_dim")), "the rope setting mscale")
    refuse(scaling.get("truncate", True) is not True, "the rope setting truncate=false")
    factor = number(scaling, "factor")
    positions = size(config, "max_position_embeddings", most=MAX_POSITIONS)
    original = size(scaling, "original_max_position_embeddings", positions, MAX_POSITIONS)
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_positions=original,
        beta_fast=number(scaling, "beta_fast", 32.0),
        beta_slow=number(scaling, "beta_slow", 1.0),
        magnitude=number(scaling, "attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
    )


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """`eos_token_id` and the like: none, one id, or a list of ids, all inside the vocabulary."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    top = size(config, "vocab_size")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < top for i in ids):
        raise ModelError(f"The model's {key} is {value!r}.", f"It must be ids from 0 to {top - 1}.")
    return tuple(ids)


def layer_count(config: Mapping[str, Any]) -> int:
    """Number of decoder layers."""
    return size(config, "num_hidden_layers", most=MAX_LAYERS)


def windows(config: Mapping[str, Any], slides: Callable[[int], bool]) -> tuple[int, ...]:
    """The attention window of each layer, 0 for none; `layer_types` decides where it is given, else `slides`."""
    count = layer_count(config)
    types = field(config, "layer_types", list, None)
    if types is None:
        types = ["sliding_attention" if slides(index) else "full_attention" for index in range(count)]
    refuse(len(types) != count, f"{len(types)} layer_types for {count} layers")
    for kind in types:
        refuse(kind not in ("full_attention", "sliding_attention"), f"the layer type {kind!r}")
    if "sliding_attention" not in types:
        return (0,) * count
    window = size(config, "sliding_window", most=MAX_POSITIONS)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def mistral_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The windows of Mistral and Phi-3: on every layer if `sliding_window` is set, unless `layer_types` says so."""
    if config.get("sliding_window") is None:
        return (0,) * layer_count(config)
    return windows(config, lambda index: True)


def qwen_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The windows of Qwen 2 and 3: only with `use_sliding_window`, from layer `max_window_layers` on."""
    if not field(config, "use_sliding_window", bool, False) or config.get("sliding_window") is None:
        return (0,) * layer_count(config)
    first = field(config, "max_window_layers", int, 28)
    return windows(config, lambda index: index >= first)


def llama_like(
    config: Mapping[str, Any],
    architecture: str,
    *,
    head_dim: int = 0,
    theta: float = 10000.0,
    windows: Sequence[int] = (),
    layer: LayerSpec | None = None,
) -> ModelSpec:
    """The spec of a decoder that differs from Llama in numbers only.

    `head_dim`, `theta`: used when the config is silent. `windows`: one for each layer. `layer` gives the biases and
    norms of a layer; None reads `attention_bias` and `mlp_bias`. Its MLP's size always comes from the config.
    """
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    kv_heads = size(config, "num_key_value_heads", heads)
    dim = size(config, "head_dim", head_dim or max(hidden // heads, 1))
    if heads % kv_heads or dim % 2:
        raise ModelError(
            f"The model has {heads} query heads, {kv_heads} key/value heads of {dim}.",
            "Query heads must be a multiple of key/value heads, and the head size even. Check config.json.",
        )
    if layer is None:
        bias = field(config, "attention_bias", bool, False)
        layer = LayerSpec(0, qkv_bias=bias, o_bias=bias, mlp_bias=field(config, "mlp_bias", bool, False))
    layer = replace(layer, mlp_size=size(config, "intermediate_size"))
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
        layers=tuple(replace(layer, window=window) for window in windows or (0,) * layer_count(config)),
        max_positions=size(config, "max_position_embeddings", most=MAX_POSITIONS),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope_of(config, theta),
        tied_head=field(config, "tie_word_embeddings", bool, False),
        dtype=dtype,
        bos_id=bos[0] if bos else None,
        eos_ids=token_ids(config, "eos_token_id"),
    )


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """The config.json fields of what `llama_like` reads."""
    first = spec.layers[0]
    rope: dict[str, Any] = {"rope_type": spec.rope.kind, "rope_theta": spec.rope.theta}
    if spec.rope.kind != "default":
        rope["factor"] = spec.rope.factor
    if spec.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": spec.rope.low_freq_factor,
            "high_freq_factor": spec.rope.high_freq_factor,
            "original_max_position_embeddings": spec.rope.original_positions,
        }
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": first.mlp_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": spec.tied_head,
        "attention_bias": first.qkv_bias,
    }


def silu_only(config: Mapping[str, Any]) -> None:
    """Refuse an activation other than SiLU."""
    refuse(config.get("hidden_act", "silu") != "silu", f"the activation {config.get('hidden_act')!r}")
