"""Quantised checkpoints written element by element from the published layouts, independent of the readers under test.

Every writer takes a matrix [out, in] and returns the tensors of its module and the matrix that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Codes:
    """w[o, i] = (code[o, i] - zero[o, group[i]]) * scale[o, group[i]]."""

    code: np.ndarray
    zero: np.ndarray
    scale: np.ndarray
    group: np.ndarray

    def dense(self) -> np.ndarray:
        wide = (self.code - self.zero[:, self.group]) * self.scale[:, self.group].astype(np.float32)
        return wide.astype(np.float32)


def round_codes(weight: np.ndarray, bits: int, size: int, symmetric: bool, shuffle: int = 0) -> Codes:
    """Round to nearest; `shuffle` seeds groups whose members are spread over the row."""
    outputs, inputs = weight.shape
    size = inputs if size == -1 else size
    group = np.arange(inputs) // size
    if shuffle:
        group = np.random.default_rng(shuffle).permutation(group)
    high = 2**bits - 1
    scale = np.empty((outputs, inputs // size), np.float16)
    zero = np.empty(scale.shape, np.int64)
    code = np.empty(weight.shape, np.int64)
    for g in range(inputs // size):
        part = weight[:, group == g]
        if symmetric:
            scale[:, g] = np.abs(part).max(1) / (high // 2)
            zero[:, g] = high // 2 + 1
        else:
            low, top = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale[:, g] = (top - low) / high
            zero[:, g] = np.clip(np.round(-low / scale[:, g]), 0, high)
        rounded = np.round(part / scale[:, g : g + 1].astype(np.float32)) + zero[:, g : g + 1]
        code[:, group == g] = np.clip(rounded, 0, high)
    return Codes(code, zero, scale, group)


def words(values: list[int], bits: int) -> int:
    """32 bits of values, the first lowest, as a signed number."""
    word = 0
    for place, value in enumerate(values):
        word |= (int(value) & (2**bits - 1)) << (bits * place)
    return word - 2**32 if word >= 2**31 else word


def pack_gptq(codes: Codes, bits: int, offset: int, order: bool) -> dict[str, Tensor]:
    outputs, inputs = codes.code.shape
    per = 32 // bits
    qweight = [[words(list(codes.code[o, i : i + per]), bits) for o in range(outputs)] for i in range(0, inputs, per)]
    rows = []
    for g in range(codes.zero.shape[1]):
        whole = [words(list(codes.zero[o : o + per, g]), bits) for o in range(0, outputs, per)]
        step = words([offset] * per, bits)
        rows.append([(word - step + 2**31) % 2**32 - 2**31 for word in whole])
    found = {
        "qweight": torch.tensor(qweight, dtype=torch.int32),
        "qzeros": torch.tensor(rows, dtype=torch.int32),
        "scales": torch.from_numpy(codes.scale.T.copy()),
    }
    if order:
        found["g_idx"] = torch.from_numpy(codes.group.astype(np.int32))
    return found


def pack_awq(codes: Codes) -> dict[str, Tensor]:
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    outputs, inputs = codes.code.shape
    qweight = [
        [words([codes.code[o + p, i] for p in places], 4) for o in range(0, outputs, 8)] for i in range(inputs)
    ]
    qzeros = [
        [words([codes.zero[o + p, g] for p in places], 4) for o in range(0, outputs, 8)]
        for g in range(codes.zero.shape[1])
    ]
    return {
        "qweight": torch.tensor(qweight, dtype=torch.int32),
        "qzeros": torch.tensor(qzeros, dtype=torch.int32),
        "scales": torch.from_numpy(codes.scale.T.copy()),
    }


def pack_compressed(codes: Codes, bits: int, symmetric: bool, order: bool) -> dict[str, Tensor]:
    outputs, inputs = codes.code.shape
    per = 32 // bits
    packed = [[words(list(codes.code[o, i : i + per]), bits) for i in range(0, inputs, per)] for o in range(outputs)]
    found = {
        "weight_packed": torch.tensor(packed, dtype=torch.int32),
        "weight_scale": torch.from_numpy(codes.scale.copy()).to(torch.bfloat16),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        groups = codes.zero.shape[1]
        starts = range(0, outputs, per)
        zeros = [[words(list(codes.zero[o : o + per, g]), bits) for g in range(groups)] for o in starts]
        found["weight_zero_point"] = torch.tensor(zeros, dtype=torch.int32)
    if order:
        found["weight_g_idx"] = torch.from_numpy(codes.group.astype(np.int32))
    return found


Writer = Callable[[np.ndarray], tuple[dict[str, Tensor], np.ndarray]]


def gptq(bits: int = 4, size: int = 32, symmetric: bool = True, order: bool = False, offset: int = 1) -> Writer:
    def write(weight: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = round_codes(weight, bits, size, symmetric, shuffle=weight.shape[1] if order else 0)
        return pack_gptq(codes, bits, offset, order), codes.dense()

    return write


def awq(size: int = 32) -> Writer:
    def write(weight: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = round_codes(weight, 4, size, False)
        return pack_awq(codes), codes.dense()

    return write


def compressed(bits: int = 4, size: int = 32, symmetric: bool = True, order: bool = False) -> Writer:
    def write(weight: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
        codes = round_codes(weight, bits, size, symmetric, shuffle=weight.shape[1] if order else 0)
        rounded = torch.from_numpy(codes.scale).to(torch.bfloat16).float().numpy()
        codes = replace(codes, scale=rounded)
        return pack_compressed(codes, bits, symmetric, order), codes.dense()

    return write


def fp8(strategy: str = "tensor", static: bool = False, name: str = "weight_scale") -> Writer:
    def write(weight: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
        wide = torch.from_numpy(weight)
        outputs, inputs = weight.shape
        if strategy == "block":
            scale = torch.empty(-(-outputs // 128), -(-inputs // 128))
            for r in range(scale.shape[0]):
                for c in range(scale.shape[1]):
                    block = wide[128 * r : 128 * r + 128, 128 * c : 128 * c + 128]
                    scale[r, c] = block.abs().max() / 448
            full = scale.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        elif strategy == "channel":
            full = scale = wide.abs().amax(1, keepdim=True) / 448
        else:
            full = scale = wide.abs().max() / 448
        codes = (wide / full).clamp(-448, 448).to(torch.float8_e4m3fn)
        found = {"weight": codes, name: scale.clone()}
        if static:
            found["input_scale"] = torch.tensor(0.03 + 0.001 * outputs / inputs)
        return found, (codes.float() * full).numpy()

    return write


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Seeded weights of a Llama, float16 values."""
    g = torch.Generator().manual_seed(seed)
    hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    mlps = {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp)}
    found = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=g) * 0.15}
    found["model.norm.weight"] = 1 + 0.2 * torch.randn(hidden, generator=g)
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{stem}{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=g)
        for part, group in (("self_attn", shapes), ("mlp", mlps)):
            for name, shape in group.items():
                found[f"{stem}{part}.{name}.weight"] = 1.2 * shape[1] ** -0.5 * torch.randn(shape, generator=g)
    return {name: tensor.half() for name, tensor in found.items()}


def write_pair(
    folder: Path, writer: Writer, quantization: dict[str, Any], changes: dict[str, Any] | None = None,
    skip: tuple[str, ...] = (),
) -> tuple[Path, Path]:
    """A quantised model folder, and a plain float32 one of what its matrices stand for. `skip`: left as they are."""
    config = CONFIG | (changes or {})
    packed, plain = {}, {}
    for name, tensor in tiny_weights(config).items():
        module, _, _ = name.rpartition(".")
        if module.endswith(LINEARS) and not any(part in module for part in skip):
            pieces, dense = writer(tensor.float().numpy())
            packed |= {f"{module}.{piece}": value.contiguous() for piece, value in pieces.items()}
            plain[name] = torch.from_numpy(dense)
        else:
            packed[name], plain[name] = tensor, tensor.float()
    made = folder / "quantised", folder / "plain"
    for path, state, extra in (
        (made[0], packed, {"quantization_config": quantization}),
        (made[1], plain, {"torch_dtype": "float32"}),
    ):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config | extra))
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "model.safetensors")
    return made


def byte_model(folder: Path) -> Path:
    """A tiny plain model whose tokens are bytes, with its tokenizer."""
    changes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    path = write_pair(folder, awq(32), {"quant_method": "awq"}, changes, skip=("proj",))[1]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return path
