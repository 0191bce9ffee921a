"""Qwen 3: Llama's layers with a norm on each query and key head; dense, and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.files import field
from octavo.model.families.common import layer_count, llama_like, qwen_windows, refuse, silu_only, size
from octavo.model.spec import LayerSpec, ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `Qwen3ForCausalLM`."""
    return _qwen3(config, "qwen3", qwen_windows(config))


def moe_spec(config: Mapping[str, Any]) -> ModelSpec:
    """From config.json of `Qwen3MoeForCausalLM`: every `decoder_sparse_step`-th layer has experts."""
    refuse(config.get("use_sliding_window"), "a sliding attention window")
    base = _qwen3(config, "qwen3_moe", (0,) * layer_count(config))
    count = size(config, "num_local_experts" if "num_local_experts" in config else "num_experts", 128)
    chosen = size(config, "num_experts_per_tok", 8, count)
    experts = replace(
        base.layers[0],
        mlp_size=size(config, "moe_intermediate_size"),
        experts=count,
        experts_per_token=chosen,
        norm_expert_weights=field(config, "norm_topk_prob", bool, False),
    )
    step, dense = size(config, "decoder_sparse_step", 1), field(config, "mlp_only_layers", list, [])
    layers = [
        layer if index in dense or (index + 1) % step else experts for index, layer in enumerate(base.layers)
    ]
    return replace(base, layers=tuple(layers))


def _qwen3(config: Mapping[str, Any], architecture: str, windows: tuple[int, ...]) -> ModelSpec:
    silu_only(config)
    bias = field(config, "attention_bias", bool, False)
    layer = LayerSpec(0, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return llama_like(config, architecture, head_dim=128, windows=windows, layer=layer)
