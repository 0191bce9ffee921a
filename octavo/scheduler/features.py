"""Rare features of a request as plan words: small handlers for flagged rows, kept out of the fast path."""

from __future__ import annotations

from octavo.scheduler.plan import PARAM_WORDS, X_BAN_UNTIL, float_bits, signed
from octavo.scheduler.slots import HAS_STOP_IDS, IS_RARE
from octavo.types import EngineRequest


def row_flags(request: EngineRequest, stop_ids: frozenset[int]) -> int:
    """The flags of a new row (see `octavo.scheduler.slots`)."""
    flags = HAS_STOP_IDS if stop_ids else 0
    if request.logprobs >= 0 or request.min_tokens > 0:
        flags |= IS_RARE
    return flags


def parameter_words(request: EngineRequest, device_row: int, child: int, known: int, prompt: int) -> list[int]:
    """The parameter block that sets a device row up (again); layout in `octavo.scheduler.plan`."""
    words = [
        device_row,
        known,
        0,
        request.top_k,
        float_bits(request.temperature),
        float_bits(request.top_p),
        float_bits(request.min_p),
        signed(request.seed & 0xFFFFFFFF),
        signed(request.seed >> 32),
        child,
        request.logprobs,
        prompt,
        0,
    ]
    return words + [0] * (PARAM_WORDS - len(words))


def rare_words(request: EngineRequest, device_row: int, prompt: int) -> list[int]:
    """EXTRAS of a request: the ids that may not be sampled before `min_tokens`."""
    ids = sorted(set(request.eos) | set(request.stop_ids))
    if request.min_tokens <= 0 or not ids:
        return []
    payload = [prompt + request.min_tokens, *ids]
    return [device_row, X_BAN_UNTIL, len(payload), *payload]
