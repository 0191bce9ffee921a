"""Real quantised files: greedy text equals `transformers` on the dequantised weights, both in float32.

A first difference is allowed only where the best two logits are closer than rounding; prompts reach beyond Gemma's
window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.model.decoder import Decoder
from octavo.model.gguf_keys import spec_from_gguf
from octavo.model.spec import ModelSpec, weight_needs
from octavo.runner.build import load_params
from octavo.text.tokenizer import Tokenizer
from octavo.weights.gguf import GgufCheckpoint
from tests.model.driver import CPU, Sequences, rival_logits

MARGIN = 1e-3
LONG = "The river rises in the hills north of the town and runs for forty miles to the sea. " * 40
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "日本の首都は", LONG + "The river rises in"]
STEPS = 16


def open_file(path: Path) -> tuple[ModelSpec, dict[str, Tensor], Tokenizer]:
    checkpoint = GgufCheckpoint(path)
    spec = spec_from_gguf(checkpoint.metadata, checkpoint.names())
    params = load_params(weight_needs(spec, "gguf"), checkpoint, torch.float32, CPU)
    return spec, params, Tokenizer.from_gguf(checkpoint.metadata)


def rival_of(spec: ModelSpec, params: dict[str, Tensor], config: Any, norm_offset: float) -> Any:
    """`transformers` on the same tensors, not copied: memory holds one model."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    state: dict[str, Tensor] = {}
    for need in weight_needs(spec, "hf"):
        tensor = params[need.name] - norm_offset if need.wide else params[need.name]
        rows = torch.split(tensor, [source.shape[0] for source in need.sources])
        state |= {source.name: part for source, part in zip(need.sources, rows, strict=True)}
    if spec.tied_head:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    assert not model.load_state_dict(state, strict=False, assign=True).unexpected_keys
    fresh = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = fresh
    if hasattr(model.model.embed_tokens, "embed_scale"):
        model.model.embed_tokens.embed_scale = torch.tensor(spec.embed_scale)
    assert not [name for name, tensor in model.named_parameters() if tensor.is_meta]
    return model


def assert_greedy_equal(path: Path, config: Any, norm_offset: float) -> None:
    spec, params, tokenizer = open_file(path)
    rival = rival_of(spec, params, config, norm_offset)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    assert max(map(len, prompts)) > 700
    sequences = Sequences(Decoder(spec, dict(params)), len(prompts), max_len=1024)
    prefill = sequences.prefill(prompts, 200)
    ids, _ = sequences.greedy([int(logits[-1].argmax()) for logits in prefill], STEPS)
    for prompt, new in zip(prompts, ids, strict=True):
        logits = rival_logits(rival, prompt + new[:-1])[len(prompt) - 1 :]
        theirs = logits.argmax(-1).tolist()
        first = next((at for at, (a, b) in enumerate(zip(new, theirs, strict=True)) if a != b), None)
        best = logits.topk(2).values
        assert first is None or best[first, 0] - best[first, 1] < MARGIN, (tokenizer.decode(new), first)


@pytest.mark.slow
def test_gemma3(gemma3_gguf: Path) -> None:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        query_pre_attn_scalar=256,
        sliding_window=512,
    )
    assert_greedy_equal(gemma3_gguf, config, 1.0)


@pytest.mark.slow
def test_qwen2(qwen2_gguf: Path) -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    assert_greedy_equal(qwen2_gguf, config, 0.0)
