"""Rare features of a request as plan words: small handlers for flagged rows, kept out of the fast path."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.scheduler.plan import (
    P_CHILD,
    P_LENGTH,
    P_ROW,
    X_ALLOWED,
    X_BAD_WORDS,
    X_BAN_UNTIL,
    X_BIAS,
    X_PENALTIES,
    X_PROMPT_LOGPROBS,
    float_bits,
)
from octavo.scheduler.slots import IS_BEAM, IS_RARE
from octavo.types import MAX_BIAS, U64, EngineRequest

I32 = NDArray[np.int32]

WORD_MAX = (1 << 31) - 1
_PARAMS = struct.Struct("<4i3f2I7i")  # PARAM_WORDS words in the order of P_ROW, P_LENGTH ...


def row_flags(request: EngineRequest) -> int:
    """The flags of a new row (see `octavo.scheduler.slots`)."""
    flags = 0
    if request.logprobs >= 0 or request.min_tokens > 0 or has_edits(request):
        flags |= IS_RARE
    if request.beam:
        flags |= IS_BEAM
    return flags


def has_edits(request: EngineRequest) -> bool:
    """Whether the request changes its logits (other than by `min_tokens`)."""
    return bool(request.bias[0] or request.allowed or request.bad) or has_penalties(request)


def has_penalties(request: EngineRequest) -> bool:
    """Whether the request penalises tokens that there were."""
    penalties = (request.repetition_penalty, request.presence_penalty, request.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def edited_ids(request: EngineRequest) -> list[int]:
    """All token ids that the request's edits name."""
    return [*request.bias[0], *request.allowed, *(token for word in request.bad for token in word)]


def numbers_fit(request: EngineRequest, vocab_size: int) -> bool:
    """Whether every sampling number is in its range; NaN is in none."""
    return (
        0.0 <= request.temperature <= 100.0
        and 0.0 < request.top_p <= 1.0
        and 0.0 <= request.min_p <= 1.0
        and request.top_k >= 0
        and request.min_tokens >= 0
        and 0 <= request.seed < U64
        and -1 <= request.logprobs <= vocab_size
        and -1 <= request.prompt_logprobs <= vocab_size
        and 0.0 < request.repetition_penalty <= 100.0
        and -2.0 <= request.presence_penalty <= 2.0
        and -2.0 <= request.frequency_penalty <= 2.0
        and all(-MAX_BIAS <= value <= MAX_BIAS for value in request.bias[1])
    )


def parameter_block(request: EngineRequest) -> I32:
    """The parameter block of a request; layout in `octavo.scheduler.plan`. Row, length and child are filled in later.

    Raises RequestError for numbers that do not fit a word.
    """
    low, high = request.seed & 0xFFFFFFFF, request.seed >> 32
    prompt = len(request.prompt) // 4
    floats = (request.temperature, request.top_p, request.min_p)
    rest = (0, request.logprobs, prompt, 0, 0, 0, 0)
    try:
        words = _PARAMS.pack(0, 0, 0, min(request.top_k, WORD_MAX), *floats, low, high, *rest)
    except (struct.error, OverflowError) as error:
        raise RequestError(f"A sampling parameter does not fit its word: {error}.", "Use smaller numbers.") from None
    return np.frombuffer(words, np.int32)


def set_up_block(params: I32, device_row: int, length: int, child: int) -> I32:
    """A request's parameter block for one of its sequences, as it goes into a plan."""
    words = params.copy()
    words[P_ROW], words[P_LENGTH], words[P_CHILD] = device_row, length, child
    return words


def rare_words(request: EngineRequest, device_row: int, known: I32) -> list[int]:
    """EXTRAS of a row that is set up with the `known` tokens; kinds and payloads in `octavo.scheduler.plan`."""
    words: list[int] = []
    for kind, payload in (
        (X_ALLOWED, list(request.allowed)),
        (X_BAD_WORDS, _bad_words(request, known)),
        (X_BAN_UNTIL, _ban_until(request)),
        (X_BIAS, [*request.bias[0], *map(float_bits, request.bias[1])]),
        (X_PENALTIES, _penalties(request, known)),
    ):
        if payload:
            words += (device_row, kind, len(payload), *payload)
    return words


def prompt_words(request: EngineRequest, device_row: int, known: I32, start: int, end: int) -> list[int]:
    """EXTRAS of a chunk from `start` to `end` whose request wants log-probabilities of its prompt."""
    prompt = len(request.prompt) // 4
    count = min(end, prompt - 1) - start
    if count <= 0:
        return []
    after = int(known[end]) if end < prompt else -1
    return [device_row, X_PROMPT_LOGPROBS, 3, request.prompt_logprobs, count, after]


def _ban_until(request: EngineRequest) -> list[int]:
    """The ids that may not be sampled before `min_tokens`."""
    ids = sorted(set(request.eos) | set(request.stop_ids))
    if request.min_tokens <= 0 or not ids:
        return []
    return [min(len(request.prompt) // 4 + request.min_tokens, request.limit), *ids]


def _bad_words(request: EngineRequest, known: I32) -> list[int]:
    if not request.bad:
        return []
    longest = max(map(len, request.bad)) - 1
    tail = known[len(known) - min(longest, len(known)) :].tolist()
    return [len(tail), *tail, *(word for sequence in request.bad for word in (len(sequence), *sequence))]


def _penalties(request: EngineRequest, known: I32) -> list[int]:
    if not has_penalties(request):
        return []
    prompt = len(request.prompt) // 4
    # Only the repetition penalty looks at the prompt.
    seen: list[int] = np.unique(known[:prompt]).tolist() if request.repetition_penalty != 1.0 else []
    factors = (request.repetition_penalty, request.presence_penalty, request.frequency_penalty)
    return [*map(float_bits, factors), len(seen), *seen, *known[prompt:].tolist()]
