"""Requests in the shapes of published faults of other servers: name -> path, body, statuses that are right.

Names say which class and, where there is one, which advisory the shape comes from.
"""

from __future__ import annotations

from typing import Any

BAD = (400,)
FINE = (200,)
GONE = (404, 405)
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def text(*statuses: int, **fields: Any) -> tuple[str, Any, tuple[int, ...]]:
    return TEXT, {"prompt": "hi", "max_tokens": 2} | fields, statuses or BAD


def chat(*statuses: int, **fields: Any) -> tuple[str, Any, tuple[int, ...]]:
    return CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | fields, statuses or BAD


def part(kind: str, **fields: Any) -> tuple[str, Any, tuple[int, ...]]:
    return chat(messages=[{"role": "user", "content": [{"type": kind, **fields}]}])


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
POISON: dict[str, tuple[str, Any, tuple[int, ...]]] = {
    "empty prompt (2024-8768)": text(prompt=""),
    "empty list": text(prompt=[]),
    "list of empty": text(prompt=[""]),
    "empty ids": text(prompt=[[]]),
    "ids out of vocabulary (116174)": text(prompt=[49152]),
    "negative id": text(prompt=[-1]),
    "id of 2^31": text(prompt=[1 << 31]),
    "id of 2^63": text(prompt=[1 << 63]),
    "boolean ids": text(prompt=[True]),
    "float ids": text(prompt=[1.5]),
    "mixed prompt": text(prompt=["a", 1]),
    "nested prompt": text(prompt=[[["a"]]]),
    "many ids (116173)": text(prompt=[5] * 300),
    "many prompts": text(prompt=["a"] * 300),
    "best_of (2024-8939)": text(best_of=100_000),
    "n (2026-34756)": text(n=1_000_000),
    "n of 0": text(n=0),
    "n negative": text(n=-1),
    "n times prompts": text(prompt=["a"] * 200, n=64),
    "logprobs (top_n, 116172)": text(logprobs=1_000_000),
    "logprobs negative": text(logprobs=-2),
    "top_logprobs": chat(logprobs=True, top_logprobs=1_000_000),
    "prompt_logprobs": text(prompt_logprobs=1_000_000),
    "min_tokens over max (114051)": text(min_tokens=10, max_tokens=2),
    "min_tokens negative": text(min_tokens=-1),
    "min_tokens and stop ids (54195)": text(min_tokens=1, stop_token_ids=[10_000_000]),
    "max_tokens 0": text(max_tokens=0),
    "max_tokens negative": text(max_tokens=-5),
    "max_tokens 2^63": text(max_tokens=1 << 63),
    "temperature NaN": (TEXT, b'{"prompt":"a","temperature":NaN}', BAD),
    "temperature Infinity": (TEXT, b'{"prompt":"a","temperature":Infinity}', BAD),
    "temperature 1e400": (TEXT, b'{"prompt":"a","temperature":1e400}', BAD),
    "temperature negative": text(temperature=-1),
    "temperature tiny": text(200, temperature=1e-40),
    "top_p 0": text(top_p=0),
    "top_p over 1": text(top_p=1.1),
    "top_k -2": text(top_k=-2),
    "top_k 2^40": text(top_k=1 << 40),
    "min_p over 1": text(min_p=2),
    "seed over 64 bits (57018)": text(seed=1 << 64),
    "seed -2^63-1": text(seed=-(1 << 63) - 1),
    "logit_bias out of vocabulary": text(logit_bias={"9999999": 5}),
    "logit_bias no number": text(logit_bias={"abc": 5}),
    "penalty NaN": (TEXT, b'{"prompt":"a","repetition_penalty":NaN}', BAD),
    "stop empty": text(stop=""),
    "stop huge list": text(stop=["a"] * 10_000),
    "stop huge string": text(stop="a" * 10_000),
    "stop of NUL": text(200, stop="\0"),
    "stop ids huge list": text(stop_token_ids=[1] * 10_000),
    "bad_words blank (47841)": text(bad_words=[" "]),
    "cache_salt long (105756)": text(cache_salt="x" * 100_000),
    "cache_salt control": text(cache_salt="a\0b"),
    "cache_salt number": text(cache_salt=5),
    "schema of unknown type (2025-48942)": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "str"}}}
    ),
    "schema missing": chat(response_format={"type": "json_schema"}),
    "schema nested": chat(response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}),
    "regex bomb (55574)": chat(structured_outputs={"regex": "(a+)+$"}),
    "regex of parentheses (2026-25048)": chat(guided_regex="(" * 20_000 + ")" * 20_000),
    "grammar": chat(guided_grammar="root ::= root"),
    "choice empty": chat(guided_choice=[""]),
    "tool pattern (2025-48944)": chat(tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
    "tool required": chat(tool_choice="required"),
    "tool without name": chat(tools=[{"type": "function", "function": {}}]),
    "tool name of code (2025-9141)": chat(tools=[{"type": "function", "function": {"name": "__import__('os')"}}]),
    "tools too many": chat(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(1000)]),
    "template in request (2024-34359)": chat(chat_template="{{ cycler.__init__.__globals__.os.popen('id').read() }}"),
    "template in kwargs (115911)": chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}),
    "kwargs set messages": chat(chat_template_kwargs={"messages": []}),
    "kwargs set tokenize (61620)": chat(chat_template_kwargs={"tokenize": True}),
    "messages empty": chat(messages=[]),
    "messages number": chat(messages=5),
    "message without role": chat(messages=[{"content": "x"}]),
    "message no object": chat(messages=["x"]),
    "role number": chat(messages=[{"role": 5, "content": "x"}]),
    "content number": chat(messages=[{"role": "user", "content": 5}]),
    "messages too many": chat(messages=[{"role": "user", "content": ""}] * 5000),
    "type of a part no text": chat(messages=[{"role": "user", "content": [{"type": []}]}]),
    "tool calls number": chat(messages=[{"role": "assistant", "tool_calls": 5}]),
    "tool choice of a list": chat(tools=[_TOOL], tool_choice={"type": "function", "function": {"name": []}}),
    "tool call without function": chat(messages=[{"role": "assistant", "tool_calls": [{}]}]),
    "tool arguments deep": chat(
        200, 400,
        messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 50_000}}]}],
    ),
    "tiny image (22773)": part("image_url", image_url={"url": "data:image/png;base64,AAAA"}),
    "image of loopback (24779)": part("image_url", image_url={"url": "http://127.0.0.1:1/"}),
    "image of a file": part("image_url", image_url={"url": "file:///etc/passwd"}),
    "audio bomb (54233)": part("input_audio", input_audio={"data": "A" * 1000, "format": "wav"}),
    "video": part("video_url", video_url={"url": "x"}),
    "part without text": part("text"),
    "placeholder text without media (44222)": chat(200, messages=[{"role": "user", "content": "<image><|image|>"}]),
    "prompt embeds (62164)": text(200, prompt_embeds="gASV"),
    "code revision (114053)": chat(200, mm_processor_kwargs={"code_revision": "x", "trust_remote_code": True}),
    "kv transfer (94622)": text(200, kv_transfer_params={"do_remote_prefill": True}),
    "extra args": text(200, vllm_xargs={"a": 1}),
    "request id of others (112266)": text(200, request_id="", rid="c"),
    "model path": text(404, model="../../etc/passwd"),
    "model NUL": text(404, model="\0"),
    "beam search": text(use_beam_search=True),
    "echo with logprobs": text(200, 400, echo=True, logprobs=1),
    "stream options without stream (B-04)": text(stream_options={"include_usage": True}),
    "priority huge": text(priority=1 << 40),
    "timeout NaN": (TEXT, b'{"prompt":"a","timeout_s":NaN}', BAD),
    "truncate 0": text(truncate_prompt_tokens=0),
    "truncate -2": text(truncate_prompt_tokens=-2),
    "lone surrogate": (TEXT, b'{"prompt":"\\ud800"}', BAD),
    "NUL in prompt": text(200, prompt="a\0b"),
    "not UTF-8": (TEXT, b'{"prompt":"\xff\xfe"}', BAD),
    "deep arrays (43)": (TEXT, b'{"prompt":' + b"[" * 100_000, BAD),
    "deep objects": (TEXT, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, BAD),
    "long number": (TEXT, b'{"prompt":"a","seed":' + b"9" * 100_000 + b"}", BAD),
    "same key twice": (TEXT, b'{"prompt":"a","prompt":[-1]}', BAD),
    "body over the limit": (TEXT, b'{"prompt":"' + b"a" * (17 << 20) + b'"}', (413,)),
    "prompt over the limit": text(prompt="a " * 100_000),
    "detokenize 2^63": ("/detokenize", {"tokens": [1 << 63]}, BAD),
    "detokenize -1": ("/detokenize", {"tokens": [-1]}, BAD),
    "tokenize both": ("/tokenize", {"prompt": "a", "messages": []}, BAD),
    "tokenize none": ("/tokenize", {}, BAD),
    "adapter path (46287)": ("/v1/load_lora_adapter", {"lora_path": "/etc"}, GONE),
    "pause (open route)": ("/pause", {}, GONE),
    "update weights": ("/update_weights", {}, GONE),
    "invocations": ("/invocations", {"prompt": "a"}, GONE),
    "collective rpc": ("/collective_rpc", {"method": "x"}, GONE),
}  # fmt: skip
