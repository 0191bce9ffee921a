"""How far logits in bfloat16 are from exact ones: of captured steps on CUDA, and of torch's own operations."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from octavo.model.decoder import Decoder
from octavo.model.spec import LayerSpec, ModelSpec, RopeSpec, weight_needs
from octavo.runner.build import load_params
from octavo.scheduler.plan import HOST_IDS, P_LENGTH, PARAM_WORDS, RARE, SAMPLE, PlanDraft
from octavo.weights.load import DummyCheckpoint
from tests.model.driver import Sequences

pytestmark = pytest.mark.gpu

LENGTHS = (1, 5, 17, 64, 100, 129, 200, 300)
VOCAB = 1024


def spec(qk_norm: bool) -> ModelSpec:
    return ModelSpec(
        architecture="qwen3" if qk_norm else "llama",
        vocab_size=VOCAB,
        hidden_size=1024,
        heads=16,
        kv_heads=8,
        head_dim=128,
        layers=tuple(LayerSpec(mlp_size=3072, qk_norm=qk_norm) for _ in range(4)),
        max_positions=2048,
        norm_eps=1e-6,
        rope=RopeSpec(),
        tied_head=True,
        dtype="bfloat16",
        eos_ids=(2,),
    )


def on_cuda(model: ModelSpec, params: dict, prompts: list[list[int]], steps: int) -> tuple[list, list[torch.Tensor]]:
    """Greedy tokens of each row, and the logits [rows, V] that each step chose from."""
    from octavo.runner.cuda_runner import CudaRunner

    decoder = Decoder(model, {name: weight.cuda() for name, weight in params.items()})
    runner = CudaRunner(decoder, blocks=300, block_size=16, rows=8, max_len=512, max_tokens=2048, eager=False)
    runner.capture()
    count = len(prompts)
    rows, kept = np.arange(1, count + 1), [[] for _ in prompts]
    draft, lengths = PlanDraft(0), np.array([len(prompt) for prompt in prompts])
    for row in rows.tolist():
        draft.write_table(row, np.arange(32, dtype=np.int32), np.arange(32 * row - 31, 32 * row + 1, dtype=np.int32))
        params_P = np.zeros(PARAM_WORDS, np.int32)
        params_P[0], params_P[P_LENGTH] = row, lengths[row - 1]
        draft.params.append(params_P)
    draft.tokens.append(np.array(sum(prompts, []), np.int32))
    flags = np.full(count, SAMPLE | RARE)  # a rare row leaves the stream of each sample behind
    plans = [draft.encode((rows, 0 * rows, lengths, flags | HOST_IDS), 0)]
    plans += [PlanDraft(n + 1).encode((rows, lengths + n, 0 * rows + 1, flags), count) for n in range(steps)]
    logits = []
    for words in plans:
        tokens = runner.collect(runner.launch(words)).tokens
        with torch.inference_mode():
            logits.append(decoder.logits(decoder.normed(runner._picked_RI[:count])).cpu())
        for row, token in enumerate(tokens.tolist()):
            kept[row].append(token)
    return kept, logits


def on_cpu(model: ModelSpec, params: dict, texts: list[list[int]]) -> list[torch.Tensor]:
    """logits_TV of every token, by torch's own operations."""
    decoder = Decoder(model, dict(params), "reference")
    return Sequences(decoder, len(texts), max_len=512).prefill(texts, 512)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_captured_steps_are_as_exact_as_torch(qk_norm: bool) -> None:
    model, rng, steps = spec(qk_norm), random.Random(8), 6
    needs = weight_needs(model, "hf")
    params = load_params(needs, DummyCheckpoint(needs, "F64", 0), torch.bfloat16, torch.device("cpu"))
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    tokens, got = on_cuda(model, params, prompts, steps)
    texts = [prompt + kept[:-1] for prompt, kept in zip(prompts, tokens, strict=True)]
    exact = on_cpu(model, {name: weight.double() for name, weight in params.items()}, texts)
    eager = on_cpu(model, params, texts)

    def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((found.double() - wanted).norm() / wanted.norm())

    errors = []
    for step in range(steps + 1):
        places = [len(prompt) - 1 + step for prompt in prompts]
        want, plain = (torch.stack([x[p] for x, p in zip(xs, places, strict=True)]) for xs in (exact, eager))
        errors.append((off(got[step], want), off(plain, want)))
    ours, theirs = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    print(f"error of captured steps {ours:.2e}, of torch {theirs:.2e}")
    assert ours <= 2e-2 and ours <= 1.2 * theirs
