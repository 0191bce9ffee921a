"""Tiny random models of every family equal `transformers` in float32: logits of every position and greedy ids."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.model.driver import assert_equal_to_rival, load, make_rival, save_folder

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0],
    "long_factor": [2.0] * 8,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA = {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 4, "query_pre_attn_scalar": 24}
MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-mha-tied": (LlamaConfig, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama-llama3-rope": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1}),
    "llama-linear-rope": (LlamaConfig, {"rope_parameters": LINEAR_ROPE, "head_dim": 32}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-mha-tied": (Qwen3Config, {"head_dim": 24, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3-bias": (Qwen3Config, {"head_dim": 32, "attention_bias": True}),
    "qwen3-window": (
        Qwen3Config,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.15,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": 8, "head_dim": 24}),
    "mistral-no-window": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {"use_sliding_window": False, "sliding_window": 8, "tie_word_embeddings": True}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen2-yarn": (Qwen2Config, {"rope_parameters": YARN_ROPE}),
    "gemma2": (Gemma2Config, GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": (Gemma3TextConfig, GEMMA | {"rope_parameters": GEMMA_ROPES}),
    "gemma3-types": (
        Gemma3TextConfig,
        GEMMA | {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_key_value_heads": 1},
    ),
    "phi3": (Phi3Config, {"sliding_window": 8, "num_key_value_heads": 4}),
    "phi3-longrope": (
        Phi3Config,
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64, "max_position_embeddings": 512},
    ),
    "qwen3-moe": (Qwen3MoeConfig, MOE),
    "qwen3-moe-sparse": (Qwen3MoeConfig, MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3-moe-dense": (Qwen3MoeConfig, MOE | {"mlp_only_layers": [1]}),
}


@cache
def rival(name: str) -> Any:
    kind, changes = CONFIGS[name]
    return make_rival(kind(**(TINY | changes)))


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_transformers(tmp_path: Path, name: str) -> None:
    decoder = load(save_folder(rival(name), tmp_path))
    assert_equal_to_rival(rival(name), decoder)
    assert_equal_to_rival(rival(name), decoder, chunk=5)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_block_sizes_and_shards(tmp_path: Path, block_size: int) -> None:
    decoder = load(save_folder(rival("llama"), tmp_path, shards=3))
    assert_equal_to_rival(rival("llama"), decoder, block_size=block_size, chunk=11)


@pytest.mark.parametrize("name", ["llama-mha-tied", "qwen3"])
def test_spelling_of_older_configs(tmp_path: Path, name: str) -> None:
    """`rope_theta` and `rope_scaling` beside each other, `torch_dtype`: what transformers 4 wrote."""
    import json

    folder = save_folder(rival(name), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(config))
    assert_equal_to_rival(rival(name), load(folder), lengths=(5, 23))


def test_rival_is_not_trivial() -> None:
    """Weights are large enough that logits differ between positions and the argmax is not always the same."""
    from tests.model.driver import random_prompts, rival_logits

    logits = rival_logits(rival("llama"), random_prompts(97, [40])[0])
    assert logits.std() > 0.5
    assert len(set(logits.argmax(-1).tolist())) > 10
    assert torch.isfinite(logits).all()
