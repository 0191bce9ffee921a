"""The CUDA runner without a CUDA device: same tokens as the torch runner, kernels interpreted, no graphs."""

from __future__ import annotations

import random

import torch

from octavo.attention.triton import TritonAttention
from octavo.engine.loop import EngineLoop
from octavo.runner.cuda_runner import CudaRunner
from octavo.types import SamplingParams
from tests.engine.tiny import VOCAB, TinyEngine, tiny_decoder


def on_kernels(engine: TinyEngine, budget: int, seqs: int, max_len: int, fp8: bool = False) -> TinyEngine:
    """The same engine with its runner exchanged; `fp8`: and its KV cache."""
    decoder = tiny_decoder(torch.float32)
    if fp8:
        decoder.kv_scales_L2K = torch.full((len(decoder.spec.layers), 2, decoder.spec.kv_heads), 0.02)
    decoder.backends = {0: TritonAttention(decoder.backend._shape, torch.float32)}  # type: ignore[attr-defined]
    runner = CudaRunner(
        decoder, blocks=engine.runner.pool.num_blocks, block_size=engine.runner.block_size, rows=seqs,
        max_len=max_len, max_tokens=budget, eager=True, swap_blocks=engine.runner.swap_blocks,
    )  # fmt: skip
    engine.loop = EngineLoop(engine.scheduler, runner, engine.loop.depth)
    return engine


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    head = [rng.randrange(3, VOCAB) for _ in range(32)]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 4},
        {"temperature": 0.8, "seed": 5, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.0, "seed": 6, "n": 2},
        {"temperature": 0.0, "logprobs": 2, "min_tokens": 3},
        {"temperature": 0.0, "prompt_logprobs": 1, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    ]
    out = []
    for i, kind in enumerate(kinds):
        ids = (head if i % 2 else []) + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))]
        out.append((ids, SamplingParams(max_tokens=rng.randrange(3, 7), **kind)))
    return out


def both(**size: int) -> list[TinyEngine]:
    """The same engine on the torch runner and on the kernels."""
    engines = [TinyEngine(tiny_decoder(torch.float32), blocks=40, block_size=8, depth=1, **size) for _ in range(2)]
    return [engines[0], on_kernels(engines[1], **size)]


def test_same_tokens_as_the_torch_runner() -> None:
    size = {"budget": 24, "seqs": 6, "max_len": 96}
    engines = both(**size)
    for engine in engines:
        for i, (ids, params) in enumerate(requests()):
            engine.submit(i, ids, params)
        engine.run()
    assert engines[1].tokens == engines[0].tokens
    assert engines[1].reasons == engines[0].reasons
    assert sorted(engines[1].prompts) == sorted(engines[0].prompts) == [5]
    for position, entry in engines[0].prompts[5].items():
        other = engines[1].prompts[5][position]
        assert abs(other.chosen - entry.chosen) < 1e-4 and other.rank == entry.rank


def test_prompts_that_are_cached_as_a_whole_decode_at_once() -> None:
    """Their last token comes from the host, and is written into a copy of its block."""
    size = {"budget": 24, "seqs": 9, "max_len": 40}
    engines = both(**size)
    for engine in engines:
        engine.submit(0, [5, 7, 9, 11] * 6, SamplingParams(temperature=0.0, max_tokens=1))
        engine.run()
        engine.loop.runner._mixed_graph = None  # type: ignore[attr-defined]  # nobody calls it
        for i in range(9):
            params = SamplingParams(temperature=0.9, seed=i, max_tokens=3, logprobs=2 if i == 8 else None)
            engine.submit(1 + i, [5, 7, 9, 11] * (6 if i % 2 else 4), params)
        engine.run()
        assert engine.scheduler.stats.block_copies == 9
    assert engines[1].tokens == engines[0].tokens


def test_sequences_that_gave_way_come_back_from_the_host() -> None:
    size = {"budget": 16, "seqs": 2, "max_len": 24}
    engines = []
    for exchanged in (False, True):
        blocks = 5 if exchanged else 60
        engine = TinyEngine(tiny_decoder(torch.float32), blocks=blocks, block_size=8, depth=1, swap_blocks=9, **size)
        if exchanged:
            engine = on_kernels(engine, **size)
        for i in range(2):
            params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
            engine.submit(i, [3 + i, 7, 9 + 2 * i] * 4, params)
        engine.run()
        engines.append(engine)
    assert engines[1].scheduler.stats.swapped_in_tokens > 0
    assert engines[1].tokens == engines[0].tokens


def test_with_the_kv_cache_in_fp8() -> None:
    """Not the tokens of a plain cache, since the interpreter rounds wrongly, but every request comes to its end."""
    size = {"budget": 24, "seqs": 6, "max_len": 96}
    engine = on_kernels(
        TinyEngine(tiny_decoder(torch.float32), blocks=40, block_size=8, depth=1, **size), **size, fp8=True
    )
    for i, (ids, params) in enumerate(requests()):
        engine.submit(i, ids, params)
    engine.run()
    assert engine.loop.runner.pool.data.dtype == torch.float8_e4m3fn  # type: ignore[attr-defined]
    assert {request for request, _ in engine.tokens} == set(range(len(requests())))
    assert set(engine.reasons.values()) <= {"stop", "length"}
