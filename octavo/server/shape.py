"""The answers' shapes: log-probabilities of both routes, choices, and the events of a stream.

`ChatShape` and `TextShape` are the two routes; each makes whole choices and events out of the same results, so that
streamed pieces join to what the other mode sends. Events are bytes joined from prepared parts: a token costs a few
microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from octavo.text.tokenizer import Tokenizer
from octavo.types import CompletionOutput, Logprob, RequestOutput

LEAST = -9999.0  # stands for minus infinity, which JSON does not know

_json = msgspec.json.Encoder().encode


class Shape(Protocol):
    """What differs between the routes."""

    prefix: str
    kind: str
    chunk_kind: str

    def choice(self, index: int, choice: CompletionOutput) -> dict[str, Any]:
        """A finished choice."""

    def event(self, index: int, choice: CompletionOutput, text: str, tokens: slice, first: bool, last: bool) -> bytes:
        """One entry of `choices` in an event: new text and tokens of a choice."""

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands around the text's JSON in an event in the middle; None when more than the text changes."""


class Pieces:
    """Tokens as the client sees them in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._hidden = hidden

    def text(self, token: int) -> str:
        """The token's text; U+FFFD for a part of a character."""
        if self._as_ids:
            return f"token_id:{token}"
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def data(self, token: int) -> list[int]:
        """The bytes that the token adds to the answer."""
        return [] if token in self._hidden else list(self._tokenizer.token_bytes(token))


class ChatShape:
    """`/v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, pieces: Pieces, alternatives: int | None, echo: str, token_ids: bool) -> None:
        self._pieces = pieces
        self._alternatives = alternatives
        self._echo = echo
        self._token_ids = token_ids

    def choice(self, index: int, choice: CompletionOutput) -> dict[str, Any]:
        """See `Shape`."""
        made: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": self._echo + choice.text, "refusal": None, "tool_calls": []},
            "logprobs": self._logprobs(choice, slice(None)),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if not self._token_ids:
            return made
        return made | {"token_ids": choice.token_ids}

    def event(self, index: int, choice: CompletionOutput, text: str, tokens: slice, first: bool, last: bool) -> bytes:
        """See `Shape`."""
        text = self._echo + text if first else text
        head = b'{"index":%d,"delta":{%b"content":%b}' % (
            index,
            b'"role":"assistant",' if first else b"",
            _json(text),
        )
        if self._alternatives is not None:
            head += b',"logprobs":' + _json(self._logprobs(choice, tokens))
        if self._token_ids:
            head += b',"token_ids":' + _json(choice.token_ids[tokens])
        return head + finish(choice, last)

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """See `Shape`."""
        if self._alternatives is not None or self._token_ids:
            return None
        return b'{"index":%d,"delta":{"content":' % index, b'},"finish_reason":null}'

    def _logprobs(self, choice: CompletionOutput, tokens: slice) -> dict[str, Any] | None:
        if self._alternatives is None or choice.logprobs is None:
            return None
        content = []
        for token, entry in zip(choice.token_ids[tokens], choice.logprobs[tokens], strict=True):
            top = [self._entry(other, found) for other, found in best(entry, self._alternatives)]
            content.append(self._entry(token, entry[token]) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, found: Logprob) -> dict[str, Any]:
        return {"token": self._pieces.text(token), "logprob": clamp(found.logprob), "bytes": self._pieces.data(token)}


class TextShape:
    """`/v1/completions`. `echoes`: for each prompt the text that goes before the answer.

    `scored`: the results, when the lists of log-probabilities are to begin with those of the prompts. `reported`: the
    results, when they are to be in a field of their own.
    """

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self,
        pieces: Pieces,
        alternatives: int | None,
        echoes: Sequence[str],
        n: int,
        token_ids: bool,
        scored: Sequence[RequestOutput] | None = None,
        reported: Sequence[RequestOutput] | None = None,
    ) -> None:
        self._pieces = pieces
        self._alternatives = alternatives
        self._echoes = echoes
        self._n = n
        self._token_ids = token_ids
        self._scored = scored
        self._reported = reported
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, choice: CompletionOutput) -> dict[str, Any]:
        """See `Shape`."""
        made: dict[str, Any] = {
            "index": index,
            "text": self._echoes[index // self._n] + choice.text,
            "logprobs": self._lists(index, choice, slice(None), first=True),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._reported is not None:
            made["prompt_logprobs"] = prompt_logprobs(self._reported[index // self._n])
        return made | {"token_ids": choice.token_ids} if self._token_ids else made

    def event(self, index: int, choice: CompletionOutput, text: str, tokens: slice, first: bool, last: bool) -> bytes:
        """See `Shape`."""
        echo = self._echoes[index // self._n]
        head = b'{"index":%d,"text":%b' % (index, _json(echo + text if first else text))
        if self._alternatives is None:
            head += b',"logprobs":null'
        else:
            head += b',"logprobs":' + _json(self._lists(index, choice, tokens, first))
        if self._token_ids:
            head += b',"token_ids":' + _json(choice.token_ids[tokens])
        return head + finish(choice, last)

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """See `Shape`."""
        if self._alternatives is not None or self._token_ids:
            return None
        return b'{"index":%d,"text":' % index, b',"logprobs":null,"finish_reason":null}'

    def _lists(self, index: int, choice: CompletionOutput, tokens: slice, first: bool) -> dict[str, Any] | None:
        """The four lists for some tokens of a choice; with the first come the prompt's, when that is scored."""
        if self._alternatives is None or choice.logprobs is None:
            return None
        pairs: list[tuple[int, dict[int, Logprob] | None]] = []
        offset = self._offsets.get(index, 0)
        if first and self._scored is not None:
            prompt = self._scored[index // self._n]
            entries = prompt.prompt_logprobs or [None] * len(prompt.prompt_token_ids)
            pairs += zip(prompt.prompt_token_ids, entries, strict=True)
        elif first:
            offset = len(self._echoes[index // self._n])
        pairs += zip(choice.token_ids[tokens], choice.logprobs[tokens], strict=True)
        texts, values, tops, offsets = [], [], [], []
        for token, entry in pairs:
            text, value, top = self._score(token, entry)
            texts.append(text)
            values.append(value)
            tops.append(top)
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": tops}

    def _score(
        self, token: int, entry: dict[int, Logprob] | None
    ) -> tuple[str, float | None, dict[str, float] | None]:
        text = self._pieces.text(token)
        if entry is None:
            return text, None, None
        value = clamp(entry[token].logprob)
        # The chosen token is always among the alternatives, as the guides of this route say.
        top = {self._pieces.text(other): clamp(item.logprob) for other, item in best(entry, self._alternatives or 0)}
        return text, value, top | {text: value}


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """Log-probabilities of a prompt in vLLM's shape: for each token but the first, by id."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": clamp(item.logprob), "rank": item.rank, "decoded_token": item.decoded_token}
            for token, item in entry.items()
        }
        for entry in output.prompt_logprobs
    ]


def finish(choice: CompletionOutput, last: bool) -> bytes:
    """The end of a streamed choice."""
    if not last:
        return b',"finish_reason":null}'
    return b',"finish_reason":%b,"stop_reason":%b}' % (_json(choice.finish_reason), _json(choice.stop_reason))


def best(entry: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` most probable tokens of one position, best first."""
    if not count:
        return []
    found = [(token, item) for token, item in entry.items() if item.rank is not None and item.rank <= count]
    return sorted(found, key=lambda pair: (pair[1].rank, pair[0]))[:count]


def clamp(value: float) -> float:
    """A log-probability as JSON can hold it."""
    return value if math.isfinite(value) and value > LEAST else LEAST
