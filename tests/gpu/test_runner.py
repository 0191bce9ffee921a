"""The CUDA runner with captured graphs against the torch runner: the same ids, whatever runs together."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.engine.loop import EngineLoop
from octavo.model.decoder import Decoder
from octavo.model.spec import weight_needs
from octavo.runner.build import build_decoder
from octavo.types import SamplingParams
from octavo.weights.load import DummyCheckpoint
from tests.engine.test_identity import mixed_requests
from tests.engine.tiny import VOCAB, TinyEngine, tiny_decoder

pytestmark = pytest.mark.gpu


def on_device(dtype: torch.dtype) -> Decoder:
    spec = tiny_decoder().spec
    needs = weight_needs(spec, "hf")
    return build_decoder(spec, needs, DummyCheckpoint(needs, "F64", 0), dtype, torch.device("cuda"))


def cuda_engine(
    decoder: Decoder, *, eager: bool = False, seqs: int = 64, max_len: int = 1024, **options
) -> TinyEngine:
    """An engine whose runner is the CUDA one, graphs captured unless `eager`."""
    from octavo.runner.cuda_runner import CudaRunner

    engine = TinyEngine(tiny_decoder(), seqs=seqs, max_len=max_len, **options)
    runner = CudaRunner(
        decoder, blocks=engine.runner.pool.num_blocks, block_size=engine.runner.block_size, rows=seqs,
        max_len=max_len, max_tokens=options.get("budget", 2048), eager=eager, swap_blocks=engine.runner.swap_blocks,
    )  # fmt: skip
    if not eager:
        runner.capture()
    engine.loop = EngineLoop(engine.scheduler, runner, options.get("depth", 0))
    return engine


def outputs(engine: TinyEngine) -> dict[tuple[int, int], list[int]]:
    for i, (ids, params) in enumerate(mixed_requests()):
        engine.submit(i, ids, params)
    engine.run()
    return engine.tokens


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], list[int]]:
    """On the CPU in float64."""
    return outputs(TinyEngine(tiny_decoder()))


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 1},
        {"depth": 2, "budget": 64},
        {"blocks": 27, "block_size": 8, "budget": 64, "max_len": 216},
        {"blocks": 27, "block_size": 8, "budget": 64, "max_len": 216, "depth": 1, "swap_blocks": 100},
    ],
)
def test_every_feature_gives_the_ids_of_the_cpu(expected, eager: bool, options: dict[str, int]) -> None:
    engine = cuda_engine(on_device(torch.float32), eager=eager, **options)
    got = outputs(engine)
    different = [key for key in expected if got[key] != expected[key]]
    assert not different, f"{len(different)} of {len(expected)} differ"


def test_shared_prefix_gives_the_same_ids() -> None:
    rng = random.Random(1)
    head = [rng.randrange(3, VOCAB) for _ in range(900)]
    requests = [head + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))] for _ in range(100)]
    engines = []
    for engine in (
        TinyEngine(tiny_decoder(), blocks=1500, seqs=100),
        cuda_engine(on_device(torch.float32), blocks=1500, seqs=100, depth=1),
    ):
        for i, ids in enumerate(requests):
            engine.submit(i, ids, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        engine.run()
        engines.append(engine)
    graphs = engines[1].loop.runner.graphs
    assert any(key[0] == "decode" and key[2] for key in graphs._graphs), "no step read the prefix once"
    assert engines[1].tokens == engines[0].tokens


def test_prompts_that_are_cached_as_a_whole_decode_at_once() -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(64)] for _ in range(3)]
    engines = []
    for engine in (TinyEngine(tiny_decoder()), cuda_engine(on_device(torch.float32), eager=True, depth=1)):
        engines.append(engine)
        for i in range(30):
            engine.submit(i, prompts[i % 3], SamplingParams(temperature=0.9, seed=i, max_tokens=5, ignore_eos=True))
            if i == 2:
                engine.run()
        fed = engine.scheduler.stats.prompt_tokens_computed
        engine.loop.runner._mixed_graph = None  # not needed: calling it fails
        engine.run()
        assert engine.scheduler.stats.prompt_tokens_computed - fed == 27
    assert engines[1].tokens == engines[0].tokens


@pytest.mark.parametrize("eager", [True, False])
def test_every_kernel_is_loaded_before_the_first_step(eager: bool) -> None:
    from triton import knobs

    engine = cuda_engine(on_device(torch.bfloat16), depth=1, eager=eager)
    engine.loop.runner.load_kernels()
    late: list[str] = []
    knobs.runtime.jit_cache_hook = lambda *, repr, **_: late.append(repr)
    try:
        engine.loop.runner.try_largest()
        outputs(engine)
    finally:
        knobs.runtime.jit_cache_hook = None
    assert not late


def test_steady_steps_never_wait() -> None:
    engine = cuda_engine(on_device(torch.float32), depth=1, seqs=32)
    for i in range(32):
        params = SamplingParams(temperature=0.7 * (i % 2), max_tokens=600, ignore_eos=True, seed=i)
        engine.submit(i, [3 + i] * 20, params)
    for _ in range(20):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(500):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.run()


def test_logits_that_are_not_finite_end_only_their_request() -> None:
    decoder = on_device(torch.float32)
    decoder.embed.weight_VI = decoder.embed.weight_VI.clone()  # the head keeps the sound one
    decoder.embed.weight_VI[77] = float("nan")
    engine = cuda_engine(decoder, depth=1, seqs=8)
    engine.submit(0, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    engine.submit(1, [5, 77, 7], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    engine.run()
    assert engine.reasons == {(0, 0): "length", (1, 0): "error"}
