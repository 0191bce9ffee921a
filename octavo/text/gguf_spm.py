"""A SentencePiece vocabulary inside a GGUF file ("tokenizer.ggml.model" = "llama"): Llama 2, Mistral, Gemma, Phi-3.

SentencePiece joins, again and again, the two neighbours whose union is the piece of the highest score, beginning
with single characters; a character that is no piece falls apart into its UTF-8 bytes. The `tokenizers` library joins
by a list of pairs in order of rank, so the list is made here from the scores: every way to cut a piece into two
pieces, best piece first. Spaces are U+2581 inside pieces. Pieces that the model's authors defined are cut out of the
text before anything is joined, but for runs of spaces, which are joined before all else, as Gemma's tokenizer.json
has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from octavo.errors import ModelError
from octavo.files import field

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def build(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """The tokenizer, without its added tokens; ModelError when scores and pieces do not fit together."""
    scores = metadata.get("tokenizer.ggml.scores")
    count = 0 if scores is None else len(scores)
    if scores is None or count != len(tokens) or len(types) != len(tokens):
        raise ModelError(
            f"The file has {len(tokens)} tokens, {count} scores and {len(types)} types.", "Convert the model again."
        )
    kinds, values = [int(kind) for kind in types], [float(score) for score in scores]
    runs = [i for i, token in enumerate(tokens) if is_space_run(token)]
    spelled = list(tokens)
    for i in runs:
        spelled[i] = SPACE * len(tokens[i])
    joined = {token for token, kind in zip(spelled, kinds, strict=True) if kind in (NORMAL, USER_DEFINED, UNUSED)}
    by_score = sorted((i for i, kind in enumerate(kinds) if kind in (NORMAL, UNUSED)), key=lambda i: -values[i])
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    if unknown is None:
        index = field(metadata, "tokenizer.ggml.unknown_token_id", int, None)
        unknown = tokens[index] if index is not None and 0 <= index < len(tokens) else None
    bpe = models.BPE(
        {token: index for index, token in enumerate(spelled)},
        pairs([spelled[i] for i in (*runs, *by_score)], joined),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=BYTE in kinds,
    )
    tokenizer = Tokenizer(bpe)
    prefix = field(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def is_space_run(token: str) -> bool:
    """Two or more spaces as one piece: files write such pieces with real spaces."""
    return len(token) > 1 and not token.strip(" ")


def pairs(pieces: Sequence[str], known: set[str]) -> list[tuple[str, str]]:
    """Every cut of every piece into two `known` ones, in the order of `pieces`."""
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
