"""The text side of one request: tokens of its children become text, stop strings end them, results grow.

Used by every front end. One `RequestText` per request; the caller feeds it tokens and ends in the order in which the
engine reported them, and aborts a child in the engine when `push` says that a stop string ended it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from octavo.text.detokenizer import Detokenizer, StopChecker
from octavo.text.loop_guard import LoopGuard
from octavo.text.tokenizer import Tokenizer
from octavo.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams


class SampledLogprobs(Protocol):
    """What a runner reports for one sampled position (see `octavo.runner.base.TokenLogprobs`)."""

    chosen: float
    rank: int
    ids: Sequence[int]
    values: Sequence[float]


class SequenceEnd(Protocol):
    """What the engine reports when a child ends (see `octavo.scheduler.records.Ended`)."""

    @property
    def child(self) -> int:
        """Its number."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""

    @property
    def preemptions(self) -> int:
        """How often it gave way."""

    @property
    def scheduled_us(self) -> int:
        """When the engine began with it, in microseconds of the monotonic clock; 0: never."""

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again after that."""

    @property
    def swapped_tokens(self) -> int:
        """Tokens brought back from the host after that."""


class RequestText:
    """Grows `output`, the result of one request, token by token.

    `tokenizer` None: no text at all (`detokenize=False`). arrived: when it was made, in `time.monotonic`.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.params = params
        self.arrived = time.monotonic()
        self.metrics = RequestMetrics(time.time())
        self.output = RequestOutput(
            request_id,
            prompt,
            list(prompt_ids),
            [CompletionOutput(index=i) for i in range(params.n)],
            metrics=self.metrics,
        )
        self._tokenizer = tokenizer if params.detokenize else None
        stops = params.stop_strings
        self._detokenizers = [
            Detokenizer(self._tokenizer, params.skip_special_tokens, after_prompt=True) if self._tokenizer else None
            for _ in range(params.n)
        ]
        self._checkers = [
            StopChecker(stops, params.include_stop_str_in_output) if stops and self._tokenizer else None
            for _ in range(params.n)
        ]
        guard = params.repetition_detection
        self._guards = [LoopGuard(guard) if guard else None for _ in range(params.n)]
        self._running = params.n
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None] * len(self.output.prompt_token_ids)
        if params.logprobs is not None:
            for completion in self.output.outputs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0

    @property
    def finished(self) -> bool:
        """True when every child has ended."""
        return self._running == 0

    def bare(self) -> list[int] | None:
        """Where the tokens of a request of one child go if nothing else is done to them, else None."""
        completion = self.output.outputs[0]
        more = (self._detokenizers[0], self._guards[0], completion.logprobs)
        return completion.token_ids if more == (None, None, None) and self.params.n == 1 else None

    def push(self, child: int, token: int, logprobs: SampledLogprobs | None, *, ends: bool) -> bool:
        """Add one token; True when a stop string or the loop guard ended the child: the engine does not know it yet.

        `ends`: the engine ended the child with this token as its stop; such a token adds no text.
        """
        completion = self.output.outputs[child]
        if completion.finish_reason is not None:  # in flight when a stop string was found
            return False
        completion.token_ids.append(token)
        if logprobs is not None:
            self._add_logprobs(completion, token, logprobs)
        detokenizer, guard = self._detokenizers[child], self._guards[child]
        if detokenizer is not None and (not ends or self._keeps_stop(token)):
            delta = detokenizer.push_one(token)
            if self._checkers[child] is None:
                completion.text += delta
            elif self._search(child, delta, ends):
                return True
        if ends or guard is None or not guard.push(token):
            return False
        self.end(child, "repetition")
        return True

    def _search(self, child: int, delta: str, ends: bool) -> bool:
        """Add new text as far as no stop string may begin in it; True when one ended the child."""
        completion, checker = self.output.outputs[child], self._checkers[child]
        if checker is None:
            return False
        text, stop = checker.push(delta, armed=len(completion.token_ids) > self.params.min_tokens)
        completion.text += text
        if stop is None or ends:
            return False
        self._finish(completion, "stop", stop)
        return True

    def push_prompt(self, first: int, entries: Sequence[SampledLogprobs]) -> None:
        """Log-probabilities of the prompt tokens from position `first` on. The same ones may come again."""
        found = self.output.prompt_logprobs
        if found is not None:
            for position, entry in enumerate(entries, first):
                found[position] = self._entry(self.output.prompt_token_ids[position], entry)

    def end(self, child: int, reason: str) -> None:
        """The engine ended a child. Ignored when a stop string ended it before."""
        completion = self.output.outputs[child]
        if completion.finish_reason is not None:
            return
        detokenizer, checker = self._detokenizers[child], self._checkers[child]
        stop: int | str | None = None
        if detokenizer is not None:
            tail = detokenizer.finish()
            if checker is not None:
                text, stop = checker.push(tail) if tail else ("", None)
                tail = text if stop is not None else text + checker.finish()
            completion.text += tail
        last = completion.token_ids[-1] if completion.token_ids else None
        if stop is None and reason == "stop" and last in (self.params.stop_token_ids or ()):
            stop = last
        self._finish(completion, "stop" if isinstance(stop, str) else reason, stop)

    def report(self, end: SequenceEnd, reason: str) -> None:
        """The engine ended a child, with what it took."""
        self.end(end.child, reason)
        output, metrics = self.output, self.metrics
        if end.child == 0:
            output.num_cached_tokens = metrics.cached_tokens = end.cached_tokens
        output.num_preemptions += end.preemptions
        metrics.preemptions += end.preemptions
        metrics.recomputed_tokens += end.recomputed_tokens
        metrics.swapped_tokens += end.swapped_tokens
        if end.scheduled_us:
            at = self._wall(end.scheduled_us / 1e6)
            metrics.first_scheduled_time = min(metrics.first_scheduled_time or at, at)

    def timed(self, first: float, last: float, end: float) -> None:
        """When the first and the last token came (0: never) and when it was over, in `time.monotonic`."""
        metrics = self.metrics
        metrics.first_token_time = self._wall(first) if first else None
        metrics.last_token_time = self._wall(last) if last else None
        metrics.finished_time = self._wall(end)
        metrics.num_generation_tokens = sum(len(completion.token_ids) for completion in self.output.outputs)

    def _wall(self, at: float) -> float:
        """A time of the monotonic clock, which all processes share, as seconds since the epoch."""
        return self.metrics.arrival_time + at - self.arrived

    def _keeps_stop(self, token: int) -> bool:
        return self.params.include_stop_str_in_output and token in (self.params.stop_token_ids or ())

    def _finish(self, completion: CompletionOutput, reason: str, stop: int | str | None) -> None:
        completion.finish_reason = reason
        completion.stop_reason = stop
        self._running -= 1
        self.output.finished = self._running == 0

    def _add_logprobs(self, completion: CompletionOutput, token: int, found: SampledLogprobs) -> None:
        if completion.logprobs is not None:
            completion.logprobs.append(self._entry(token, found))
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + found.chosen

    def _entry(self, token: int, found: SampledLogprobs) -> dict[int, Logprob]:
        entry = {token: Logprob(found.chosen, found.rank, self._piece(token))}
        for rank, (other, value) in enumerate(zip(found.ids, found.values, strict=True), 1):
            entry.setdefault(int(other), Logprob(float(value), rank, self._piece(int(other))))
        return entry

    def _piece(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def snapshot(self) -> RequestOutput:
        """A copy of the result so far that later tokens do not change."""
        outputs = [
            replace(
                completion,
                token_ids=list(completion.token_ids),
                logprobs=None if completion.logprobs is None else list(completion.logprobs),
            )
            for completion in self.output.outputs
        ]
        return replace(self.output, outputs=outputs)
