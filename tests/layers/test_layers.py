"""The layers against transformers' modules, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from octavo.errors import ModelError
from octavo.kernels.ops import ops_for
from octavo.kernels.reference import rotate
from octavo.layers.attention import Attention
from octavo.layers.base import Weights
from octavo.layers.embedding import Embedding
from octavo.layers.head import Head
from octavo.layers.mlp import Mlp
from octavo.layers.norm import RmsNorm
from octavo.layers.rope import Rope

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_transformers(dtype):
    rival = llama.LlamaRMSNorm(32, eps=1e-5).to(dtype)
    rival.weight.data = randn(32, dtype=dtype)
    norm = RmsNorm(Weights({"norm": rival.weight.data.clone()}), "norm", 32, 1e-5)
    x_TI = randn(7, 32, seed=1, dtype=dtype)
    torch.testing.assert_close(norm(x_TI), rival(x_TI), rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers_at_large_positions(dtype):
    """The tables bit by bit, since an angle that is off by one rounding is off by far at position 100,000."""
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    positions_T = torch.tensor([0, 1, 2, 77, 4095, 131071])
    q, k = randn(1, 2, 6, 32, dtype=dtype), randn(1, 1, 6, 32, seed=1, dtype=dtype)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions_T[None])
    expected = torch.cat(llama.apply_rotary_pos_emb(q, k, cos, sin), dim=1)[0].transpose(0, 1)
    frequencies_F = 1.0 / (5e5 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32))
    cos_TD, sin_TD = Rope(frequencies_F, dtype)(positions_T)
    assert torch.equal(cos_TD, cos[0])
    assert torch.equal(sin_TD.abs(), sin[0].abs()) and torch.equal(sin_TD[:, 16:], sin[0, :, 16:])
    assert torch.equal(rotate(torch.cat((q, k), 1)[0].transpose(0, 1), cos_TD, sin_TD), expected)


def test_rope_magnitude_scales_both():
    frequencies_F = torch.tensor([1.0, 0.1])
    plain, scaled = (Rope(frequencies_F, torch.float64, m)(torch.arange(5)) for m in (1.0, 1.5))
    np.testing.assert_allclose(scaled[0], 1.5 * plain[0], rtol=1e-6)
    np.testing.assert_allclose(scaled[1], 1.5 * plain[1], rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_mlp_equals_transformers(bias):
    rival = llama.LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, mlp_bias=bias))
    state = rival.state_dict()
    params = {
        "gate_up": torch.cat((state["gate_proj.weight"], state["up_proj.weight"])),
        "down": state["down_proj.weight"],
    }
    if bias:
        params["gate_up_bias"] = torch.cat((state["gate_proj.bias"], state["up_proj.bias"]))
        params["down_bias"] = state["down_proj.bias"]
    weights = Weights({f"layers.0.{name}": tensor.clone() for name, tensor in params.items()})
    mlp = Mlp(weights, "layers.0.", 32, 48, bias)
    x_TI = randn(5, 32)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x_TI), rival(x_TI))
    assert weights.leftover() == []


def test_attention_hands_fused_heads_to_the_step_and_projects_back():
    """The layer's own part: qkv in one product, the heads' norm passed on, the output product."""
    config = Qwen3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_bias=True
    )
    rival = qwen3.Qwen3Attention(config, 0)
    state = {name: randn(*tensor.shape, seed=i) for i, (name, tensor) in enumerate(rival.state_dict().items())}
    params = {
        "qkv": torch.cat([state[f"{x}_proj.weight"] for x in "qkv"]),
        "qkv_bias": torch.cat([state[f"{x}_proj.bias"] for x in "qkv"]),
        "o": state["o_proj.weight"],
        "o_bias": state["o_proj.bias"],
        "q_norm": state["q_norm.weight"],
        "k_norm": state["k_norm.weight"],
    }
    weights = Weights({f"layers.3.{name}": tensor.clone() for name, tensor in params.items()})
    attention = Attention(weights, 3, 32, 4, 2, 16, True, True, 1e-6)
    seen = {}

    def mix(layer, qkv_TJD, norm):
        seen.update(layer=layer, qkv=qkv_TJD, norm=norm)
        return qkv_TJD[:, :4]

    x_TI = randn(5, 32)
    y_TI = attention(x_TI, mix)
    q, k, v = (torch.nn.functional.linear(x_TI, state[f"{x}_proj.weight"], state[f"{x}_proj.bias"]) for x in "qkv")
    assert seen["layer"] == 3
    torch.testing.assert_close(seen["qkv"].flatten(1), torch.cat((q, k, v), 1))
    norm_JD, eps = seen["norm"]
    assert eps == 1e-6 and torch.equal(norm_JD[3], params["q_norm"]) and torch.equal(norm_JD[4], params["k_norm"])
    torch.testing.assert_close(y_TI, torch.nn.functional.linear(q, state["o_proj.weight"], state["o_proj.bias"]))


def test_head_scales_caps_and_widens():
    weight_VI, hidden_NI = randn(11, 16, dtype=torch.bfloat16), randn(3, 16, seed=1, dtype=torch.bfloat16)
    raw = Head(ops_for(CPU), weight_VI.clone(), 1.0, 0.0)(hidden_NI)
    assert raw.dtype == torch.float32
    got = Head(ops_for(CPU), weight_VI.clone(), 0.5, 3.0)(hidden_NI)
    torch.testing.assert_close(got, torch.tanh(raw * 0.5 / 3.0) * 3.0)
    assert Head(ops_for(CPU), weight_VI.double(), 1.0, 0.0)(hidden_NI.double()).dtype == torch.float64


def test_embedding_takes_rows_times_scale():
    table_VI = randn(11, 4)
    embed = Embedding(Weights({"embed": table_VI.clone()}), "embed", 11, 4, 2.5)
    assert torch.equal(embed(torch.tensor([3, 0, 3])), table_VI[[3, 0, 3]] * 2.5)


def test_weights_are_taken_once_and_checked():
    params = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(4, dtype=torch.float64)}
    weights = Weights(params)
    assert weights.take("a", 2, 3).shape == (2, 3) and "a" not in params
    for name, shape, words in [
        ("a", (2, 3), "'a', which was not loaded"),
        ("b", (5,), r"shape \(4,\)"),
        ("c", (4,), "float64"),
    ]:
        with pytest.raises(ModelError, match=words):
            weights.take(name, *shape)
    assert weights.leftover() == []
    with pytest.raises(ModelError, match="no tensors"):
        Weights({})
