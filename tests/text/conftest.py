"""Tokenizers for the tests of text: the embedded model's, and small ones of other families."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.text.tokenizer import Tokenizer
from octavo.weights.gguf import GgufCheckpoint


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GgufCheckpoint(smollm2_gguf).metadata)


@pytest.fixture(scope="session")
def llama2_backend() -> Backend:
    """SentencePiece style: U+2581 for spaces, byte tokens for what is not in the vocabulary."""
    words = "Hello world it s 5 o clock we say na ve the quick brown fox jumps over a lazy dog".split()
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted({char for word in words for char in word} | set(",'."))
    pieces += [f"▁{word}" for word in words if len(word) > 1 or word not in pieces]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    return backend


@pytest.fixture(scope="session")
def llama2(llama2_backend: Backend) -> Tokenizer:
    return Tokenizer(llama2_backend, bos_id=1, eos_ids=(2,), add_bos=True)


@pytest.fixture(scope="session")
def words_backend() -> Backend:
    """Whole words, no decoder."""
    backend = Backend(models.WordLevel({"<unk>": 0, "red": 1, "green": 2, "blue": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), behavior="removed")
    return backend
