"""Deadlines and queue caps inside the engine, the times and counts of a result, and the text view of the cache."""

from __future__ import annotations

import asyncio
import math
import time

import msgspec
import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.build import Engine
from octavo.engine.client import build_request
from octavo.engine.fake import fake_engine
from octavo.engine.inspect import kv_state
from octavo.engine.kv_text import kv_text
from octavo.errors import QueueFull, RequestError
from octavo.scheduler.records import REASONS, TokenBatch
from tests.engine.tiny import TinyEngine, tiny_decoder

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


class Clocked:
    """A fake engine with a clock of its own: a step takes a second."""

    def __init__(self, depth: int = 0, blocks: int = 400, **options: int) -> None:
        scheduling = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, depth=depth, **options)
        config = EngineConfig(
            ModelConfig(load_format="fake", max_model_len=512),
            CacheConfig(num_gpu_blocks_override=blocks),
            scheduling,
        )
        self.engine: Engine = fake_engine(config, ())
        self.now = 100.0
        self.engine.loop.clock = lambda: self.now
        self.tokens: dict[int, int] = {}
        self.ends: dict[int, str] = {}
        self.reports = {}

    def submit(self, number: int, ids: list[int], params: SamplingParams = LONG) -> None:
        self.engine.loop.submit(build_request(number, ids, params, self.engine.limits))

    def step(self) -> None:
        for batch in self.engine.loop.step():
            for number in batch.request_id.tolist():
                self.tokens[number] = self.tokens.get(number, 0) + 1
            for end in batch.ended:
                assert end.request_id not in self.ends
                self.ends[end.request_id] = REASONS[end.reason]
                self.reports[end.request_id] = end
        self.now += 1.0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_deadline_ends_what_runs_and_what_waits(depth: int) -> None:
    """Both in the step after it has passed; who has no deadline goes on, and no block or row is left."""
    clocked = Clocked(depth)
    late = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, timeout_s=10.5)
    for number in range(5):  # two run, three wait
        clocked.submit(number, [70 + number] * 20, late if number % 2 == 0 else LONG)
    for _ in range(11):
        clocked.step()
    assert not clocked.ends and clocked.tokens[0] > 5
    clocked.step()
    assert clocked.ends == {0: "timeout", 2: "timeout", 4: "timeout"}
    assert clocked.tokens[0] < 13 and 2 not in clocked.tokens and 4 not in clocked.tokens
    while clocked.engine.scheduler.has_work():
        clocked.step()
    assert clocked.ends[1] == clocked.ends[3] == "length" and clocked.tokens[3] == 200
    pool = clocked.engine.scheduler.state.pool
    assert pool.free == pool.usable and not clocked.engine.scheduler.state.requests


def test_deadlines_of_requests_that_have_ended_are_forgotten() -> None:
    clocked = Clocked()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, timeout_s=86_400)
    for number in range(1000):
        clocked.submit(number, [70], params)
        clocked.step()
    assert len(clocked.engine.loop._deadlines) < 100


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1", True, 1e9])
def test_a_timeout_that_is_none(value: object) -> None:
    with pytest.raises(RequestError, match="timeout_s"):
        SamplingParams(timeout_s=value)  # type: ignore[arg-type]


def test_the_queue_is_capped_in_requests() -> None:
    """As many as run at a time, and so many more; a place is free again when somebody ends."""
    clocked = Clocked(max_num_queued_reqs=3)
    for number in range(5):
        clocked.submit(number, [70])
    with pytest.raises(QueueFull, match="5 sequences run or wait.*3 may wait.*max-num-queued-reqs"):
        clocked.submit(5, [70])
    clocked.engine.scheduler.abort(0)
    clocked.submit(5, [70])
    with pytest.raises(QueueFull):
        clocked.submit(6, [70])


def test_the_queue_is_capped_in_tokens() -> None:
    """Tokens of those that wait; one that is alone is taken whatever its size."""
    clocked = Clocked(max_num_queued_tokens=100)
    clocked.submit(0, [70] * 150)
    with pytest.raises(QueueFull, match="150 prompt tokens wait.*100 may wait"):
        clocked.submit(1, [70])
    for _ in range(4):
        clocked.step()
    for number in (1, 2, 3):
        clocked.submit(number, [70] * 40)
        clocked.step()
    assert set(clocked.tokens) == {0, 1}  # two run, 80 tokens wait
    clocked.submit(4, [70] * 20)
    with pytest.raises(QueueFull):
        clocked.submit(5, [70])


def test_ends_say_when_it_began_and_what_coming_back_took() -> None:
    """A pool for little more than one of the two: someone gives way, and the view says who, to whom and why."""
    clocked = Clocked(blocks=32)
    for number in range(2):
        clocked.submit(number, [80 + number] * 200)
    while clocked.engine.scheduler.stats.preemptions == 0:
        clocked.step()
        text = kv_text(kv_state(clocked.engine.scheduler.state))
    assert "last preemption" in text and "1.0 gave way" in text and "to request 0: no KV block was free" in text
    while clocked.engine.scheduler.has_work():
        clocked.step()
    first, second = clocked.reports[0], clocked.reports[1]
    assert first.scheduled_us == 100_000_000 < second.scheduled_us < 110_000_000
    assert first.preemptions == first.recomputed_tokens == 0
    stats = clocked.engine.scheduler.stats
    assert second.preemptions == stats.preemptions and second.recomputed_tokens == stats.recomputed_tokens > 0


def test_the_text_view_names_sharers_and_waste() -> None:
    clocked = Clocked()
    clocked.submit(1, [70] * 36, SamplingParams(n=2, temperature=0, max_tokens=50, ignore_eos=True))
    clocked.submit(2, [71] * 10)
    for _ in range(3):
        clocked.step()
    state = kv_state(clocked.engine.scheduler.state)
    lines = kv_text(state).splitlines()
    assert f"{state['used_blocks']} of 400 blocks of 16 tokens are held" in lines[0]
    assert f"{state['live_tokens']} tokens and {state['waste_tokens']} empty places" in lines[1]
    first = next(line for line in lines if line.startswith("1.0: decode"))
    assert "shares 2 with 1.1" in first and "places empty" in first
    assert next(line for line in lines if line.startswith("1.1: waiting"))
    assert lines[-1] == "nobody had to give way so far"


@pytest.mark.parametrize("swap_blocks", [0, 40])
def test_the_view_and_the_ends_tell_swapping_from_computing_again(swap_blocks: int) -> None:
    engine = TinyEngine(tiny_decoder(), blocks=24, max_len=384, budget=64, swap_blocks=swap_blocks, cache=False)
    seen = ""
    ends = []
    step = engine.loop.step

    def watched() -> list[TokenBatch]:
        batches = step()
        ends.extend(end for batch in batches for end in batch.ended)
        return batches

    engine.loop.step = watched  # type: ignore[method-assign]
    for number in range(2):
        engine.submit(number, [10 + number] * 150, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    while engine.scheduler.has_work():
        engine.step()
        state = kv_state(engine.scheduler.state)
        msgspec.json.encode(state)  # plain values, whatever is where
        text = kv_text(state)
        seen = text if not seen and "gave way 1 times" in text else seen
    assert ("blocks on the host" in seen) == ("of 40 host blocks are held" in seen) == bool(swap_blocks)
    assert max(end.preemptions for end in ends) > 0
    assert (max(end.swapped_tokens for end in ends) > 0) == bool(swap_blocks)
    assert (max(end.recomputed_tokens for end in ends) > 0) == (not swap_blocks)


def test_llm_results_carry_their_times() -> None:
    """vLLM's names; the same when a stop string ended it, which the engine learns last."""
    llm = LLM(max_model_len=256, num_gpu_blocks_override=40, max_num_queued_reqs=70)
    begin = time.time()
    prompt = "The capital of France is Paris, and the capital of Italy is Rome, and the capital of Spain is"
    for params in (SamplingParams(temperature=0, max_tokens=8), SamplingParams(temperature=0, stop=[" Mad"])):
        (output,) = llm.generate(prompt, params)
        found = output.metrics
        assert found is not None and found.finished_time is not None
        assert begin - 1 < found.arrival_time <= found.first_scheduled_time <= found.first_token_time
        assert found.first_token_time <= found.last_token_time <= found.finished_time < time.time() + 1
        whole = found.time_in_queue + found.prefill_time + found.decode_time
        assert whole == pytest.approx(found.last_token_time - found.arrival_time)
        assert found.preemptions == found.recomputed_tokens == found.swapped_tokens == 0
        assert found.num_generation_tokens == len(output.outputs[0].token_ids)
        assert found.first_token_latency == found.first_token_ts - found.queued_ts > 0
        assert found.scheduled_ts == found.first_scheduled_time and found.last_token_ts == found.last_token_time
    assert found.cached_tokens == output.num_cached_tokens == 16  # the second one found the first one's block
    assert output.outputs[0].finish_reason == "stop"
    (late,) = llm.generate("Once", SamplingParams(max_tokens=250, ignore_eos=True, timeout_s=0.02))
    assert late.outputs[0].finish_reason == "timeout" and len(late.outputs[0].token_ids) < 250
    assert llm.kv_state()["used_blocks"] == 0 and "0 of 40 blocks" in llm.kv_text()
    with pytest.raises(QueueFull, match="Prompt 134: "):  # 64 run
        llm.generate(["x"] * 200, SamplingParams(max_tokens=1))
    assert llm.generate("Hello", SamplingParams(max_tokens=1))[0].finished


def test_async_llm_deadline_caps_and_times() -> None:
    async def use() -> None:
        llm = await AsyncLLM.start(load_format="fake:20", max_model_len=512, max_num_seqs=1, max_num_queued_reqs=1)
        try:
            late = SamplingParams(max_tokens=400, ignore_eos=True, timeout_s=0.3)
            first = llm.submit([70] * 20, late)
            second = llm.submit([71] * 20, SamplingParams(max_tokens=400, ignore_eos=True, timeout_s=0.2))
            third = llm.submit([72] * 20, LONG)
            while not (first.finished and second.finished and third.finished):
                await asyncio.sleep(0.01)
            assert isinstance(third.failure, QueueFull)
            output = first.text.output
            assert output.outputs[0].finish_reason == "timeout" and 0 < len(output.outputs[0].token_ids) < 30
            assert second.text.output.outputs[0].finish_reason == "timeout"
            assert second.text.metrics.first_scheduled_time is None and second.text.metrics.time_in_queue > 0.15
            found = first.text.metrics
            assert found.arrival_time <= found.first_scheduled_time < found.first_token_time
            assert "0 of" in await llm.kv_text()
        finally:
            await llm.close()

    asyncio.run(use())


def test_who_decodes_does_not_wait_for_long_prompts() -> None:
    """On the CPU a step feeds few prompt tokens while rows decode, and as many as it takes when none does."""
    clocked = Clocked()
    stats = clocked.engine.scheduler.stats
    clocked.submit(0, [70] * 128)
    fed = []
    for step in range(12):
        before = stats.prompt_tokens_computed
        if step == 2:
            clocked.submit(1, [71] * 200)
        clocked.step()
        fed.append(stats.prompt_tokens_computed - before)
    assert fed == [64, 64, 32, 32, 32, 32, 32, 32, 8, 0, 0, 0]
    assert clocked.tokens[0] == 11 and clocked.tokens[1] == 4
