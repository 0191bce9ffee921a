"""Wishes become numbers, or a refusal that names the number and the way out."""

from __future__ import annotations

import pytest

from octavo.config import GIB, Hardware, ModelFacts, engine_config, resolve, swap_cost
from octavo.errors import ConfigError

MODEL = ModelFacts(max_positions=8192, kv_bytes_per_token=23040, dtype="bfloat16", parameters=135_000_000)
CPU = Hardware("cpu", 16 * GIB)


def facts(**options):
    config, _ = engine_config(**options)
    return resolve(config, CPU, MODEL)


def test_defaults_on_a_cpu():
    made = facts()
    assert (made.block_size, made.max_num_seqs, made.depth, made.max_model_len) == (16, 64, 0, 8192)
    assert made.blocks * made.kv_bytes_per_block <= 4 * GIB
    assert made.max_num_batched_tokens >= made.max_num_seqs
    assert "8192" in made.line()


def test_the_longest_sequence_shrinks_to_what_fits():
    assert facts(num_gpu_blocks_override=100).max_model_len == 1600
    assert facts(kv_cache_memory_bytes=23040 * 16 * 101).blocks == 101


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 24}, "block_size is 24"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_model_len": 9000}, "9000.*8192"),
        ({"max_model_len": 8000, "num_gpu_blocks_override": 100}, "8000.*500 KV blocks.*100"),
        ({"kv_cache_memory_bytes": 1000}, "at least 2"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"depth": 3}, "depth is 3"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"max_num_batched_tokens": "many"}, "many"),
        ({"swap_space": -1.0}, "swap_space is -1"),
    ],
    ids=str,
)
def test_refusals_name_the_number(options, words):
    with pytest.raises(ConfigError, match=words):
        facts(**options)


def test_swap_space_becomes_blocks_where_it_can_help():
    assert facts().swap_blocks == 0
    made = facts(swap_space=1.0)
    assert made.swap_blocks == GIB // made.kv_bytes_per_block and f"{made.swap_blocks} blocks of host" in made.line()
    config, _ = engine_config(swap_space=1.0)
    tiny = ModelFacts(8192, 23040, "bfloat16", parameters=100_000)
    assert resolve(config, CPU, tiny).swap_blocks == 0  # computing a block again is faster than moving it


def test_the_cost_of_a_block_follows_the_model():
    """16 tokens of Llama-3.1-8B and of Qwen3-0.6B on a data-centre card; SmolLM2-135M on a processor."""
    assert swap_cost("cuda", 16 * 131072, 8_030_000_000) < 3
    assert swap_cost("cuda", 16 * 114688, 600_000_000) > 16
    assert swap_cost("cpu", 16 * 23040, 135_000_000) < 1


def test_unknown_options_are_refused_and_old_spellings_explained():
    with pytest.raises(ConfigError, match="blocksize"):
        engine_config(blocksize=16)
    _, notices = engine_config(continuous_batching=False, use_v2_block_manager=True)
    assert len(notices) == 2
