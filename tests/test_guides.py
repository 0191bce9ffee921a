"""The code of old guides runs with the import line changed, or says in one line what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

import octavo
from octavo import LLM, SamplingParams
from octavo.config import NOTICES, NOTICES_WITH_VALUE, engine_config
from octavo.errors import ConfigError, RequestError


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> LLM:
    """As a guide starts it, with every option that it names and that runs without a GPU."""
    return LLM(
        model=str(smollm2_gguf),
        tensor_parallel_size=1,
        gpu_memory_utilization=0.85,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=512,
        enable_prefix_caching=True,
        use_v2_block_manager=True,
        continuous_batching=True,
        streaming=True,
        chunk_size=32,
        tokenizer_mode="auto",
        trust_remote_code=True,
        scheduling_policy="priority",
        dtype="half",
    )


def test_one_prompt_and_many(llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=8, ignore_eos=True, priority=10)
    (output,) = llm.generate("Explain PagedAttention in one sentence.", params)
    assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].finish_reason == "length"
    outputs = llm.generate(["Hello, my name is", "The future of AI is"], params)
    assert [bool(o.outputs[0].text) for o in outputs] == [True, True]


def test_children_share_the_prompt(llm: LLM) -> None:
    (output,) = llm.generate(
        ["Write a line about the sea."], SamplingParams(n=4, temperature=0.8, seed=1, max_tokens=8)
    )
    assert len(output.outputs) == 4 and len({tuple(o.token_ids) for o in output.outputs}) > 1


def test_priorities_beside_the_prompts(llm: LLM) -> None:
    """vLLM's own spelling: one number a prompt, over that of the parameters."""
    greedy = SamplingParams(temperature=0, max_tokens=4)
    both = llm.generate(["Hello", "Hello"], greedy, priority=[0, 5])
    assert both[0].outputs[0].token_ids == both[1].outputs[0].token_ids
    with pytest.raises(RequestError, match="2 prompts and 1 priority"):
        llm.generate(["Hello", "Hello"], greedy, priority=[1])


def test_tokenizer_and_chat(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Hello")
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4))
    assert ids and output.outputs[0].text


def test_what_never_existed_says_so() -> None:
    with pytest.raises(ImportError, match="octavo doctor"):
        from octavo import _C  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'Agent'"):
        octavo.Agent  # noqa: B018


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        LLM(tensor_parallel_size=2)


def test_every_notice_is_one_line() -> None:
    _, notices = engine_config(**dict.fromkeys(NOTICES, True))
    assert len(notices) == len(NOTICES) and set(NOTICES_WITH_VALUE) <= set(NOTICES)
    assert all("\n" not in notice for notice in notices)
