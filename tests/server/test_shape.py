"""Property tests of what is computed in between: streamed pieces join to whole answers; the size of JSON (S12)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.async_llm import Signal, Stream
from octavo.runner.base import TokenLogprobs
from octavo.server.body import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, measure, parse
from octavo.server.job import Job
from octavo.server.problem import Problem
from octavo.server.protocol import CompletionBody
from octavo.server.shape import ChatShape, Pieces, TextShape
from octavo.server.stream import Writer
from octavo.text.outputs import RequestText
from octavo.text.tokenizer import Tokenizer
from octavo.types import SamplingParams
from tests.server.running import parse_events

TOKENS = st.lists(st.integers(3, 400) | st.integers(1000, 49151), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Any) -> Tokenizer:
    from octavo.weights.gguf import GgufCheckpoint

    return Tokenizer.from_gguf(GgufCheckpoint(smollm2_gguf).metadata)


class StubJob:
    """As much of a `Job` as a `Writer` looks at."""

    id, created = "0", 0
    choices, usage = Job.choices, Job.usage

    def __init__(self, params: SamplingParams, stream: Stream) -> None:
        self.params = params
        self.streams = [stream]


@settings(max_examples=150)
@given(
    rows=st.lists(TOKENS, min_size=1, max_size=3),
    cuts=st.lists(st.booleans(), min_size=31, max_size=31),
    interval=st.integers(1, 9),
    chat=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
    stop=st.sampled_from([None, "e", "th", "\n"]),
)
def test_pieces_join_to_the_whole(
    tokenizer: Tokenizer,
    rows: list[list[int]],
    cuts: list[bool],
    interval: int,
    chat: bool,
    logprobs: int | None,
    stop: str | None,
) -> None:
    """However the tokens come, whatever the interval, with stop strings and log-probabilities."""
    params = SamplingParams(n=len(rows), logprobs=logprobs, stop=stop, max_tokens=None)
    stream = Stream(1, RequestText("1", None, [1], params, tokenizer), Signal())
    job: Any = StubJob(params, stream)
    pieces = Pieces(tokenizer, False, tokenizer.special_ids)
    shape: Any = (
        ChatShape(pieces, logprobs, "", False) if chat else TextShape(pieces, logprobs, [""], len(rows), False)
    )
    whole: Any = (
        ChatShape(pieces, logprobs, "", False) if chat else TextShape(pieces, logprobs, [""], len(rows), False)
    )
    writer = Writer(job, shape, "m", interval, True, logprobs is None)
    data = b""
    found = None if logprobs is None else TokenLogprobs(-0.5, 1, [5, 6][:logprobs], [-0.5, -0.7][:logprobs])
    for i in range(max(map(len, rows))):
        for child, tokens in enumerate(rows):
            if i < len(tokens):
                stream.text.push(child, tokens[i], found, ends=False)
            if i == len(tokens) - 1:
                stream.text.end(child, "length")
        if cuts[i]:
            data += writer.fresh()
    events = parse_events(data + writer.fresh() + writer.end())
    assert events.pop()["usage"] == job.usage() and all(len(event["choices"]) == 1 for event in events)
    for index, _, choice in job.choices:
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        made = whole.choice(index, choice)
        if chat:
            assert "".join(item["delta"]["content"] for item in own) == made["message"]["content"]
            assert [item["delta"].get("role") for item in own] == ["assistant"] + [None] * (len(own) - 1)
        else:
            assert "".join(item["text"] for item in own) == made["text"]
        assert [item["finish_reason"] for item in own] == [None] * (len(own) - 1) + [made["finish_reason"]]
        if logprobs is not None:
            joined: dict[str, list[Any]] = {}
            for item in own:
                for name, values in item["logprobs"].items():
                    joined.setdefault(name, []).extend(values or [])
            want = {name: values or [] for name, values in made["logprobs"].items()}
            assert joined == want


JSON = st.recursive(
    st.none() | st.booleans() | st.text(alphabet='[]{}"\\ab\u00e9') | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='[]{}"\\'), inner, max_size=4),
    max_leaves=40,
)


def true_depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(true_depth, inner), default=0)


@given(JSON, st.booleans())
def test_depth_is_that_of_the_parsed_value(value: Any, ascii_only: bool) -> None:
    padded = [value] + [[]] * (MAX_DEPTH + 1)  # so many brackets that the quick look does not decide
    data = json.dumps(padded, ensure_ascii=ascii_only).encode()
    assert measure(data)[0] == true_depth(padded) or true_depth(padded) > MAX_DEPTH


def test_bodies_of_very_many_values_are_refused_unread() -> None:
    """The worst of their size: each would hold the event loop for seconds if it were parsed."""
    for piece, count in (("[],", MAX_CONTAINERS + 1), ("{},", MAX_CONTAINERS + 1), ("1,", MAX_VALUES + 2)):
        for field in ("prompt", "unknown"):
            data = b'{"prompt":"a","%b":[%b0]}' % (field.encode(), piece.encode() * count)
            with pytest.raises(Problem, match="values"):
                parse(data, CompletionBody)
    brackets = '[{],"\\' * MAX_CONTAINERS
    assert parse(json.dumps({"prompt": brackets}).encode(), CompletionBody).prompt == brackets  # inside a string


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,\\ promt012.-eE', max_size=200).map(str.encode))
def test_any_bytes_are_a_body_or_a_problem(data: bytes) -> None:
    try:
        assert isinstance(parse(data, CompletionBody), CompletionBody)
    except Problem as problem:
        assert problem.status == 400 and json.dumps(problem.body())
