"""The native engine on a real model: exact where it says so, close elsewhere, and the same under every schedule."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.model.gguf_keys import spec_from_gguf
from octavo.model.spec import weight_needs
from octavo.runner.native import held_bytes
from octavo.text.tokenizer import Tokenizer
from octavo.types import SamplingParams
from octavo.weights.gguf import GgufCheckpoint
from tests.runner.native import NativeEngine, RoundedCheckpoint, load_smollm2, log_probabilities

REFERENCE = json.loads((Path(__file__).parent.parent / "data" / "smollm2-greedy.json").read_text())["rows"]
TINY_MARGIN = 1e-3


@pytest.fixture(scope="module")
def exact(smollm2_gguf):
    """bfloat16 weights in float32 arithmetic, as the reference."""
    return load_smollm2(smollm2_gguf, rounded=True, dtype="float32")


@pytest.fixture(scope="module")
def stored(smollm2_gguf):
    """Weights as stored, 4 and 8 bits; bfloat16 KV."""
    return load_smollm2(smollm2_gguf)


@pytest.fixture(scope="module")
def text(smollm2_gguf) -> list[int]:
    """A text that does not change: the licence."""
    tokenizer = Tokenizer.from_gguf(GgufCheckpoint(smollm2_gguf).metadata)
    return tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text())


def perplexity(logprobs: np.ndarray, ids: list[int]) -> float:
    chosen = logprobs[np.arange(len(ids) - 1), ids[1:]]
    return float(np.exp(-chosen.mean()))


def test_greedy_ids_and_logprobs_equal_the_reference(exact):
    engine = NativeEngine(*exact)
    for i, row in enumerate(REFERENCE):
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=5)
        engine.submit(i, row["prompt_ids"], params)
    engine.run()
    for i, row in enumerate(REFERENCE):
        expected, got = row["fp32"]["ids"], engine.tokens[i, 0]
        first = next((at for at in range(64) if expected[at] != got[at]), None)
        assert first is None or row["fp32"]["margin"][first] < TINY_MARGIN, (i, first)
        for at, best in enumerate(row["fp32"]["top5_first8"][: first or 8]):
            found = engine.best[i, 0][at]
            assert [token for token, _ in best] == found.ids.tolist()
            assert [value for _, value in best] == pytest.approx(found.values.tolist(), abs=1e-3)


def test_perplexity_is_within_one_percent_of_float32(smollm2_gguf, stored, text):
    """8-bit activations on stored weights, KV in bfloat16 and in 8 bits, against dequantised float32."""
    ids = text[:600]
    _, wide = load_smollm2(smollm2_gguf, dtype="float32", blocks=64)
    wanted = log_probabilities(wide, ids)
    best = wanted.argmax(-1)
    base = perplexity(wanted, ids)
    for runner in (stored[1], load_smollm2(smollm2_gguf, kv="int8", blocks=64)[1]):
        got = log_probabilities(runner, ids)
        assert perplexity(got, ids) == pytest.approx(base, rel=0.01)
        assert (got.argmax(-1) == best).mean() > 0.95
        assert runner.engine.shared_segments > 0  # rows of one sequence share their blocks


def told(path: Path, dtype: str, rounded: bool = False) -> int:
    checkpoint = GgufCheckpoint(path)
    spec = spec_from_gguf(checkpoint.metadata, checkpoint.names())
    source = RoundedCheckpoint(checkpoint) if rounded else checkpoint
    return held_bytes(spec, weight_needs(spec, "gguf"), source, dtype, True)


def test_memory_is_told_before_loading(smollm2_gguf, stored, exact):
    assert stored[1].engine.weight_bytes == pytest.approx(told(smollm2_gguf, "bfloat16"), rel=0.01)
    assert exact[1].engine.weight_bytes == pytest.approx(told(smollm2_gguf, "float32", rounded=True), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("dtype,bound", [("bfloat16", 0.01), ("int8", 0.01), ("int4", 0.15)])
def test_plain_weights_in_fewer_bits(smollm2_gguf, exact, text, dtype, bound):
    ids = text[:400]
    _, runner = load_smollm2(smollm2_gguf, rounded=True, blocks=64, dtype=dtype)
    assert runner.engine.weight_bytes == pytest.approx(told(smollm2_gguf, dtype, rounded=True), rel=0.01)
    wanted = perplexity(log_probabilities(exact[1], ids), ids)
    assert perplexity(log_probabilities(runner, ids), ids) == pytest.approx(wanted, rel=bound)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy, seeded with every filter, n = 3, logprobs, min_tokens; prompts share beginnings."""
    rng = random.Random(11)
    heads = [row["prompt_ids"] * 2 for row in REFERENCE]
    out = []
    for i in range(40):
        ids = heads[i % 4][: rng.randrange(4, 60)] + [rng.randrange(100, 5000) for _ in range(i % 5)]
        common = {"max_tokens": rng.randrange(6, 30), "ignore_eos": bool(i % 2)}
        kinds = [
            {"temperature": 0, "logprobs": 2},
            {"temperature": 0.8, "seed": i, "top_p": 0.9, "top_k": 50},
            {"temperature": 1.0, "seed": i, "n": 3, "min_p": 0.02},
            {"temperature": 0, "n": 2},
            {"temperature": 1.0, "seed": i, "min_tokens": 4, "logprobs": 0},
        ]
        out.append((ids, SamplingParams(**kinds[i % 5], **common)))
    return out


def alone(spec, loaded, count) -> tuple[dict, dict]:
    """Tokens and logprobs of each request in an engine of its own."""
    tokens, logprobs = {}, {}
    for i, (ids, params) in enumerate(requests()[:count]):
        engine = NativeEngine(spec, loaded, blocks=64)
        engine.submit(i, ids, params)
        engine.run()
        tokens |= engine.tokens
        logprobs |= engine.logprobs
    return tokens, logprobs


def together(spec, loaded, count, **options) -> NativeEngine:
    engine = NativeEngine(spec, loaded, **options)
    for i, (ids, params) in enumerate(requests()[:count]):
        engine.submit(i, ids, params)
    engine.run()
    return engine


def test_no_torch_at_run_time():
    """From the import to the text, as `octavo generate` does it."""
    code = """if True:
        import sys
        from octavo import LLM, SamplingParams
        text = LLM().generate(["The sea is"], SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].text
        assert text, "no text"
        sys.exit(f"loaded: {found}" if (found := {"torch", "transformers"} & set(sys.modules)) else 0)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_neighbours_change_nothing(stored):
    """The same ids and logprobs, bit for bit, alone and together."""
    tokens, logprobs = alone(*stored, 10)
    engine = together(*stored, 10, budget=48)
    assert engine.tokens == tokens and engine.logprobs == logprobs


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        {"block_size": 8},
        {"block_size": 64},
        {"budget": 16},
        {"budget": 2048},
        {"cache": False},
        {"depth": 1},
        {"blocks": 24, "block_size": 8, "max_len": 144, "budget": 64, "depth": 2},
    ],
    ids=str,
)
def test_schedules_change_nothing(smollm2_gguf, stored, mode):
    """Any block size, budget, cache, depth, preemption: the same ids and logprobs, bit for bit."""
    tokens, logprobs = alone(*stored, 40)
    size = mode.get("block_size", 16)
    engine = together(*(stored if size == 16 else load_smollm2(smollm2_gguf, block_size=size)), 40, **mode)
    assert engine.tokens == tokens and engine.logprobs == logprobs
    if "blocks" in mode:
        assert engine.scheduler.stats.preemptions > 10
