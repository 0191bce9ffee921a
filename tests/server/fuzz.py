"""Requests that nobody should send, made from a seed: wrong types, wrong ranges, broken JSON, broken HTTP."""

from __future__ import annotations

import json
import random
from typing import Any

NUMBERS: list[Any] = [0, 1, -1, 2, 16, 0.5, 1.0, -0.0, 1e-9, 1e9, 1 << 31, 1 << 63, -(1 << 63), 1 << 64, 10**40, 1.5]
ODD: list[Any] = [None, True, False, "", "1", "nan", [], [None], {}, {"a": 1}, [[]], "\x00", "x" * 300, [1, "a"]]
TEXTS = ["Hello", "", " ", "\x00", "😀" * 9, "<|im_end|>", "a\nb", "{{ 7*7 }}", "\u202e", "日本", "x" * 3000, "�"]
COUNTS = [None, 0, 1, 2, 3, 8, 24, -1, 1.5, "4", True, 10**9]
FIELDS: dict[str, list[Any]] = {
    "model": [None, "SmolLM2-135M-Instruct", "nope", "", 5, "../../x", "\x00"],
    "n": COUNTS, "max_tokens": COUNTS, "min_tokens": COUNTS, "best_of": COUNTS, "max_completion_tokens": COUNTS,
    "temperature": [*NUMBERS, *ODD], "top_p": [*NUMBERS, *ODD], "min_p": [*NUMBERS, *ODD], "top_k": [*NUMBERS, *ODD],
    "seed": [*NUMBERS, *ODD], "presence_penalty": [*NUMBERS, *ODD], "frequency_penalty": [*NUMBERS, *ODD],
    "repetition_penalty": [*NUMBERS, *ODD], "logit_bias": [{"5": 1}, {"-1": 1}, {"a": 1}, {"5": "x"}, *ODD],
    "stop": [*TEXTS, *ODD, ["a", "b"], ["a"] * 99, [""], "zq" * 200], "stop_token_ids": [[1], [-1], [1 << 40], *ODD],
    "logprobs": [*COUNTS, *ODD, 20, 21], "top_logprobs": [*COUNTS, 20, 21], "echo": [True, False, 1, "yes"],
    "stream": [True, False, None, "true", 1],
    "stream_options": [None, {}, {"include_usage": True}, 5, {"include_usage": 7}],
    "stream_interval": COUNTS, "chunk_size": COUNTS, "ignore_eos": ODD, "include_stop_str_in_output": ODD,
    "skip_special_tokens": ODD, "cache_salt": [*TEXTS, 5, "s"], "priority": [0, 5, -5, "high", "low", "?", 1e9, *ODD],
    "truncate_prompt_tokens": [*COUNTS, -1, 5],
    "response_format": [None, {"type": "text"}, {"type": "json_object"}, 5],
    "tools": [None, [], [{}], [{"type": "function", "function": {"name": "f"}}], 5, [[]], [{"function": 5}]],
    "tool_choice": [None, "none", "auto", "required", "x", 5, {}, {"function": {"name": "f"}}],
    "chat_template": [None, "{{ messages }}", "{%", "{{ 1/0 }}"], "chat_template_kwargs": [None, {}, {"tools": 1}, 5],
    "add_generation_prompt": ODD, "continue_final_message": ODD, "documents": [None, [], [{}], 5], "suffix": TEXTS,
    "return_token_ids": [True, False, 5], "return_tokens_as_token_ids": [True, 5], "add_special_tokens": ODD,
    "guided_json": [None, {}, {"type": "str"}], "user": ODD, "banana": ODD, "timeout_s": [None, -1, 0, "x", 1e12, 30],
    "bad_words": [[" "], [""], *ODD], "allowed_token_ids": [[1], [-1], *ODD], "prompt_logprobs": COUNTS,
}  # fmt: skip
PATHS = ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"]
OTHERS = ["/v1/models", "/v1/models/x", "/health", "/metrics", "/debug/kv", "/version", "/nope", "/v1/%63ompletions"]


def prompt(rng: random.Random) -> Any:
    kinds = [
        lambda: rng.choice(TEXTS),
        lambda: [rng.choice(TEXTS) for _ in range(rng.randrange(4))],
        lambda: [rng.choice([0, 1, 5, 49151, 49152, -1, 1 << 40]) for _ in range(rng.randrange(300))],
        lambda: [[rng.randrange(49152) for _ in range(rng.randrange(40))] for _ in range(rng.randrange(4))],
        lambda: rng.choice([*ODD, *NUMBERS]),
    ]
    return rng.choice(kinds)()


def messages(rng: random.Random) -> Any:
    def content() -> Any:
        parts = [
            {"type": "text", "text": rng.choice(TEXTS)},
            {"type": "image_url", "image_url": {"url": "file:///x"}},
        ]
        return rng.choice([rng.choice(TEXTS), rng.sample(parts, rng.randrange(3)), rng.choice(ODD)])

    if rng.random() < 0.1:
        return rng.choice([*ODD, *NUMBERS])
    roles = ["user", "assistant", "system", "tool", "developer", "", 5, None]
    return [{"role": rng.choice(roles[: rng.choice([3, 8])]), "content": content()} for _ in range(rng.randrange(4))]


def body(rng: random.Random, path: str) -> dict[str, Any]:
    made: dict[str, Any] = {"max_tokens": rng.choice([1, 3, 8])}
    if path == "/detokenize":
        made["tokens"] = prompt(rng)
    elif "chat" in path or (path == "/tokenize" and rng.random() < 0.4):
        made["messages"] = messages(rng)
    else:
        made["prompt"] = prompt(rng)
    if rng.random() < 0.3:  # mostly sound, so that the deep parts are reached
        made["messages" if "chat" in path else "prompt"] = (
            [{"role": "user", "content": "hi"}] if "chat" in path else rng.choice(["hi", [5, 6], ["a", "b"]])
        )
    for name in rng.sample(sorted(FIELDS), rng.choice([0, 1, 1, 2, 3, 6])):
        made[name] = rng.choice(FIELDS[name])
    return made


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed at random places."""
    made = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(made) + 1)
        how = rng.randrange(5)
        if how == 0:
            made[at : at + 1] = bytes([rng.randrange(256)])
        elif how == 1:
            del made[at : at + rng.randrange(9)]
        elif how == 2:
            made[at:at] = rng.choice(
                [b"NaN", b"Infinity", b"1e999", b"\x00", b"\\ud800", b"[" * 70, b"\xff", b'"', b"-"]
            )
        elif how == 3:
            made[at:at] = made[rng.randrange(len(made) + 1) :][:20]
        else:
            del made[at:]
    return bytes(made)


def request(rng: random.Random) -> bytes:
    """One request as bytes, the connection to be closed after it."""
    if rng.random() < 0.12:
        return broken_http(rng)
    if rng.random() < 0.1:
        return head(rng.choice(["GET", "POST", "PUT", "HEAD", "OPTIONS"]), rng.choice(OTHERS), b"")
    path = rng.choice(PATHS[:2] * 3 + PATHS)
    data = json.dumps(body(rng, path), ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        data = mutate(rng, data)
    return head("POST", path, data)


def head(method: str, path: str, data: bytes, *fields: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {len(data)}", *fields]).encode("latin-1") + b"\r\n\r\n" + data


def broken_http(rng: random.Random) -> bytes:
    """Smuggling forms, chunk abuse, odd lines, noise."""
    good = b'{"prompt":"hi","max_tokens":1}'
    whole = head("POST", "/v1/completions", good)
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
    kinds = [
        lambda: whole.replace(b"connection: close", b"transfer-encoding: chunked"),
        lambda: chunked + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(good), good),
        lambda: chunked + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n" + good,
        lambda: chunked + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + good,
        lambda: chunked + b"transfer-encoding: chunked, identity\r\n\r\n" + good,
        lambda: chunked + b"transfer-encoding: xchunked\r\n\r\n" + good,
        lambda: chunked + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + good,
        lambda: whole.replace(b"HTTP/1.1", rng.choice([b"HTTP/9.9", b"HTTP/1.0", b"HTTP/2", b"", b"ICY"])),
        lambda: whole.replace(
            b"/v1/", rng.choice([b"//v1/", b"/v1/../", b"/\x00", b"/%00", b"http://[/", b"*", b" "]), 1
        ),
        lambda: whole.replace(b"host: localhost", rng.choice([b"host:", b"host: a\r\nhost: b", b"", b"host: \xff"])),
        lambda: whole.replace(b"\r\n", b"\n"),
        lambda: whole.replace(b": ", b" : "),
        lambda: whole.replace(b"connection: close", b"expect: 100-continue\r\nconnection: close"),
        lambda: whole.replace(b"connection: close", b"upgrade: websocket\r\nconnection: upgrade, close"),
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n",
        lambda: bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200))) + b"\r\n\r\n",
        lambda: b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        lambda: mutate(rng, whole),
        lambda: whole[: rng.randrange(len(whole))],
        lambda: whole.replace(b"connection: close\r\n", b"") + whole,  # two at once
    ]
    return rng.choice(kinds)()
