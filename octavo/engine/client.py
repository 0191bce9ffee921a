"""From what a user asks to what the engine gets: the one place where an `EngineRequest` is built.

Every front end (offline, server) calls `build_request`; what it returns is valid by construction, and the scheduler
re-checks it cheaply. Ids are numbers made here, never a client's string.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from octavo.engine.beam import BeamParams
from octavo.errors import RequestError
from octavo.scheduler.keys import chain_keys, root_key
from octavo.types import MAX_BIAS, EngineRequest, SamplingParams

MAX_SALT_CHARS = 64
COLDEST = 1e-4  # below this the logits overflow and the best token is all that is left: greedy
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
    for kind in set(map(type, ids)):  # types first: a prompt of 100,000 tokens is not walked in Python
        if kind is bool or not issubclass(kind, (int, np.integer)):
            token = next(token for token in ids if type(token) is kind)
            raise RequestError(f"The prompt holds {token!r} among its token ids.", "Give integers.", "prompt")
    try:
        prompt = np.frombuffer(array("i", ids), np.int32)
        fits = int(prompt.min()) >= 0 and int(prompt.max()) < limits.vocab_size
    except OverflowError:
        fits = False
    if not fits:
        token = next(token for token in ids if not 0 <= token < limits.vocab_size)
        raise RequestError(
            f"The prompt holds token id {token}; the vocabulary has ids 0 to {limits.vocab_size - 1}.",
            "Use ids of this model's tokenizer.",
            "prompt",
        )
    return prompt


def build_beam_request(number: int, ids: Sequence[int], search: BeamParams, limits: ModelLimits) -> EngineRequest:
    """A request for beam search: `width` children that share a prompt, each token with its best candidates."""
    params = SamplingParams(n=search.width, temperature=0.0, max_tokens=search.max_tokens, ignore_eos=True)
    plain = build_request(number, ids, params, limits)
    return msgspec.structs.replace(plain, beam=True, logprobs=min(search.candidates, limits.vocab_size))


def cut_prompt(ids: Sequence[int], params: SamplingParams, limits: ModelLimits) -> Sequence[int]:
    """The last ids of a prompt that `truncate_prompt_tokens` keeps. Raises RequestError."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep > limits.max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens is {keep}, more than {limits.max_model_len} (max_model_len).",
            f"Give 1 to {limits.max_model_len - 1}, or -1.",
            "truncate_prompt_tokens",
        )
    return ids[-(limits.max_model_len - 1 if keep == -1 else keep) :]


def build_request(
    number: int,
    ids: Sequence[int],
    params: SamplingParams,
    limits: ModelLimits,
    salt: str = "",
    bad: tuple[tuple[int, ...], ...] = (),
    keys: bool = True,
) -> EngineRequest:
    """A request the engine will accept, under the engine's own `number`. `salt` keeps prefix caches apart.

    `bad`: the token sequences of `params.bad_words`. `keys` False leaves the longest part to `with_keys`. Output
    is cut to what fits in `max_model_len`. Raises RequestError.
    """
    prompt = prompt_array(ids, limits)
    if len(salt) > MAX_SALT_CHARS or not salt.isprintable():
        raise RequestError("cache_salt is not a short printable string.", f"At most {MAX_SALT_CHARS}.", "cache_salt")
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token in getattr(params, name) or ():
            if token >= limits.vocab_size:
                raise RequestError(
                    f"{name} holds {token}; the vocabulary has ids 0 to {limits.vocab_size - 1}.", "Remove it.", name
                )
    biases = sorted((params.logit_bias or {}).items())
    room = limits.max_model_len - len(prompt)
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    request = EngineRequest(
        id=number,
        prompt=prompt.astype("<i4").tobytes(),
        keys=b"",
        root=root_key(limits.block_size, salt),
        limit=len(prompt) + most,
        n=params.n,
        temperature=params.temperature if params.temperature >= COLDEST else 0.0,
        top_p=params.top_p,
        top_k=max(params.top_k, 0) if params.top_k < limits.vocab_size else 0,
        min_p=params.min_p,
        seed=secrets.randbits(64) if params.seed is None else params.seed & _U64,
        eos=() if params.ignore_eos else limits.eos_ids,
        stop_ids=tuple(params.stop_token_ids or ()),
        min_tokens=min(params.min_tokens, most),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias=(
            tuple(token for token, _ in biases),
            tuple(min(max(float(value), -MAX_BIAS), MAX_BIAS) for _, value in biases),
        ),
        allowed=tuple(dict.fromkeys(params.allowed_token_ids or ())),
        bad=bad,
        priority=params.priority,
        timeout=params.timeout_s or 0.0,
    )
    return with_keys(request, limits) if keys else request


def with_keys(request: EngineRequest, limits: ModelLimits) -> EngineRequest:
    """The request with the keys of its prompt's blocks, without which the scheduler refuses it."""
    if not limits.prefix_cache:
        return request
    keys = chain_keys(request.root, np.frombuffer(request.prompt, "<i4"), limits.block_size)
    return msgspec.structs.replace(request, keys=b"".join(keys))
