"""Which ids end a generation: config.json, generation_config.json, GGUF metadata (CASE B-12)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from octavo.errors import ModelError
from octavo.model.gguf_keys import spec_from_gguf
from tests.model.driver import make_rival, opened, save_folder
from tests.model.test_gguf_families import metadata_of
from tests.model.test_transformers import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(make_rival(LlamaConfig(**TINY)), tmp_path_factory.mktemp("ends"))


def test_b12_generation_config_adds_its_ids(folder: Path) -> None:
    assert opened(folder).eos_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 9]}))
    assert opened(folder).eos_ids == (2, 7, 9)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert opened(folder).eos_ids == (2, 5)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    assert opened(folder).eos_ids == (2,)


@pytest.mark.parametrize("ids", [97, [2, -1], "2", [[2]]])
def test_hostile_generation_config(folder: Path, ids: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ModelError, match="eos_token_id"):
        opened(folder)


def test_end_of_turn_that_a_gguf_file_does_not_name() -> None:
    base = {"general.architecture": "llama"} | metadata_of("llama", LlamaConfig(**TINY))
    tokens = ["a", "b", "</s>", "<end_of_turn>", "<|im_end|>"]
    vocabulary = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1, 1, 3, 3, 1], np.int32),  # the last one is an ordinary token
    }
    assert spec_from_gguf(base | vocabulary, []).eos_ids == (2, 3)
    assert spec_from_gguf(base | vocabulary | {"tokenizer.ggml.eot_token_id": 4}, []).eos_ids == (2, 4)
