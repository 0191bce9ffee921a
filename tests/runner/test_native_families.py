"""The native engine against the torch decoder in float32, for everything that a `ModelSpec` can say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octavo.model.spec import LayerSpec, ModelSpec, RopeSpec, weight_needs
from octavo.runner.build import build_decoder
from octavo.runner.native import build_native
from octavo.weights.load import DummyCheckpoint
from tests.model.driver import Sequences
from tests.runner.native import log_probabilities

BASE = ModelSpec(
    architecture="llama",
    vocab_size=301,
    hidden_size=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    layers=(LayerSpec(mlp_size=80),) * 2,
    max_positions=4096,
    norm_eps=1e-5,
    rope=RopeSpec(),
    tied_head=True,
    dtype="float32",
)
BIASES = LayerSpec(mlp_size=80, qkv_bias=True, o_bias=True, mlp_bias=True)
EXPERTS = LayerSpec(mlp_size=48, qk_norm=True, experts=8, experts_per_token=3)


def layers(*specs: LayerSpec) -> tuple[LayerSpec, ...]:
    return specs


SPECS = {
    "llama": {},
    "own head": {"tied_head": False, "vocab_size": 333},
    "odd sizes": {"hidden_size": 74, "layers": layers(LayerSpec(mlp_size=51))},
    "biases": {"architecture": "qwen2", "layers": layers(BIASES, LayerSpec(mlp_size=66))},
    "qwen3": {"architecture": "qwen3", "layers": layers(LayerSpec(mlp_size=80, qk_norm=True)), "head_dim": 64},
    "scales": {"embed_scale": 3.5, "residual_scale": 0.4, "logit_scale": 0.25, "attention_scale": 0.3},
    "soft-caps": {"attention_softcap": 2.0, "logit_softcap": 3.0},
    "head_dim 128": {"head_dim": 128, "kv_heads": 1},
    "head_dim 256": {"head_dim": 256, "heads": 2, "kv_heads": 1},
    "many heads a group": {"heads": 12, "kv_heads": 1},
    "llama3 rope": {"rope": RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 64)},
    "gemma2": {
        "architecture": "gemma2", "activation": "gelu_tanh", "post_norms": True, "embed_scale": 9.8,
        "layers": layers(LayerSpec(mlp_size=80, window=20), LayerSpec(mlp_size=80)) * 2, "attention_softcap": 50.0,
    },
    "gemma3": {
        "architecture": "gemma3", "activation": "gelu_tanh", "post_norms": True,
        "rope": RopeSpec(1e6, "linear", 8.0), "window_rope": RopeSpec(1e4), "tensor_prefix": "language_model.",
        "layers": layers(LayerSpec(mlp_size=80, window=33, qk_norm=True), LayerSpec(mlp_size=80, qk_norm=True)),
    },
    "phi3": {"architecture": "phi3", "rope": RopeSpec(1e4, "factors", factors=(1.5,) * 8, magnitude=1.2)},
    "experts": {"architecture": "qwen3moe", "layers": layers(EXPERTS, LayerSpec(mlp_size=64, qk_norm=True))},
    "experts, raw weights": {"layers": layers(dataclasses.replace(EXPERTS, norm_expert_weights=False))},
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_equal_to_torch(name):
    spec = dataclasses.replace(BASE, **SPECS[name])
    needs = weight_needs(spec, "hf")
    checkpoint = DummyCheckpoint(needs, "F32", seed=3)
    ids = np.random.default_rng(1).integers(3, spec.vocab_size, 100).tolist()
    decoder = build_decoder(spec, needs, checkpoint, torch.float32, torch.device("cpu"))
    wanted = torch.log_softmax(Sequences(decoder, 1).feed({0: ids})[0], -1).numpy()
    for kv, bound in (("float32", 2e-4), ("bfloat16", 0.15)):
        runner = build_native(
            spec, needs, checkpoint, blocks=8, block_size=16, rows=4, max_len=112, dtype="float32", kv=kv, threads=2
        )
        got = log_probabilities(runner, ids)[:, : spec.vocab_size]
        assert np.abs(got - wanted).max() < bound
        assert runner.engine.calls == 1  # one forward, nothing fell back
