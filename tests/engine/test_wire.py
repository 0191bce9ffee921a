"""Messages between the processes: there and back, and S11: whatever arrives, the answer is an error object."""

from __future__ import annotations

import random
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest

from octavo.config import EngineConfig, ModelConfig
from octavo.engine.wire import (
    MAX_FRAME,
    Abort,
    Answer,
    Beat,
    Failed,
    Frames,
    FromEngine,
    Start,
    Submit,
    ToEngine,
    Tokens,
    WireError,
    frame,
    pack,
    unpack,
)
from octavo.metrics.server import EngineNumbers
from octavo.runner.base import TokenLogprobs
from octavo.scheduler.records import Ended, TokenBatch
from octavo.types import EngineRequest

REQUEST = EngineRequest(
    id=7, prompt=b"\1\0\0\0", keys=b"", root=b"r" * 16, limit=9, stop_ids=(1, 2), seed=(1 << 64) - 1
)
SENT = [Start(EngineConfig(ModelConfig(model="m")), (1, 2)), Submit(REQUEST), Abort(7, -1)]
BEAT = Beat(EngineNumbers(1, 2, 3, 4, 5, 6, 0.5, {"steps": 7}))


def batch() -> TokenBatch:
    made = TokenBatch(
        np.array([5, 1 << 40], np.int64), np.array([0, 3], np.int32), np.array([9, 49151], np.int32),
        [Ended(5, 0, 1, 16, 2), Ended(6, 1, 3, 0, 0)],
    )  # fmt: skip
    made.logprobs = {
        1: TokenLogprobs(-0.25, 3, np.array([4, 5], np.int32), np.array([-0.1, -0.2], np.float32)),
        0: TokenLogprobs(-1.0, 1, np.empty(0, np.int32), np.empty(0, np.float32)),
    }
    entry = TokenLogprobs(-2.5, 7, np.array([3], np.int32), np.array([-0.5], np.float32))
    made.prompts = [(8, 1, [entry, entry]), (9, 65, [entry])]
    return made


def test_messages_there_and_back_in_pieces_of_any_size() -> None:
    data = b"".join(map(frame, SENT))
    for size in (1, 3, 64, len(data)):
        frames = Frames(ToEngine)
        got = [m for at in range(0, len(data), size) for m in frames.feed(data[at : at + size])]
        assert got == SENT
    replies = [BEAT, Failed(4, "a", "b"), Answer(3, {"a": [1, {"b": None}]})]
    assert list(Frames(FromEngine).feed(b"".join(map(frame, replies)))) == replies


def test_token_batches_there_and_back() -> None:
    made = batch()
    (message,) = Frames(FromEngine).feed(frame(pack(made)))
    got = unpack(message)
    for name in ("request_id", "child", "token"):
        assert np.array_equal(getattr(got, name), getattr(made, name))
    assert got.ended == made.ended and set(got.logprobs) == {0, 1}
    for place, want in made.logprobs.items():
        found = got.logprobs[place]
        assert (found.chosen, found.rank) == (want.chosen, want.rank)
        assert np.array_equal(found.ids, want.ids) and np.allclose(found.values, want.values)
    assert [(number, first, len(entries)) for number, first, entries in got.prompts] == [(8, 1, 2), (9, 65, 1)]
    assert got.prompts[1][2][0].ids.tolist() == [3] and got.prompts[0][2][1].rank == 7
    assert not unpack(pack(TokenBatch.of_ends([]))).ended


def test_prompts_without_tokens_and_counts_that_lie() -> None:
    made = TokenBatch.of_ends([])
    made.prompts = [(1, 1, batch().prompts[0][2])]
    sound = pack(made)
    assert unpack(sound).prompts[0][1] == 1
    for count in (3, 1, -1, 1 << 40):
        heads = np.array([1, 1, count], "<i8").tobytes()
        with pytest.raises(WireError):
            unpack(msgspec.structs.replace(sound, prompts=heads))


def test_a_length_of_2_gib_is_refused_before_it_is_believed() -> None:
    tracemalloc.start()
    for length in (MAX_FRAME + 1, 1 << 31, (1 << 32) - 1):
        with pytest.raises(WireError, match=str(length)):
            list(Frames(ToEngine).feed(struct.pack("<I", length) + b"x" * 100))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_wrong_direction_and_wrong_columns() -> None:
    with pytest.raises(WireError):
        list(Frames(ToEngine).feed(frame(BEAT)))
    good = pack(batch())
    for field in ("request", "child", "token", "ended", "places", "chosen", "counts", "ids", "values"):
        values = {name: getattr(good, name) for name in good.__struct_fields__}
        for wrong in (values[field][:-1], values[field] + values[field][-8:], b"\xff" * len(values[field])):
            if field in ("request", "child", "token", "chosen", "values", "ids", "ended") and wrong[:1] == b"\xff":
                continue  # other numbers, but a sound batch
            with pytest.raises(WireError):
                unpack(Tokens(**values | {field: wrong}))


@pytest.mark.parametrize("frames", [20_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_s11_mutated_frames(frames: int) -> None:
    """Cut, flipped, joined and made-up bytes: messages or WireError, and little memory."""
    rng = random.Random(3)
    seeds = [*map(frame, SENT), frame(BEAT), frame(pack(batch()))]
    outcomes = {"message": 0, "error": 0, "more": 0}
    tracemalloc.start()
    for _ in range(frames):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 5)):
            how = rng.randrange(5)
            at = rng.randrange(len(data)) if data else 0
            if how == 0 and data:
                data[at] = rng.randrange(256)
            elif how == 1:
                del data[at:]
            elif how == 2:
                data[at:at] = rng.choice(seeds)[: rng.randrange(40)]
            elif how == 3:
                data[at : at + 4] = struct.pack("<I", rng.choice([0, 1, len(data), 1 << 31, rng.getrandbits(32)]))
            elif data:
                del data[at : at + rng.randrange(8)]
        try:
            got = list(Frames(rng.choice([ToEngine, FromEngine])).feed(bytes(data)))
            for message in got:
                if isinstance(message, Tokens):
                    unpack(message)
            outcomes["message" if got else "more"] += 1
        except WireError:
            outcomes["error"] += 1
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert all(outcomes.values()), outcomes
