"""Rare features of a request as plan words: small handlers for flagged rows, kept out of the fast path."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.scheduler.plan import P_CHILD, P_LENGTH, P_ROW, X_BAN_UNTIL
from octavo.scheduler.slots import HAS_STOP_IDS, IS_BEAM, IS_RARE
from octavo.types import EngineRequest

I32 = NDArray[np.int32]

WORD_MAX = (1 << 31) - 1
_PARAMS = struct.Struct("<4i3f2I7i")  # PARAM_WORDS words in the order of P_ROW, P_LENGTH ...


def row_flags(request: EngineRequest, stop_ids: frozenset[int]) -> int:
    """The flags of a new row (see `octavo.scheduler.slots`)."""
    flags = HAS_STOP_IDS if stop_ids else 0
    if request.logprobs >= 0 or request.min_tokens > 0:
        flags |= IS_RARE
    if request.beam:
        flags |= IS_BEAM
    return flags


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


def rare_words(request: EngineRequest, device_row: int) -> list[int]:
    """EXTRAS of a request: the ids that may not be sampled before `min_tokens`."""
    if request.min_tokens <= 0:
        return []
    ids = sorted(set(request.eos) | set(request.stop_ids))
    if not ids:
        return []
    until = min(len(request.prompt) // 4 + request.min_tokens, request.limit)
    payload = [until, *ids]
    return [device_row, X_BAN_UNTIL, len(payload), *payload]


