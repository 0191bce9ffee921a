"""The tokenizer that belongs to a model's files, for every part that opens a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.files import naming
from octavo.text.tokenizer import Tokenizer
from octavo.weights.fetch import ModelFiles
from octavo.weights.gguf import GgufCheckpoint


def open_tokenizer(
    files: ModelFiles, metadata: Mapping[str, Any] | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """From the folder or the GGUF file. Raises ModelError, also where it has more ids than the model's vocabulary.

    metadata: of the GGUF file where it is open already. vocab_size: the model's, where that is known.
    """
    with naming(files.path):
        if files.kind == "gguf":
            return Tokenizer.from_gguf(GgufCheckpoint(files.path).metadata if metadata is None else metadata)
        tokenizer = Tokenizer.from_folder(files.path)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"The tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary {vocab_size}.",
            "Use the tokenizer that belongs to the model.",
        )
    return tokenizer
