"""From what a user asks to what the engine gets: the one place where an `EngineRequest` is built.

Every front end (offline, server) calls `build_request`; what it returns is valid by construction, and the scheduler
re-checks it cheaply. Ids are numbers made here, never a client's string.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from octavo.engine.beam import BeamParams
from octavo.errors import RequestError
from octavo.scheduler.keys import chain_keys, root_key
from octavo.types import EngineRequest, SamplingParams

MAX_SALT_CHARS = 64
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a front end must know of the engine to build requests for it."""

    vocab_size: int
    max_model_len: int
    block_size: int
    eos_ids: tuple[int, ...]
    prefix_cache: bool


def prompt_array(ids: Sequence[int], limits: ModelLimits) -> np.ndarray:
    """Token ids as an int32 array, checked: not empty, integers, inside the vocabulary, short enough."""
    if not len(ids):
        raise RequestError("The prompt is empty.", "Give at least one token.", "prompt")
    if len(ids) >= limits.max_model_len:
        raise RequestError(
            f"The prompt has {len(ids)} tokens; with at least one new token it must fit in {limits.max_model_len} "
            "(max_model_len).",
            "Shorten it, or raise --max-model-len.",
            "prompt",
        )
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise RequestError(f"The prompt holds {token!r} among its token ids.", "Give integers.", "prompt")
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"The prompt holds token id {token}; the vocabulary has ids 0 to {limits.vocab_size - 1}.",
                "Use ids of this model's tokenizer.",
                "prompt",
            )
    return np.asarray(ids, np.int32)


def build_beam_request(number: int, ids: Sequence[int], search: BeamParams, limits: ModelLimits) -> EngineRequest:
    """A request for beam search: `width` children that share a prompt, each token with its best candidates."""
    params = SamplingParams(n=search.width, temperature=0.0, max_tokens=search.max_tokens, ignore_eos=True)
    plain = build_request(number, ids, params, limits)
    return msgspec.structs.replace(plain, beam=True, logprobs=min(search.candidates, limits.vocab_size))


def build_request(
    number: int, ids: Sequence[int], params: SamplingParams, limits: ModelLimits, salt: str = ""
) -> EngineRequest:
    """A request the engine will accept, under the engine's own `number`. `salt` keeps prefix caches apart.

    Output is cut to what fits in `max_model_len`. Raises RequestError.
    """
    prompt = prompt_array(ids, limits)
    if len(salt) > MAX_SALT_CHARS or not salt.isprintable():
        raise RequestError("cache_salt is not a short printable string.", f"At most {MAX_SALT_CHARS}.", "cache_salt")
    for token in params.stop_token_ids or ():
        if token >= limits.vocab_size:
            raise RequestError(
                f"stop_token_ids holds {token}; the vocabulary has ids 0 to {limits.vocab_size - 1}.",
                "Remove it.",
                "stop_token_ids",
            )
    room = limits.max_model_len - len(prompt)
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    root = root_key(limits.block_size, salt)
    keys = chain_keys(root, prompt, limits.block_size) if limits.prefix_cache else []
    return EngineRequest(
        id=number,
        prompt=prompt.astype("<i4").tobytes(),
        keys=b"".join(keys),
        root=root,
        limit=len(prompt) + most,
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0) if params.top_k < limits.vocab_size else 0,
        min_p=params.min_p,
        seed=secrets.randbits(64) if params.seed is None else params.seed & _U64,
        eos=() if params.ignore_eos else limits.eos_ids,
        stop_ids=tuple(params.stop_token_ids or ()),
        min_tokens=min(params.min_tokens, most),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        priority=params.priority,
    )
