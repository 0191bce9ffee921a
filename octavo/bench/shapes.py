"""Model shapes for measurement with dummy weights: the values of public configuration files, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError


def _llama(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _llama(
        1024, 3072, 28, 16, 8, 151936, architectures=["Qwen3ForCausalLM"], model_type="qwen3", rms_norm_eps=1e-6,
        tie_word_embeddings=True, max_position_embeddings=40960, rope_theta=1e6, attention_bias=False,
        bos_token_id=151643, eos_token_id=151645,
    ),
    "llama3.1-8b": _llama(
        4096, 14336, 32, 32, 8, 128256, max_position_embeddings=131072, rope_theta=5e5, bos_token_id=128000,
        eos_token_id=128001,
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama2-13b": _llama(
        5120, 13824, 40, 40, 40, 32000, max_position_embeddings=4096, rope_theta=1e4, torch_dtype="float16",
        bos_token_id=1, eos_token_id=2,
    ),
    "tiny": _llama(
        256, 512, 2, 4, 2, 4096, head_dim=64, max_position_embeddings=8192, rope_theta=1e4, bos_token_id=1,
        eos_token_id=2,
    ),
}  # fmt: skip


def write_shape(name: str, root: Path) -> Path:
    """A model folder below `root` that holds only config.json, for `load_format="dummy"`."""
    if name not in SHAPES:
        raise ConfigError(f"There is no shape {name!r}.", f"Give one of {', '.join(SHAPES)}.")
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder
