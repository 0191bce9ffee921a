"""What cannot be loaded is refused before a weight is read, with the name of the key or tensor at fault.

CASES B-61 and B-62, and configs that a stranger wrote.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from octavo.errors import ModelError
from octavo.model.families import FAMILIES, spec_from_config
from tests.model.driver import load, make_rival, opened, save_folder
from tests.model.test_transformers import TINY

GOOD: dict[str, Any] = TINY | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "dtype": "float32"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(make_rival(LlamaConfig(**TINY)), tmp_path)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return save_folder(make_rival(LlamaConfig(**TINY)), tmp_path, shards=3)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        opened(folder)
    return str(caught.value)


def rewrite(folder: Path, change: Any) -> None:
    """Apply `change` to the dict of tensors of a single-file model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config(GOOD | {"architectures": ["MambaForCausalLM"]})
    assert "MambaForCausalLM" in str(caught.value)
    assert all(name in str(caught.value) for name in FAMILIES)


def test_auto_map_is_never_followed(folder: Path) -> None:
    """A config may name code; the code is neither run nor missed."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('code of a model was run')")
    opened(folder)
    config["architectures"] = ["evil.Model"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "evil.Model" in refusal(folder)


# B-61


def test_b61_missing_shard(shards: Path) -> None:
    (shards / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(shards)


def test_b61_truncated_shard(shards: Path) -> None:
    shard = shards / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert shard.name in refusal(shards)


def test_b61_index_names_a_tensor_that_the_shard_lacks(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    text["weight_map"]["model.layers.0.extra.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(text))
    assert "model.layers.0.extra.weight" in refusal(shards)


# B-62


def test_b62_dropped_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_b62_transposed_tensor(folder: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].T}))
    text = refusal(folder)
    assert name in text and "[96, 64]" in text and "[64, 96]" in text


def test_b62_unknown_tensor_warns_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.odd.weight": torch.zeros(3)}))
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert any("model.layers.0.odd.weight" in record.getMessage() for record in caplog.records)


def test_b62_bias_that_the_config_promises(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    text = refusal(folder)
    assert "model.layers.0.self_attn.q_proj.bias" in text


def test_config_and_weights_of_different_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    assert "mlp.gate_proj.weight" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 1 << 60}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": [3]}, "num_hidden_layers"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "query heads"),
        ({"num_attention_heads": 1 << 40}, "num_attention_heads"),
        ({"head_dim": 15}, "head"),
        ({"head_dim": -2}, "head_dim"),
        ({"head_dim": 1 << 30}, "head_dim"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"max_position_embeddings": 1 << 50}, "max_position_embeddings"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0,
                              "original_max_position_embeddings": 32}},
            "high_freq_factor",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_act": ["silu"]}, "activation"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"eos_token_id": 97}, "eos_token_id"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": ["float32"]}, "dtype"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"architectures": []}, "architecture"),
        ({"architectures": "LlamaForCausalLM"}, "architecture"),
        ({"architectures": [7]}, "architecture"),
    ],
    ids=str,
)  # fmt: skip
def test_hostile_configs(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config(GOOD | change)
    assert named in str(caught.value)


def test_the_good_config_is_good() -> None:
    spec = spec_from_config(GOOD)
    assert (spec.hidden_size, spec.head_dim, spec.eos_ids, spec.bos_id) == (64, 16, (2,), 1)
