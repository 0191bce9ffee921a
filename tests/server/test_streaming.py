"""Streamed and whole answers are the same; the order and number of events; cases B-01 to B-08."""

from __future__ import annotations

import json
import random
import time

import pytest

from tests.server.running import Running, joined, parse_events, read_all

NEVER = "@@never@@never@@"


def test_streamed_text_equals_whole_text_for_200_prompts(fake: Running) -> None:
    """FEATURES S10; B-01: a character is never cut. The fake engine's tokens are parts of characters often enough."""
    rng = random.Random(5)
    words = ["😀", "日本語、", "naïve", "hello", " the ", "\n", "123", "ß"]
    halves = 0
    for i in range(200):
        prompt = "".join(rng.choices(words, k=rng.randrange(1, 12)))
        body = {"prompt": prompt, "temperature": 0, "max_tokens": rng.randrange(1, 24), "seed": i}
        whole = fake.call("/v1/completions", body).json["choices"][0]["text"]
        events = fake.events("/v1/completions", body | {"stream_interval": rng.choice([1, 1, 2, 5])})
        assert joined(events) == whole
        allowed = whole.count("\ufffd")
        assert sum(e["choices"][0]["text"].count("\ufffd") for e in events) == allowed
        halves += "\ufffd" in whole
    assert halves


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_b02_nothing_of_a_stop_string_is_sent(fake: Running, path: str) -> None:
    """B-02: a stop string over several tokens."""
    ask = {"prompt": "Tell me"} if "chat" not in path else {"messages": [{"role": "user", "content": "Tell me"}]}
    ask |= {"temperature": 0, "max_tokens": 32}
    reply = fake.call(path, ask).json["choices"][0]
    text = reply["text"] if "text" in reply else reply["message"]["content"]
    for at in (4, 9, 25):
        stop = text[at : at + 12]
        want = text[: text.index(stop)]
        reply = fake.call(path, ask | {"stop": [stop]}).json
        choice = reply["choices"][0]
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) == want
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
        events = fake.events(path, ask | {"stop": [stop], "stream_options": {"include_usage": True}})
        assert joined(events) == want
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        assert events[-1]["usage"]["completion_tokens"] == reply["usage"]["completion_tokens"]


@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_b03_held_back_text_is_sent_at_the_end(fake: Running, tokens: int) -> None:
    """B-03: a stop string that never comes costs no text."""
    body = {"prompt": "Once", "temperature": 0, "max_tokens": tokens}
    plain = fake.call("/v1/completions", body).json["choices"][0]["text"]
    events = fake.events("/v1/completions", body | {"stop": [NEVER, plain[-1:] + NEVER]})
    assert joined(events) == plain
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_b04_usage_comes_when_asked_for(fake: Running, path: str) -> None:
    """B-04: order and number of events."""
    ask = {"prompt": "A"} if "chat" not in path else {"messages": [{"role": "user", "content": "A"}]}
    ask |= {"temperature": 0, "max_tokens": 4}
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        events = fake.events(path, ask | options)
        assert all(event["choices"] and "usage" not in event for event in events)
    events = fake.events(path, ask | {"stream_options": {"include_usage": True}})
    assert [bool(event["choices"]) for event in events] == [True] * (len(events) - 1) + [False]
    assert events[-1]["usage"] == fake.call(path, ask).json["usage"] | {
        "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"]
    }
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == "length"
    assert fake.call(path, ask | {"stream_options": {"include_usage": True}}).status == 400


def test_b05_done_is_last_on_every_ending(fake: Running) -> None:
    """B-05: the body ends right after `[DONE]`, seen on a raw socket."""
    text = fake.complete("x", max_tokens=8).json["choices"][0]["text"]
    for fields in ({"max_tokens": 8}, {"max_tokens": 1}, {"max_tokens": 8, "stop": [text[3:6]]}, {"max_tokens": 300}):
        body = json.dumps({"prompt": "x", "temperature": 0, "stream": True} | fields).encode()
        with fake.connect() as sock:
            sock.sendall(fake.head("/v1/completions", body, {"connection": "close"}))
            data = read_all(sock)
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and data.count(b"[DONE]") == 1


def test_b06_a_whole_answer_ends_with_its_client(fake: Running) -> None:
    """B-06: nobody waits, nothing runs."""
    before = fake.metrics()['octavo:request_success_total{finished_reason="abort"}']
    body = json.dumps({"prompt": "x", "max_tokens": 2000, "ignore_eos": True}).encode()
    with Running("--max-model-len", "8192", fake="fake:20") as server:
        for _ in range(3):
            with server.connect() as sock:
                sock.sendall(server.head("/v1/completions", body))
                server.until(lambda found: found["octavo:num_requests_running"] == 1)
        server.idle(3)
        assert server.metrics()['octavo:request_success_total{finished_reason="abort"}'] == 3
    assert fake.metrics()['octavo:request_success_total{finished_reason="abort"}'] == before


def test_b07_logprobs_of_completions(fake: Running) -> None:
    """B-07: four parallel lists, the same streamed and whole."""
    body = {"prompt": "The sky is", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    whole = fake.call("/v1/completions", body).json["choices"][0]["logprobs"]
    assert set(whole) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert all(len(items) == 4 for items in whole.values())
    assert whole["text_offset"] == sorted(whole["text_offset"])
    assert all(value <= 0 for value in whole["token_logprobs"])
    pieces: dict[str, list] = {name: [] for name in whole}
    for event in fake.events("/v1/completions", body):
        for name, items in event["choices"][0]["logprobs"].items():
            pieces[name] += items
    assert pieces == whole


def test_b08_stop_token_ids(fake: Running) -> None:
    """B-08: the text before the id, and the id as the reason."""
    body = {"prompt": "Go", "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    ids = fake.call("/v1/completions", body).json["choices"][0]["token_ids"]
    stop = ids[7]
    choice = fake.call("/v1/completions", body | {"stop_token_ids": [stop]}).json["choices"][0]
    kept = ids[: ids.index(stop)]
    special = fake.call("/detokenize", {"tokens": kept}).json["prompt"]
    assert choice["text"] == special and choice["finish_reason"] == "stop" and choice["stop_reason"] == stop


def test_b56_bytes_of_logprobs_join_to_the_text(fake: Running) -> None:
    """B-56: parts of characters are reported as the bytes they are."""
    reply = fake.chat("😀 日本語", logprobs=True, top_logprobs=2, max_tokens=48).json["choices"][0]
    entries = reply["logprobs"]["content"]
    data = bytes(value for entry in entries for value in entry["bytes"])
    assert data.decode("utf-8", "replace") == reply["message"]["content"]
    assert all(entry["bytes"] != [239, 191, 189] for entry in entries)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_stream_interval_and_chunk_size(fake: Running) -> None:
    """FEATURES S46: events are about tokens / interval; the first and the last do not wait."""
    with Running(fake="fake:2") as server:
        for name in ("stream_interval", "chunk_size"):
            body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
            events = server.events("/v1/completions", body | {name: 32})
            assert 3 <= len(events) <= 6
            assert joined(events) == server.call("/v1/completions", body).json["choices"][0]["text"]


def test_first_event_of_a_chat_has_the_role(fake: Running) -> None:
    events = fake.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2})
    for index in (0, 1):
        deltas = [c["delta"] for e in events for c in e["choices"] if c["index"] == index]
        assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_streams_of_a_batch_keep_their_index(fake: Running) -> None:
    """B-29: several prompts, n and echo."""
    body = {"prompt": ["Red", "Green is a colour and", "Blue"], "n": 2, "max_tokens": 3, "echo": True, "seed": 1}
    whole = fake.call("/v1/completions", body).json
    events = fake.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    for i, choice in enumerate(whole["choices"]):
        assert choice["text"].startswith(body["prompt"][i // 2]) and joined(events, i) == choice["text"]
    alone = [fake.complete(prompt, max_tokens=1).json["usage"]["prompt_tokens"] for prompt in body["prompt"]]
    assert whole["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] == sum(alone)


def test_deadline(fake: Running) -> None:
    """FEATURES S47: 504 with what was used, and nothing goes on."""
    with Running("--max-model-len", "8192", fake="fake:10") as server:
        begin = time.monotonic()
        reply = server.complete(max_tokens=4000, ignore_eos=True, timeout_s=0.4)
        assert reply.status == 504 and 0.3 < time.monotonic() - begin < 3
        assert reply.error["usage"]["completion_tokens"] > 0 and reply.error["code"] == "deadline_exceeded"
        server.idle(2)
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "timeout_s": 0.4, "stream": True}
        data = server.call("/v1/completions", body).body
        assert b"[DONE]" not in data
        last = json.loads(data.decode().strip().rsplit("\n\n", 1)[-1].removeprefix("data: "))
        assert last["error"]["code"] == "deadline_exceeded"
        server.idle(2)
        assert server.metrics()['octavo:request_success_total{finished_reason="timeout"}'] == 2
        assert server.complete(timeout_s=0).status == server.complete(timeout_s=-1).status == 400
        with pytest.raises(AssertionError):
            parse_events(data)
