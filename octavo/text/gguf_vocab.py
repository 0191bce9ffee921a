"""The tokenizer inside a GGUF file: a SentencePiece vocabulary (`gguf_spm`), or a byte-level BPE.

Of the latter GGUF stores tokens and merges but only a name ("pre") for the way text is cut into words before
merging, so each known name is spelled out here as the model's own tokenizer.json has it. An unknown name is refused:
a wrong cut gives plausible but different ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.errors import ModelError
from octavo.files import field
from octavo.text import gguf_spm
from octavo.text.gguf_spm import CONTROL, UNKNOWN, USER_DEFINED

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Words as Llama 3 and Qwen 2 cut them; they differ in how many digits stay together.
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([cut, _byte_level(use_regex=False)])


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    match kind:
        case "default" | "gpt-2":
            return _byte_level(use_regex=True)
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])
        case "qwen2":
            return _split(_QWEN2)
        case "llama-bpe":
            return _split(_LLAMA3)
    raise ModelError(
        f"The file's tokenizer has the pre-tokenizer {kind!r}, which is not supported.",
        "Supported are default, gpt-2, smollm, qwen2 and llama-bpe; or use the model's safetensors folder.",
    )


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes; ModelError when it is of an unknown kind."""
    model = field(metadata, "tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise ModelError(
            f"The file's tokenizer is of the kind {model!r}, which is not supported.",
            "Supported are gpt2 (byte-level BPE) and llama (SentencePiece); or use the model's safetensors folder.",
        )
    tokens = field(metadata, "tokenizer.ggml.tokens", list)
    if not all(isinstance(token, str) for token in tokens):
        raise ModelError("The file's vocabulary holds something that is not a string.")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"The file's vocabulary has {len(tokens) - len(set(tokens))} duplicate tokens.")
    types = metadata.get("tokenizer.ggml.token_type", [])
    if len(types) not in (0, len(tokens)):
        raise ModelError(f"The file has {len(types)} token types for {len(tokens)} tokens.")
    try:
        tokenizer = gguf_spm.build(metadata, tokens, types) if model == "llama" else _byte_level_bpe(metadata, tokens)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception and ValueError
        raise ModelError(f"The file's vocabulary and merges do not fit together ({error}).") from None
    added = [
        AddedToken(token, special=int(type_) != USER_DEFINED, normalized=False)
        for token, type_ in zip(tokens, types, strict=False)
        if type_ in (UNKNOWN, CONTROL, USER_DEFINED) and not (model == "llama" and gguf_spm.is_space_run(token))
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    kind = field(metadata, "tokenizer.ggml.pre", str, "default")
    pre_tokenizer = _pre_tokenizer(kind)
    merges = [tuple(pair.split(" ")) for pair in field(metadata, "tokenizer.ggml.merges", list)]
    # ignore_merges: Llama 3 takes a word that is a token as it is, without merging up to it.
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
