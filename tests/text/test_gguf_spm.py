"""SentencePiece vocabularies from GGUF files against the algorithm itself and against `transformers`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.weights.gguf import GgufCheckpoint

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = "▁the ▁hello ▁world ing ell lo ▁w or ld ▁ th he el ▁h ▁t wor an ▁an and ▁and 日本 本語 日本語 ab".split()
CHARS = sorted(set("".join(WORDS) + "xyz,.'"))


def vocabulary(prefix: bool, seed: int = 0) -> dict[str, Any]:
    """A small vocabulary with shuffled scores; the order of ids and that of scores differ.

    The run of two spaces is a piece that ranks before all others.
    """
    pieces = list(dict.fromkeys([*WORDS, *CHARS]))
    scores = list(range(len(pieces)))
    random.Random(seed).shuffle(scores)
    tokens = ["<unk>", "<s>", "</s>", "<turn>", "\n\n", "  ", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    values = [0.0] * (6 + 256) + [-float(score) for score in scores]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(values, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """The algorithm, word for word: cut out added tokens, then join the pair of the best score, leftmost first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    added = ["<unk>", "<s>", "</s>", "<turn>", "\n\n"]
    parts, start = [], 0
    while start < len(text):
        found = max((token for token in added if text.startswith(token, start)), key=len, default="")
        if found:
            parts.append((True, found))
        elif parts and not parts[-1][0]:
            parts[-1] = False, parts[-1][1] + text[start]
        else:
            parts.append((False, text[start]))
        start += len(found) or 1
    ids: list[int] = [1]
    for whole, part in parts:
        ids += [tokens.index(part)] if whole else _join(part, metadata, tokens)
    return ids


def _join(text: str, metadata: dict[str, Any], tokens: list[str]) -> list[int]:
    ids = {token: i for i, token in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] == NORMAL}
    ids["▁▁"] = tokens.index("  ")
    scores = {piece: metadata["tokenizer.ggml.scores"][i] for piece, i in ids.items()} | {"▁▁": 1.0}
    prefix = "▁" if metadata["tokenizer.ggml.add_space_prefix"] else ""
    symbols = list(prefix + text.replace(" ", "▁"))
    while True:
        both = [a + b for a, b in zip(symbols, symbols[1:], strict=False)]
        unions = [(scores[piece], -i) for i, piece in enumerate(both) if piece in ids]
        if not unions:
            break
        at = -max(unions)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    result = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [6 + byte for byte in symbol.encode()]
    return result


TEXTS = st.lists(st.sampled_from([*WORDS, *CHARS, " ", "  ", "   ", "\n\n", "<turn>", "é", "😀"]), max_size=12).map(
    lambda parts: "".join(parts).replace("▁", " ")
)


@pytest.mark.parametrize("prefix", [False, True])
@given(text=TEXTS, seed=st.integers(0, 3))
def test_equals_the_algorithm(prefix: bool, text: str, seed: int) -> None:
    metadata = vocabulary(prefix, seed)
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode(text)
    assert ids == sentencepiece(text, metadata)
    shown = tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<s>")
    assert shown.replace(" ", "") == text.replace(" ", "")


def test_spaces_survive_token_by_token() -> None:
    """CASE B-55: joined pieces equal the whole, whatever the prefix."""
    for prefix in (False, True):
        tokenizer = Tokenizer.from_gguf(vocabulary(prefix))
        for text in ("Hello world", " hello world", "日本語 and\n\n the", "naïve 😀 x"):
            ids = tokenizer.encode(text)
            # As in the models that have it, the added space comes again after a piece that was cut out.
            assert tokenizer.decode(ids) == (text.replace("\n\n", "\n\n ") if prefix else text)
            for cut in range(len(ids) + 1):
                detokenizer = Detokenizer(tokenizer)
                joined = "".join([detokenizer.push([i]) for i in ids[:cut]]) + detokenizer.finish()
                assert joined == tokenizer.decode(ids[:cut])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.scores": None}, "0 scores"),
        ({"tokenizer.ggml.scores": np.zeros(3, np.float32)}, "3 scores"),
        ({"tokenizer.ggml.token_type": np.zeros(2, np.int32)}, "2 token types"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "duplicate"),
        ({"tokenizer.ggml.tokens": [["a"], "b"]}, "not a string"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.eos_token_id": 99999}, "eos"),
    ],
    ids=str,
)
def test_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_gguf(vocabulary(True) | change)
    assert reason in str(caught.value)


def mixed_text(size: int) -> str:
    """`size` characters of this project's code, numbers, CJK, emoji, accents, odd spaces; no two runs alike."""
    rng = random.Random(5)
    code = "\n".join(path.read_text() for path in sorted(Path(__file__).parents[2].glob("octavo/**/*.py")))
    others = ["日本語、中文。한국어", "Ünïcödé", "русский", "😀🤷🏽‍♀️👩‍👩‍👧", "½ ² Ⅷ", "\u3000\u00a0", "مرحبا"]
    parts, length = [], 0
    while length < size:
        if rng.random() < 0.8:
            start = rng.randrange(len(code))
            part = code[start : start + rng.randrange(20, 400)]
        elif rng.random() < 0.5:
            part = rng.choice(others) * rng.randrange(1, 4)
        else:
            part = rng.choice([" " * rng.randrange(1, 80), "\n" * rng.randrange(1, 40), str(rng.random()), "\t\t x"])
        parts.append(part)
        length += len(part)
    return "".join(parts)


def assert_equal_to_transformers(path: Path) -> None:
    """Ids of 1 MB of text, in pieces, and the way back."""
    import unicodedata

    from transformers import AutoTokenizer

    mine = Tokenizer.from_gguf(GgufCheckpoint(path).metadata)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # NFC: the converter of `transformers` forgets the normaliser that Qwen's own tokenizer.json has.
    text = unicodedata.normalize("NFC", mixed_text(1_000_000))
    for start in range(0, len(text), 20_000):
        part = text[start : start + 20_000]
        ids = mine.encode(part, add_special_tokens=False)
        assert ids == theirs.encode(part, add_special_tokens=False)
        assert mine.decode(ids, skip_special_tokens=False) == part
        assert mine.encode(part) == theirs.encode(part)


@pytest.mark.slow
def test_gemma3_ids_equal_transformers(gemma3_gguf: Path) -> None:
    assert_equal_to_transformers(gemma3_gguf)


@pytest.mark.slow
def test_qwen2_ids_equal_transformers(qwen2_gguf: Path) -> None:
    assert_equal_to_transformers(qwen2_gguf)
