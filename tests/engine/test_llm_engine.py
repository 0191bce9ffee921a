"""The spellings of old scripts: LLMEngine with add_request and step, EngineArgs, block manager, AsyncLLMEngine."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from octavo import LLM, AsyncEngineArgs, EngineArgs, LLMEngine, SamplingParams
from octavo.config import engine_config
from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = ["The capital of France is", "Water boils at", "The three primary colours are"]


@pytest.fixture(scope="module")
def engine(smollm2_gguf: Path) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(dtype="float32", max_model_len=256, num_gpu_blocks_override=64))


def test_requests_come_and_go_between_steps(engine: LLMEngine) -> None:
    """Results grow step by step, several requests at a time, the same as `LLM.generate` gives."""
    texts: dict[str, list[str]] = {}
    left = dict(enumerate(PROMPTS))
    while left or engine.has_unfinished_requests():
        if left:
            index = min(left)
            engine.add_request(f"request-{index}", left.pop(index), GREEDY)
        for output in engine.step():
            assert output.prompt == PROMPTS[int(output.request_id[-1])]
            texts.setdefault(output.request_id, []).append(output.outputs[0].text)
            assert output.finished == (len(output.outputs[0].token_ids) == 8)
    assert engine.get_num_unfinished_requests() == 0 and engine.step() == []
    expected = engine._llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for index, output in enumerate(expected):
        grown = texts[f"request-{index}"]
        assert grown[-1] == output.outputs[0].text and len(grown) == 8
        assert all(after.startswith(before) for before, after in zip(grown, grown[1:], strict=False))


def test_ids_are_the_callers_and_unique(engine: LLMEngine) -> None:
    """CASE B-27 for the Python interface: a second request with a live id is refused, the first goes on."""
    engine.add_request("same", PROMPTS[0], GREEDY)
    with pytest.raises(RequestError, match="same"):
        engine.add_request("same", PROMPTS[1], GREEDY)
    engine.add_request("other", PROMPTS[1], GREEDY)
    engine.step()
    engine.abort_request(["other", "unknown"])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"same"} and outputs[-1].finished
    engine.add_request("same", PROMPTS[1], GREEDY)
    engine.abort_request("same")
    assert engine.kv_state()["free_blocks"] == 64


def test_what_is_refused_at_once(engine: LLMEngine) -> None:
    with pytest.raises(RequestError):
        engine.add_request("x", "", GREEDY)
    assert not engine.has_unfinished_requests()


def test_block_manager_of_old_scripts(engine: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        manager = engine.llm_engine.scheduler.block_manager
    assert "kv_state" in caplog.text
    free = manager.get_num_free_gpu_blocks()
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.step()
    assert manager.get_num_free_gpu_blocks() == free - 1 and manager.num_total_gpu_blocks == 64
    assert engine.scheduler.get_num_unfinished_seq_groups() == 1
    assert manager.kv_state() == engine.kv_state()
    engine.abort_request("a")
    assert manager.get_num_free_cpu_blocks() == 0


def test_others_may_drive_the_engine_meanwhile(engine: LLMEngine) -> None:
    llm: LLM = engine._llm
    engine.add_request("mine", PROMPTS[0], GREEDY)
    llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    (output,) = engine.step()
    assert output.finished and not engine.has_unfinished_requests()
    assert llm.llm_engine.kv_state()["total_blocks"] == 64


def test_places_of_the_names() -> None:
    from octavo.engine import arg_utils, llm_engine

    assert arg_utils.EngineArgs is llm_engine.EngineArgs is EngineArgs
    assert llm_engine.LLMEngine is LLMEngine


@pytest.mark.parametrize(
    ("wish", "tokens"), [("16MB", 128), ("1 MB", 32), ("400KiB", 16), ("1KB", 8), ("1gb", 128), (32, 32)]
)
def test_block_sizes_in_bytes(wish: int | str, tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    """The largest block that is not larger: a token of this model takes 23,040 bytes in bfloat16."""
    with caplog.at_level(logging.WARNING):
        options = {"num_gpu_blocks_override": 20, "load_format": "dummy", "dtype": "bfloat16"}
        llm = LLM(block_size=wish, max_model_len=128, **options)
    assert llm.engine.facts.block_size == tokens
    assert ("counted in tokens" in caplog.text) == isinstance(wish, str)


@pytest.mark.parametrize("wish", ["16", "MB", "-1MB", "16 tokens", 15, True, None])
def test_block_sizes_that_are_none(wish: object) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        LLM(block_size=wish, max_model_len=128, num_gpu_blocks_override=20, load_format="dummy")


def test_options_of_old_guides_are_accepted_with_a_line() -> None:
    _, notices = engine_config(
        continuous_batching=True, use_v2_block_manager=True, chunk_size=32, streaming=True, trust_remote_code=True
    )
    assert len(notices) == 5 and all(": " in notice for notice in notices)


def test_the_code_of_a_guide(smollm2_gguf: Path) -> None:
    """A typical page, with the import line changed."""
    from octavo import LLM, SamplingParams

    prompts = ["Hello, my name is", "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16)
    llm = LLM(model=str(smollm2_gguf), dtype="half", block_size=16, max_num_seqs=256, enforce_eager=True)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        assert output.prompt in prompts and output.outputs[0].text


def test_async_engine(smollm2_gguf: Path) -> None:
    async def body() -> None:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(load_format="fake", max_model_len=512))
        try:
            outputs = [output async for output in engine.generate("Hello", GREEDY, "a")]
            assert outputs[-1].finished and outputs[-1].request_id == "a"
            long = SamplingParams(max_tokens=400, ignore_eos=True)
            reasons = []
            async for output in engine.generate("Hello", long, "b"):
                with pytest.raises(RequestError, match="'b'"):
                    await anext(engine.generate("x", GREEDY, "b"))
                reasons.append(output.outputs[0].finish_reason)
                await engine.abort("b")
                await engine.abort("unknown")
            assert reasons[-1] == "abort"
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(body(), 60))
