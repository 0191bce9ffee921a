"""The embedded model behind HTTP: what the fake engine cannot show. Cases B-01, B-09, B-18, B-32, B-52, B-66."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.running import Running, joined

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def add(a, b):",
    "😀 😀 😀 😀",
    "日本語、日本語、日本語、",
]


OPTIONS = ("--max-model-len", "512", "--num-gpu-blocks-override", "600")


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    with Running(*OPTIONS, fake=None) as server:
        yield server


@pytest.fixture(scope="module")
def exact() -> Iterator[Running]:
    """In float32, where the same position has the same numbers in any step."""
    with Running(*OPTIONS, "--device", "torch-cpu", "--dtype", "float32", fake=None) as server:
        yield server


def text_of(server: Running, prompt: Any, **fields: Any) -> str:
    text: str = server.complete(prompt, max_tokens=12, **fields).json["choices"][0]["text"]
    return text


def test_b01_streamed_text_equals_whole_text(real: Running) -> None:
    for prompt in PROMPTS:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 20}
        whole = real.call("/v1/completions", body).json
        events = real.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
        assert joined(events) == whole["choices"][0]["text"]
        assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert all("\ufffd" not in event["choices"][0]["text"] for event in events[:-2])


@pytest.mark.slow
def test_200_seeded_prompts_streamed_equal_whole(real: Running) -> None:
    """FEATURES S10, byte for byte: texts and chats, greedy and drawn, odd characters, many at a time."""
    rng = random.Random(200)
    words = [*"time year people way day man thing life child world".split(), "日本", "😀", "naïve", "\n", "{", "\t"]

    def one(i: int) -> bool:
        text = " ".join(rng_words[i])
        body: dict[str, Any] = {"max_tokens": 24, "seed": i, "temperature": (0, 0.8, 1.5)[i % 3]}
        if i % 5 == 0:
            body["stop"] = ["the", "\n\n"]
        if i % 2:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
        else:
            path, body["prompt"] = "/v1/completions", text
        events = joined(real.events(path, body))
        choice = real.call(path, body).json["choices"][0]
        return events == (choice["message"]["content"] if i % 2 else choice["text"])

    rng_words = [rng.choices(words, k=rng.randrange(3, 30)) for _ in range(200)]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(200)))


def test_b09_seeded_samples_differ_and_repeat(real: Running) -> None:
    body = {"prompt": "My favourite animal is", "n": 4, "seed": 7, "temperature": 1.2, "max_tokens": 12}
    first, second = (
        [choice["text"] for choice in real.call("/v1/completions", body | {"ignore_eos": True}).json["choices"]]
        for _ in range(2)
    )
    assert first == second and len(set(first)) >= 3


def test_b18_top_k_over_http(real: Running) -> None:
    def ask(k: int) -> str:
        return text_of(real, "I like", temperature=1.5, seed=11, ignore_eos=True, top_k=k)

    assert ask(-1) == ask(0) == ask(10_000_000) != ask(1)
    assert ask(1) == text_of(real, "I like", ignore_eos=True)


def test_b66_answers_do_not_depend_on_neighbours(real: Running) -> None:
    alone = [text_of(real, prompt) for prompt in PROMPTS]
    got: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: got.setdefault(i, text_of(real, PROMPTS[i % 5]))) for i in range(15)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(15)] == alone * 3


def test_b08_b11_bias_and_stop_ids(real: Running) -> None:
    fields = {"logit_bias": {"0": 100}, "stop_token_ids": [0], "ignore_eos": True}
    choice = real.complete("The sky is", max_tokens=8, **fields).json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", 0)
    assert text_of(real, "The sky is", logit_bias={"260": 100}, ignore_eos=True) == " the" * 12


def test_b14_bad_words(real: Running) -> None:
    text = text_of(real, "Once upon a time", ignore_eos=True)
    for word in re.findall(r"(?<= )[a-z]+", text)[:2]:
        without = text_of(real, "Once upon a time", ignore_eos=True, bad_words=[word])
        assert not re.search(rf"(^|\W){word}(\W|$)", without)


def test_penalties_change_what_repeats(real: Running) -> None:
    plain = text_of(real, "go go go go go go go", ignore_eos=True)
    for fields in ({"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        assert text_of(real, "go go go go go go go", ignore_eos=True, **fields) != plain


def test_b67_echo_scores_the_prompt(exact: Running) -> None:
    def ask(prompt: str, k: int) -> tuple[dict[str, Any], dict[str, Any]]:
        reply = exact.complete(prompt, echo=True, max_tokens=k, logprobs=1).json
        return reply["choices"][0], reply["usage"]

    paris = "The capital of France is Paris"
    for k in (1, 0):
        choice, usage = ask(paris, k)
        found = choice["logprobs"]
        assert choice["text"].startswith(paris) and usage["completion_tokens"] == k
        assert (k == 0) == (choice["text"] == paris)
        assert {len(items) for items in found.values()} == {usage["prompt_tokens"] + k}
        assert found["token_logprobs"][0] is None and all(value <= 0 for value in found["token_logprobs"][1:])
        assert found["text_offset"][0] == 0 and "".join(found["tokens"]) == choice["text"]
        starts = [sum(map(len, found["tokens"][:i])) for i in range(len(found["tokens"]))]
        assert found["text_offset"] == starts
    tail = ask(paris, 0)[0]["logprobs"]["token_logprobs"][-1]
    assert tail > ask("The capital of France is Rome", 0)[0]["logprobs"]["token_logprobs"][-1]
    body = {"prompt": paris, "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}
    pieces: dict[str, list[Any]] = {}
    for event in exact.events("/v1/completions", body):
        for name, items in event["choices"][0]["logprobs"].items():
            pieces.setdefault(name, []).extend(items)
    assert pieces == ask(paris, 1)[0]["logprobs"]


def test_b30_prompt_logprobs_cold_and_warm(exact: Running) -> None:
    ids = [200 + i * 7 % 900 for i in range(70)]
    lists = []
    for i in range(4):
        if i == 3:
            exact.complete(ids[:48], max_tokens=1)
        choice = exact.complete(ids, max_tokens=1, prompt_logprobs=1).json["choices"][0]
        entries = choice["prompt_logprobs"]
        assert len(entries) == 70 and entries[0] is None
        lists.append([entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)])
    for other in lists[1:]:
        assert other == pytest.approx(lists[0], abs=1e-3)
    assert exact.complete(ids, prompt_logprobs=1, stream=True).status == 400
    assert len(exact.chat("Hi", prompt_logprobs=0, max_tokens=1).json["prompt_logprobs"]) > 5


def test_logprobs_are_of_the_model(real: Running) -> None:
    choice = real.chat("Say hello", logprobs=True, top_logprobs=3, max_tokens=6).json["choices"][0]
    for entry in choice["logprobs"]["content"]:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True) and entry["logprob"] == values[0] <= 0
    text = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode()
    assert text == choice["message"]["content"]


def test_a_shared_beginning_is_computed_once(real: Running) -> None:
    """FEATURES S3, S70: n = 4 on a long prompt takes few more blocks than n = 1, and a second request hits."""
    ids = [100 + i % 300 for i in range(256)]
    reply = real.complete(ids, n=4, temperature=1, seed=3, max_tokens=4, ignore_eos=True).json
    assert reply["usage"]["prompt_tokens"] == 256 and reply["usage"]["completion_tokens"] == 16
    again = real.complete(ids, max_tokens=1).json["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= 240
    state = json.loads(real.call("/debug/kv").body)
    assert state["free_blocks"] == state["total_blocks"]
