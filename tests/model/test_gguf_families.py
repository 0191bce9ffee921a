"""GGUF files of every architecture equal `transformers`: written with the `gguf` package, under its tensor names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.errors import ModelError
from octavo.model.gguf_keys import ARCHITECTURES, spec_from_gguf
from tests.model.driver import as_published, assert_equal_to_rival, load, make_rival
from tests.model.test_transformers import CONFIGS, GEMMA, TINY

# GGUF architecture -> a model of `test_transformers`, and further changes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-mha-tied", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3", GEMMA | {"num_hidden_layers": 7, "rope_parameters": None, "query_pre_attn_scalar": 32}),
    "granite": ("granite", {}),
    "phi3": ("phi3-longrope", {}),
    "qwen3moe": ("qwen3-moe-sparse", {"decoder_sparse_step": 1}),
}


def rival_of(arch: str) -> Any:
    name, changes = MODELS[arch]
    kind, fields = CONFIGS[name]
    return make_rival(kind(**(TINY | fields | changes)))


def metadata_of(arch: str, config: Any) -> dict[str, Any]:
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }
    if dim := getattr(config, "head_dim", None):
        keys |= {"attention.key_length": dim, "attention.value_length": dim}
    rope = config.rope_parameters
    keys["rope.freq_base"] = (rope.get("full_attention") or rope)["rope_theta"]
    if arch in ("gemma2", "gemma3"):
        keys["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        keys |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    if arch == "granite":
        keys |= {"embedding_scale": 3.0, "attention.scale": 0.15, "residual_scale": 0.4, "logit_scale": 2.5}
    if arch == "phi3":
        magnitude = float(np.sqrt(1 + np.log(512 / 64) / np.log(64)))
        keys |= {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": magnitude}
    if arch == "qwen3moe":
        keys |= {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 24}
    return {f"{arch}.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.eos_token_id": 2}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of half-split heads in the order that files of arch llama have."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tensors_of(arch: str, model: Any) -> dict[str, np.ndarray]:
    """All tensors under their GGUF names, as a converter would write them."""
    config = model.config
    names = gguf.get_tensor_name_map(_ARCHS[arch], config.num_hidden_layers)
    result: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in as_published(model).items():
        array = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            experts.setdefault(f"{before}.experts.{after.partition('.')[2]}", []).append(array)
            continue
        if arch in ("granite", "llama") and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = interleave(array, heads)
        if "gemma" in arch and "norm" in name:
            array = array + 1
        result[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    for name, parts in experts.items():
        result[names.get_name(name, try_suffixes=(".weight",))] = np.stack(parts)
    if arch == "phi3":
        for kind in ("short", "long"):
            result[f"rope_factors_{kind}.weight"] = np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
    return result


_ARCHS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def write(path: Path, arch: str, model: Any) -> None:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata_of(arch, model.config).items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    for name, array in tensors_of(arch, model).items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_architecture_is_here() -> None:
    assert set(MODELS) == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", MODELS)
def test_gguf_equals_transformers(tmp_path: Path, arch: str) -> None:
    rival = rival_of(arch)
    path = tmp_path / "model.gguf"
    write(path, arch, rival)
    decoder = load(path, torch.float32)
    assert_equal_to_rival(rival, decoder, chunk=11)


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_gguf({"general.architecture": "mamba"}, [])
    assert "mamba" in str(caught.value) and "qwen3moe" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"llama.embedding_length": 0}, "embedding_length"),
        ({"llama.block_count": 1 << 31}, "block_count"),
        ({"llama.attention.head_count_kv": 3}, "query heads"),
        ({"llama.attention.head_count": "4"}, "head_count"),
        ({"llama.attention.key_length": 15}, "heads of 15"),
        ({"llama.attention.value_length": 32}, "values of 32"),
        ({"llama.rope.dimension_count": 8}, "rotates 8"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "linear"}, "factor"),
        ({"tokenizer.ggml.eos_token_id": 97}, "end tokens"),
        ({"llama.vocab_size": None}, "vocab_size"),
    ],
    ids=str,
)
def test_hostile_metadata(change: dict[str, Any], named: str) -> None:
    kind, fields = CONFIGS["llama"]
    good = {"general.architecture": "llama"} | metadata_of("llama", kind(**(TINY | fields)))
    spec_from_gguf(good, ["output.weight"])
    with pytest.raises(ModelError) as caught:
        spec_from_gguf(good | change, ["output.weight"])
    assert named in str(caught.value)
