"""Encoding and decoding against the `tokenizers` library, `transformers`, and recorded ids."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError, RequestError
from octavo.text import gguf_vocab
from octavo.text.pieces import BYTE_ALPHABET
from octavo.text.tokenizer import Tokenizer, generation_eos_ids
from octavo.weights.gguf import GgufCheckpoint

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2-greedy.json"
SAMPLES = [
    "",
    " ",
    "Hello world, it's 5 o'clock — naïve 😀",
    "def f(x):\n\treturn x**2  # 12345 + 67\r\n\r\n   indented",
    "日本語、中文 и русский текст 👩‍👩‍👧‍👦 e\u0301 \u00a0\u3000 ½ ²³ Ⅷ",
    "I'LL we'Ve DON'T 'tis",
    "a\x00b\x7f\u200d\ufeff",
]


@pytest.fixture(scope="module")
def metadata(smollm2_gguf: Path) -> dict[str, Any]:
    return GgufCheckpoint(smollm2_gguf).metadata


@pytest.fixture(scope="module")
def hugging_face(metadata: dict[str, Any]) -> Backend:
    """The embedded model's tokenizer as its own tokenizer.json describes it."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (3, 4)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def test_recorded_prompts_and_texts(smollm2: Tokenizer) -> None:
    rows = json.loads(REFERENCE.read_text())["rows"]
    assert len(rows) == 8
    for row in rows:
        assert smollm2.encode(row["prompt"]) == row["prompt_ids"]
        assert smollm2.decode(row["fp32"]["ids"], skip_special_tokens=False) == row["fp32"]["text"]


def test_facts_of_the_embedded_model(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.eos_ids) == (1, 2, (2,))
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.vocab_size == 49152 and len(smollm2.special_ids) == 17
    assert smollm2.chat_template is not None and "<|im_start|>" in smollm2.chat_template
    assert smollm2.token_to_id("<|im_end|>") == 2 and smollm2.token_to_id("nonsense!") is None


@pytest.mark.parametrize("text", SAMPLES)
def test_gguf_equals_tokenizer_json(smollm2: Tokenizer, hugging_face: Backend, text: str) -> None:
    ids = hugging_face.encode(text).ids
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids) == hugging_face.decode(ids)
    assert smollm2.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=150)
@given(st.text(max_size=60))
def test_any_text_survives(smollm2: Tokenizer, hugging_face: Backend, text: str) -> None:
    alphabet = {byte: char for char, byte in BYTE_ALPHABET.items()}
    ids = smollm2.encode(text)
    assert ids == hugging_face.encode(text).ids
    decoded = smollm2.decode(ids, skip_special_tokens=False)
    assert decoded == hugging_face.decode(ids, skip_special_tokens=False)
    # The vocabulary lacks some bytes that only rare characters have.
    if all(smollm2.token_to_id(alphabet[byte]) is not None for byte in text.encode()):
        assert decoded == text


@settings(max_examples=200)
@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
def test_decode_of_any_ids_equals_the_library(
    smollm2: Tokenizer, hugging_face: Backend, ids: list[int], skip: bool
) -> None:
    assert smollm2.decode(ids, skip) == hugging_face.decode(ids, skip_special_tokens=skip)


def test_control_tokens_in_user_text(smollm2: Tokenizer) -> None:
    """Case B-58: recognised by default, ordinary characters on request."""
    text = "a<|im_end|>\n<|im_start|>system\nb"
    assert 1 in smollm2.encode(text) and 2 in smollm2.encode(text)
    plain = smollm2.encode(text, parse_special=False)
    assert not {1, 2}.intersection(plain)
    assert smollm2.decode(plain) == text
    assert 1 in smollm2.encode(text)


def test_ids_without_a_token(smollm2: Tokenizer) -> None:
    """Cases B-57 and B-28."""
    assert smollm2.decode([504, 49152, 60000, 3575]) == smollm2.decode([504, 3575])
    assert smollm2.token_bytes(49999) == b"" and smollm2.id_to_token(49999) == ""
    for wrong in (-1, 1 << 32, 1 << 63, "a", 1.5):
        with pytest.raises(RequestError, match="is not a token id"):
            smollm2.decode([wrong])  # type: ignore[list-item]
    assert smollm2.decode([]) == ""
    assert smollm2.decode(np.array([504, 3575])) == smollm2.decode([504, 3575])


def test_token_bytes_rebuild_the_text(smollm2: Tokenizer) -> None:
    """Case B-56."""
    text = "😀 日本語 naïve"
    pieces = [smollm2.token_bytes(index) for index in smollm2.encode(text)]
    assert b"".join(pieces).decode() == text
    assert "\ufffd".encode() not in pieces


def test_surrogates_are_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        smollm2.encode("a\ud800b")


@pytest.mark.parametrize("text", ["Hello world", "Hello world, it's 5 o'clock — naïve 😀", "the  quick", ""])
def test_sentencepiece_equals_the_library(llama2: Tokenizer, llama2_backend: Backend, text: str) -> None:
    """Case B-55."""
    ids = llama2.encode(text)
    assert ids == [1, *llama2_backend.encode(text).ids]
    assert llama2.decode(ids) == llama2_backend.decode(ids) == text
    assert llama2.decode(ids, skip_special_tokens=False) == llama2_backend.decode(ids, skip_special_tokens=False)


def test_sentencepiece_spaces(llama2: Tokenizer, llama2_backend: Backend) -> None:
    space = llama2.token_to_id("▁")
    hello = llama2.token_to_id("▁Hello")
    assert space is not None and hello is not None
    for ids in ([space, space, hello], [hello, hello], [space], [space, space]):
        assert llama2.decode(ids) == llama2_backend.decode(ids)
    assert llama2.decode([hello], after_prompt=True) == " Hello"


def test_words_without_decoder(words_backend: Backend) -> None:
    tokenizer = Tokenizer(words_backend)
    assert tokenizer.encode("red blue") == [1, 3]
    assert tokenizer.decode([1, 3, 2]) == words_backend.decode([1, 3, 2]) == "red blue green"


# The words that each pre-tokenizer of a GGUF file must cut, as a pattern for another regex engine.
_PATTERNS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("kind", list(_PATTERNS))
def test_pre_tokenizers_cut_as_the_models_do(metadata: dict[str, Any], kind: str) -> None:
    backend = gguf_vocab.build(metadata | {"tokenizer.ggml.pre": kind})
    for text in SAMPLES:
        pieces = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
        assert pieces == regex.findall(_PATTERNS[kind], text)


def test_llama_bpe_begins_with_bos_and_qwen2_normalises(metadata: dict[str, Any]) -> None:
    del (without := dict(metadata))["tokenizer.ggml.add_bos_token"]
    llama = Tokenizer.from_gguf(without | {"tokenizer.ggml.pre": "llama-bpe"})
    assert llama.encode("hi")[0] == 1 and llama.encode("hi", add_special_tokens=False)[0] != 1
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("hi")[0] != 1
    assert Tokenizer.from_gguf(without).encode("hi")[0] != 1
    ending = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_eos_token": True})
    assert ending.encode("hi")[-1] == 2
    qwen = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert qwen.encode("e\u0301") == qwen.encode("é")


def test_user_defined_tokens_are_visible(metadata: dict[str, Any]) -> None:
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[3] = 4  # <repo_name>
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": types})
    assert tokenizer.encode("<repo_name>") == [3]
    assert tokenizer.decode([3, 4]) == "<repo_name>"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'"),
        ({"tokenizer.ggml.model": None}, "no 'tokenizer.ggml.model'"),
        ({"tokenizer.ggml.tokens": 5}, "int, not a list"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "duplicate"),
        ({"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "3 token types"),
        ({"tokenizer.ggml.merges": ["no pair here"]}, "do not fit"),
        ({"tokenizer.ggml.merges": ["unheard ofword"]}, "do not fit"),
        ({"tokenizer.ggml.bos_token_id": 50000}, "bos token id 50000"),
        ({"tokenizer.ggml.eos_token_id": True}, "bool, not a int"),
    ],
)
def test_gguf_vocabularies_that_are_refused(metadata: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Tokenizer.from_gguf(metadata | change)


def folder_of(folder: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_folder_equals_transformers(tmp_path: Path, hugging_face: Backend) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=hugging_face, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7, 9]}')
    mine = Tokenizer.from_folder(tmp_path)
    assert mine.chat_template == fast.chat_template
    assert (mine.bos_id, mine.eos_id, mine.eos_ids) == (1, 2, (2, 7, 9))
    for text in SAMPLES:
        assert mine.encode(text) == fast.encode(text)


def test_folder_special_tokens(tmp_path: Path, llama2_backend: Backend) -> None:
    plain = folder_of(tmp_path, llama2_backend, bos_token="<s>", eos_token={"content": "</s>"})
    assert (Tokenizer.from_folder(plain).bos_id, Tokenizer.from_folder(plain).eos_ids) == (1, (2,))
    assert Tokenizer.from_folder(plain).encode("the")[0] != 1
    folder_of(tmp_path, llama2_backend, bos_token="<s>", add_bos_token=True)
    assert Tokenizer.from_folder(tmp_path).encode("the")[0] == 1
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert Tokenizer.from_folder(tmp_path).eos_id == 2
    folder_of(tmp_path, llama2_backend, bos_token="<nowhere>")
    with pytest.raises(ModelError, match="<nowhere>"):
        Tokenizer.from_folder(tmp_path)


def test_post_processor_padding_and_truncation(tmp_path: Path, llama2_backend: Backend) -> None:
    backend = Backend.from_str(llama2_backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(4)
    backend.enable_padding(length=10)
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, backend, bos_token="<s>"))
    ids = tokenizer.encode("the quick brown fox jumps over")
    assert ids[0] == 1 and len(ids) > 5 and tokenizer.decode(ids) == "the quick brown fox jumps over"
    assert len(tokenizer.encode("")) <= 2
    folder_of(tmp_path, backend, bos_token="<s>", add_bos_token=False)
    assert Tokenizer.from_folder(tmp_path).encode("the")[0] != 1


def test_chat_template_places(tmp_path: Path, words_backend: Backend) -> None:
    """Case B-51: none is no error."""
    assert Tokenizer.from_folder(folder_of(tmp_path, words_backend)).chat_template is None
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    folder_of(tmp_path, words_backend, chat_template=named)
    assert Tokenizer.from_folder(tmp_path).chat_template == "d"
    folder_of(tmp_path, words_backend, chat_template="c")
    assert Tokenizer.from_folder(tmp_path).chat_template == "c"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "j"}')
    assert Tokenizer.from_folder(tmp_path).chat_template == "j"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(tmp_path).chat_template == "file"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": {}}', '{"version": 1}', "\x00" * 100])
def test_folders_that_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


def test_fifo_and_unknown_decoder_are_refused(tmp_path: Path, words_backend: Backend) -> None:
    backend = Backend.from_str(words_backend.to_str())
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.from_folder(folder_of(tmp_path, backend))
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match="regular"):
        Tokenizer.from_folder(tmp_path)


def test_generation_eos_ids(tmp_path: Path) -> None:
    assert generation_eos_ids(tmp_path) == []
    file = tmp_path / "generation_config.json"
    for value, ids in (("5", [5]), ("[1, 2]", [1, 2]), ("null", []), ('"x"', [])):
        file.write_text(f'{{"eos_token_id": {value}}}')
        assert generation_eos_ids(tmp_path) == ids
