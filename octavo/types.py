"""The vocabulary of Octavo: sampling parameters, engine requests, results.

`SamplingParams` is what a user writes, checked on construction. `EngineRequest` is what the engine gets: token ids
and numbers only, built in one place (`octavo.engine.client`) and re-checked by the scheduler. Results have vLLM's
shape, so that scripts written for it run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from octavo.errors import RequestError

MAX_N = 64
MAX_PRIORITY = 1000
MAX_TIMEOUT = 86_400.0
MAX_LOGPROBS = 20
MAX_STOP_IDS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_ALLOWED = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 64
U64 = 1 << 64

C = TypeVar("C", bound=Collection[Any])

_MANY = (list, tuple, set, frozenset)
_LISTS: dict[str, tuple[type, ...]] = {
    "stop": (str, *_MANY),
    "stop_token_ids": _MANY,
    "allowed_token_ids": _MANY,
    "bad_words": (str, *_MANY),
    "logit_bias": (Mapping,),
}


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """`value` as a finite float in [low, high], or (low, high] when `open_low`; RequestError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}.", "Give a finite number.", name)
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} is {value}.", f"Give a number in {bracket}{low:g}, {high:g}].", name)
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int in [low, high]; RequestError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}.", "Give an integer.", name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}.", f"Give an integer in [{low}, {high}].", name)
    return value


def _limited(name: str, values: C, most: int) -> C:
    """`values`, at most `most` of them; RequestError otherwise."""
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} entries.", f"Give at most {most}.", name)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """When an output counts as a loop: the same 1 to `max_pattern_size` tokens `min_count` times in a row."""

    max_pattern_size: int = 16
    min_pattern_size: int = 1
    min_count: int = 8

    def __post_init__(self) -> None:
        _integer("max_pattern_size", self.max_pattern_size, 1, 256)
        _integer("min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        _integer("min_count", self.min_count, 2, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Field names and meanings are vLLM's.

    n: completions for the prompt, which share its KV blocks. temperature: 0 is greedy. top_k: 0 or -1 is off.
    top_p, min_p: kept probability mass, and least probability relative to the best token. seed: same seed, same
    tokens, whatever else runs. stop: strings that end the text (not part of it unless `include_stop_str_in_output`).
    stop_token_ids: ids that end it. ignore_eos: go on past the model's end token. max_tokens: most new tokens; None
    means up to the context limit. min_tokens: no end before that many. logprobs: log-probabilities of the chosen
    and the best `logprobs` tokens, before any of the changes below; -1 is not allowed. prompt_logprobs: the same for
    every prompt token but the first. truncate_prompt_tokens: keep so many of the prompt's last tokens, -1 as many as
    fit.

    repetition_penalty divides positive and multiplies negative logits of tokens in prompt or output;
    frequency_penalty is subtracted for each time a token is in the output, presence_penalty once. logit_bias adds to
    the logits of ids, at most 100 either way. allowed_token_ids: the only ids that may be sampled. bad_words: words
    that may not come up, at the start of the text or after a space. repetition_detection: end an output that repeats
    itself, with the finish reason "repetition". priority: larger is served earlier (scheduling_policy priority).
    timeout_s: seconds after which the request ends, waiting or not, with what there is and the finish reason
    "timeout".

    Raises RequestError for any value outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    priority: int = 0
    repetition_detection: RepetitionDetection | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 1 << 31)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 31)
        _integer("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.timeout_s is not None:
            _number("timeout_s", self.timeout_s, 0.0, MAX_TIMEOUT, open_low=True)
        _integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}.",
                "Lower min_tokens.",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 1 << 31)
            if self.truncate_prompt_tokens == 0:
                raise RequestError(
                    "truncate_prompt_tokens is 0.", "Give at least 1, or -1.", "truncate_prompt_tokens"
                )
        self._check_stops()
        self._check_edits()

    def _check_stops(self) -> None:
        for name, kinds in _LISTS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise RequestError(f"{name} is a {type(value).__name__}.", "Give a list.", name)
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(stops)} strings.", f"Give at most {MAX_STOP_STRINGS}.", "stop")
        for text in stops:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise RequestError(
                    "stop holds an entry that is not a string of "
                    f"1 to {MAX_STOP_CHARS} characters.", "Remove it.", "stop"
                )  # fmt: skip
        if stops and not self.detokenize:
            raise RequestError("stop strings need detokenize=True.", "Use stop_token_ids.", "stop")
        ids = self.stop_token_ids or ()
        if len(ids) > MAX_STOP_IDS:
            raise RequestError(
                f"stop_token_ids has {len(ids)} ids.", f"Give at most {MAX_STOP_IDS}.", "stop_token_ids"
            )
        for token in ids:
            _integer("stop_token_ids", token, 0, (1 << 31) - 1)

    def _check_edits(self) -> None:
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in _limited("logit_bias", self.logit_bias or {}, MAX_BIASES).items():
            _integer("logit_bias", token, 0, (1 << 31) - 1)
            _number("logit_bias", bias, -math.inf, math.inf)
        for token in _limited("allowed_token_ids", self.allowed_token_ids or (), MAX_ALLOWED):
            _integer("allowed_token_ids", token, 0, (1 << 31) - 1)
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise RequestError("allowed_token_ids is empty.", "Give at least one id.", "allowed_token_ids")
        if isinstance(self.bad_words, str):
            raise RequestError("bad_words is a string.", "Give a list of words.", "bad_words")
        for word in _limited("bad_words", self.bad_words or (), MAX_BAD_WORDS):
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
                raise RequestError(
                    f"bad_words holds an entry that is not a word of 1 to {MAX_BAD_WORD_CHARS} characters.",
                    "Remove it.",
                    "bad_words",
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How `LLM.beam_search` searches; names and meanings as in vLLM, `early_stopping` as in transformers.

    length_penalty: a beam's score is its sum of log-probabilities divided by its length to this power.
    early_stopping: True stops at `beam_width` finished beams, False when no running beam scores better now, "never"
    when none ever can.
    """

    beam_width: int = 4
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, MAX_N)
        _integer("max_tokens", self.max_tokens, 1, 1 << 31)
        _number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(
                f"early_stopping is {self.early_stopping!r}.", 'Give True, False or "never".', "early_stopping"
            )


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One validated request as the engine sees it: `n` sequences over one prompt.

    prompt: int32 little-endian token ids. keys: prefix keys of the prompt's full blocks, 16 bytes each. root: key
    before the first block. seed: 64 bits. eos: the model's end ids (empty with ignore_eos). stop_ids: further end
    ids. limit: total tokens at which a sequence ends. id: the engine's own number, never a client's.

    bias: (ids, values). bad: sequences of ids that may not come up. logprobs, prompt_logprobs: -1 is none. timeout:
    seconds from its submission to the engine; 0 is none.
    """

    id: int
    prompt: bytes
    keys: bytes
    root: bytes
    limit: int
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    eos: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
    allowed: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()
    beam: bool = False
    priority: int = 0
    tenant: str = ""
    timeout: float = 0.0


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token, its rank among all (1 = best), and its text when known."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion. `finish_reason` is None while it runs, else stop, length, repetition, timeout, abort or error.

    stop_reason: the stop string or token id that ended it; None for the model's own end token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSequence:
    """One finished beam: new token ids, their text, the sum of log-probabilities over length as the score."""

    tokens: list[int]
    text: str
    score: float


@dataclass(slots=True)
class BeamSearchOutput:
    """The finished beams of one prompt, best first."""

    sequences: list[BeamSequence]


@dataclass(slots=True)
class RequestMetrics:
    """Where a request's time went. Points in time are seconds since the epoch, None while they have not come.

    first_scheduled_time: when the engine began with it. recomputed_tokens, swapped_tokens: computed again, and
    brought back from the host, after `preemptions`. Both of vLLM's spellings are there: points as `..._time` and as
    `..._ts`, where 0 stands for None.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token; 0 while there is none."""
        return _between(self.arrival_time, self.first_token_time) or 0.0

    @property
    def queued_ts(self) -> float:
        """As `arrival_time`: it is queued at once."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float:
        """As `first_scheduled_time`."""
        return self.first_scheduled_time or 0.0

    @property
    def first_token_ts(self) -> float:
        """As `first_token_time`."""
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        """As `last_token_time`."""
        return self.last_token_time or 0.0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival until the engine began with it, or until its end when it never did."""
        began = self.first_scheduled_time or self.finished_time
        return None if began is None else began - self.arrival_time

    @property
    def prefill_time(self) -> float | None:
        """Seconds from there to the first token."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token to the last."""
        return _between(self.first_token_time, self.last_token_time)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


@dataclass(slots=True)
class RequestOutput:
    """All completions of one prompt. `num_cached_tokens`: prompt tokens whose K and V were found in the cache.

    prompt_logprobs: one entry for each prompt token, None for the first; None altogether when nobody asked. metrics:
    complete once the request is finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
