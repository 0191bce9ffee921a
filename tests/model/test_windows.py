"""CASE B-63: a window of W lets a token see itself and W - 1 before it, on the layers that the config names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, MistralConfig, Qwen2Config

from octavo.model.families import spec_from_config
from tests.model.driver import assert_equal_to_rival, load, make_rival, save_folder
from tests.model.test_transformers import GEMMA, GEMMA_ROPES, TINY

LENGTHS = (7, 8, 9, 16, 40)
WINDOW = {"sliding_window": 8}


def rewrite_config(folder: Path, change: dict[str, Any], drop: tuple[str, ...] = ()) -> Path:
    config = json.loads((folder / "config.json").read_text())
    for key in drop:
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | change))
    return folder


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_b63_mistral(tmp_path: Path, chunk: int, dtype: torch.dtype) -> None:
    rival = make_rival(MistralConfig(**(TINY | WINDOW)))
    decoder = load(save_folder(rival, tmp_path), dtype)
    assert_equal_to_rival(rival, decoder, lengths=LENGTHS, chunk=chunk, block_size=8)


def test_b63_layer_types_that_are_all_full(tmp_path: Path) -> None:
    rival = make_rival(MistralConfig(**(TINY | {"sliding_window": None})))
    change = WINDOW | {"layer_types": ["full_attention"] * 3}
    assert_equal_to_rival(rival, load(rewrite_config(save_folder(rival, tmp_path), change)), lengths=LENGTHS)


def test_b63_window_that_is_switched_off(tmp_path: Path) -> None:
    rival = make_rival(Qwen2Config(**(TINY | {"use_sliding_window": False})))
    folder = rewrite_config(save_folder(rival, tmp_path), WINDOW | {"max_window_layers": 0}, drop=("layer_types",))
    assert_equal_to_rival(rival, load(folder), lengths=LENGTHS)


def test_long_prompts_in_tiles(tmp_path: Path) -> None:
    """A prompt of several tiles of queries, a window inside one tile, and one beyond a tile."""
    for window in (48, 200):
        rival = make_rival(MistralConfig(**(TINY | {"sliding_window": window, "max_position_embeddings": 1024})))
        decoder = load(save_folder(rival, tmp_path / str(window)))
        assert_equal_to_rival(rival, decoder, lengths=(600, 450), chunk=600, steps=3, max_len=640)
        assert_equal_to_rival(rival, decoder, lengths=(600, 450), chunk=270, steps=3, max_len=640)


def test_older_gemma3_configs(tmp_path: Path) -> None:
    """As written before transformers 5: rope_theta, rope_local_base_freq, rope_scaling, sliding_window_pattern."""
    fields = TINY | GEMMA | {"rope_parameters": GEMMA_ROPES, "sliding_window_pattern": 3}
    rival = make_rival(Gemma3TextConfig(**fields))
    old = {
        "rope_theta": 100000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    folder = rewrite_config(save_folder(rival, tmp_path), old, drop=("rope_parameters", "layer_types"))
    assert_equal_to_rival(rival, load(folder), lengths=LENGTHS)


def test_language_model_of_a_multimodal_gemma3(tmp_path: Path) -> None:
    rival = make_rival(Gemma3TextConfig(**(TINY | GEMMA)))
    folder = save_folder(rival, tmp_path)
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named | {"vision_tower.x.weight": torch.zeros(3)}, folder / "model.safetensors")
    assert_equal_to_rival(rival, load(folder), lengths=LENGTHS)


def test_sizes_of_a_published_gemma3() -> None:
    """The 4B config leaves most sizes to defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    spec = spec_from_config(config)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert [layer.window for layer in spec.layers[:7]] == [1024] * 5 + [0, 1024]
    assert (spec.rope.theta, spec.rope.factor, spec.eos_ids, spec.dtype) == (1e6, 8.0, (1, 106), "bfloat16")
    assert spec.window_rope is not None and spec.window_rope.theta == 10000.0
