"""What API process and engine process say to each other: typed msgpack messages in length-prefixed frames.

A frame is a little-endian uint32 length and that many bytes, one message: a msgpack array whose first item is the
message's tag. Both ends know every message and its types; anything else is a `WireError`, and so is a length over
`MAX_FRAME`, before anything is allocated for it. New tokens travel as columns of little-endian integers.

Order: the client sends `Start` first and gets `Ready` or `Failed`. Then `Submit`, `Abort` and `Ask` in any order; the
engine sends `Tokens` for steps that changed something, `Refused` for a submission that it cannot take, `Beat` about
once a second while it is well, and `Answer`. Either end closing the socket ends it all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineConfig, Facts
from octavo.engine.client import ModelLimits
from octavo.errors import OctavoError
from octavo.metrics.server import EngineNumbers
from octavo.runner.base import TokenLogprobs
from octavo.scheduler.records import Ended, TokenBatch
from octavo.types import EngineRequest

MAX_FRAME = 32 << 20
_LENGTH = struct.Struct("<I")
_ENDED = len(fields(Ended))  # columns of `Tokens.ended`
_row = attrgetter(*(f.name for f in fields(Ended)))


class WireError(OctavoError):
    """Bytes from the other process that are no message."""

    exit_code = 4


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Start(Message, tag="start", frozen=True):
    """What to run. `eos_ids` are the tokenizer's, which end a generation like the model's own."""

    config: EngineConfig
    eos_ids: tuple[int, ...]


class Submit(Message, tag="submit", frozen=True):
    """A new request."""

    request: EngineRequest


class Abort(Message, tag="abort", frozen=True):
    """End a request, or one child of it (-1: all)."""

    id: int
    child: int


class Ask(Message, tag="ask", frozen=True):
    """Ask for the state of the KV cache; `id` comes back in the answer."""

    id: int


class Ready(Message, tag="ready", frozen=True):
    """The engine runs. `load_seconds`: from `Start` to here."""

    facts: Facts
    limits: ModelLimits
    load_seconds: float


class Failed(Message, tag="failed", frozen=True):
    """The engine cannot start, or cannot go on; it exits with `exit_code`."""

    exit_code: int
    cause: str
    fix: str


class Refused(Message, tag="refused", frozen=True):
    """A submission that the scheduler does not take."""

    id: int
    cause: str
    fix: str
    param: str | None
    full: bool  # for now only: too much waits


class Tokens(Message, tag="tokens", frozen=True):
    """A `TokenBatch` as columns; see `pack` and `unpack`.

    request: int64. child, token: int32. ended: int64 rows of the fields of `Ended`.
    places: int32 positions that have log-probabilities. prompts: int64 rows of request, first position, number of
    prompt tokens reported on. chosen, values: float64; ranks, counts, ids: int32: one `chosen`, one rank and `counts`
    of `ids` and `values` for each place, then for each prompt token.
    """

    request: bytes
    child: bytes
    token: bytes
    ended: bytes
    places: bytes = b""
    chosen: bytes = b""
    ranks: bytes = b""
    counts: bytes = b""
    ids: bytes = b""
    values: bytes = b""
    prompts: bytes = b""


class Beat(Message, tag="beat", frozen=True):
    """A sign of life, with numbers."""

    numbers: EngineNumbers


class Answer(Message, tag="answer", frozen=True):
    """The answer to `Ask`: plain values for JSON."""

    id: int
    data: dict[str, Any]


ToEngine = Start | Submit | Abort | Ask
FromEngine = Ready | Failed | Refused | Tokens | Beat | Answer

_encoder = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    """`message` as one frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"A message of {len(body)} bytes is longer than a frame may be ({MAX_FRAME}).")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into messages of one direction: `ToEngine` or `FromEngine`."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Any]:
        """The messages that `data` completes. WireError when it is none; the stream is of no use after that."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= 4:
                (length,) = _LENGTH.unpack_from(buffer, at)
                if length > MAX_FRAME:
                    raise WireError(f"A frame of {length} bytes is announced; at most {MAX_FRAME} are taken.")
                if len(buffer) - at - 4 < length:
                    break
                body = bytes(buffer[at + 4 : at + 4 + length])
                at += 4 + length
                try:
                    message = self._decoder.decode(body)
                except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                    raise WireError(f"A message cannot be understood: {error}.") from None
                yield message
        finally:
            del buffer[:at]


def pack(batch: TokenBatch) -> Tokens:
    """A token batch for the wire."""
    ended = np.array([_row(e) for e in batch.ended], np.int64)
    columns = (
        batch.request_id.astype("<i8", copy=False).tobytes(),
        batch.child.astype("<i4", copy=False).tobytes(),
        batch.token.astype("<i4", copy=False).tobytes(),
        ended.astype("<i8", copy=False).tobytes(),
    )
    places = list(batch.logprobs)
    found: list[Any] = [batch.logprobs[place] for place in places]
    heads = np.array([(number, first, len(entries)) for number, first, entries in batch.prompts], np.int64)
    for _, _, entries in batch.prompts:
        found += entries
    if not found:
        return Tokens(*columns)
    return Tokens(
        *columns,
        places=np.array(places, "<i4").tobytes(),
        prompts=heads.astype("<i8", copy=False).tobytes(),
        chosen=np.array([item.chosen for item in found], "<f8").tobytes(),
        ranks=np.array([item.rank for item in found], "<i4").tobytes(),
        counts=np.array([len(item.ids) for item in found], "<i4").tobytes(),
        ids=b"".join([np.asarray(item.ids, "<i4").tobytes() for item in found]),
        values=b"".join([np.asarray(item.values, "<f8").tobytes() for item in found]),
    )


def unpack(message: Tokens) -> TokenBatch:
    """The token batch in a message; WireError when its columns do not fit together."""
    request, child, token = (
        _column(message.request, "<i8"),
        _column(message.child, "<i4"),
        _column(message.token, "<i4"),
    )
    ended = _column(message.ended, "<i8")
    if not len(request) == len(child) == len(token) or len(ended) % _ENDED:
        raise WireError("The columns of a token batch differ in length.")
    ends = [Ended(*row) for row in ended.reshape(-1, _ENDED).tolist()]
    batch = TokenBatch(request, child, token, ends)
    if message.chosen:
        _unpack_logprobs(message, batch)
    return batch


def _unpack_logprobs(message: Tokens, batch: TokenBatch) -> None:
    """Adds the log-probabilities of tokens and of prompts to `batch`."""
    places, chosen = _column(message.places, "<i4").tolist(), _column(message.chosen, "<f8").tolist()
    ranks, counts = _column(message.ranks, "<i4").tolist(), _column(message.counts, "<i4").tolist()
    ids, values, heads = _column(message.ids, "<i4"), _column(message.values, "<f8"), _column(message.prompts, "<i8")
    sound = len(chosen) == len(ranks) == len(counts) and len(heads) % 3 == 0
    sound = sound and len(ids) == len(values) == sum(counts)
    spans = heads.reshape(-1, 3).tolist() if sound else []
    lengths = [count for _, _, count in spans]
    if (
        not sound
        or len(chosen) != len(places) + sum(lengths)
        or min(counts) < 0
        or min(lengths, default=0) < 0
        or not all(0 <= place < len(batch.token) for place in places)
    ):
        raise WireError("The log-probabilities of a token batch do not fit it.")
    entries, at = [], 0
    for value, rank, count in zip(chosen, ranks, counts, strict=True):
        entries.append(TokenLogprobs(value, rank, ids[at : at + count], values[at : at + count]))
        at += count
    batch.logprobs = dict(zip(places, entries, strict=False))
    at = len(places)
    for number, first, count in spans:
        batch.prompts.append((number, first, entries[at : at + count]))
        at += count


def _column(data: bytes, dtype: str) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise WireError("A column of a token batch is cut off.")
    return np.frombuffer(data, dtype)
