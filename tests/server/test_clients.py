"""The clients that people have: the openai SDK in all its modes, LangChain, and requests as Dify sends them."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.running import MODEL, Running, parse_events

openai = pytest.importorskip("openai")
langchain_openai = pytest.importorskip("langchain_openai")

KEY = "key-0123456789"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server():
    with Running("--api-key", KEY, "--max-model-len", "2048", key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_models(client) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_in_both_modes(client) -> None:
    ask = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 12
    assert len(whole.choices[0].logprobs.content) == 12
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    parts = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content and parts[-1].usage.completion_tokens == 12
    with client.chat.completions.stream(**ask, stop=[text[9:14]]) as stream:  # this helper wants a natural end
        assert stream.get_final_completion().choices[0].message.content == text[: text.index(text[9:14])]


def test_completions_in_both_modes(client) -> None:
    ask = {"model": MODEL, "prompt": ["One", "Two"], "max_tokens": 6, "temperature": 0, "n": 2}
    whole = client.completions.create(**ask, logprobs=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len(whole.choices[3].logprobs.tokens) == 6
    texts = dict.fromkeys(range(4), "")
    for part in client.completions.create(**ask, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices]


def test_extra_fields_and_errors(client) -> None:
    extra = {"top_k": 5, "min_tokens": 3, "ignore_eos": True, "cache_salt": "s", "priority": 3}
    made = client.completions.create(model=MODEL, prompt="x", max_tokens=3, seed=5, stop=["zzz"], extra_body=extra)
    assert made.usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert refused.value.param == "temperature" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4o", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong-0123456789").models.list()
    with pytest.raises(openai.InternalServerError) as late:
        client.completions.create(
            model=MODEL, prompt="x", max_tokens=2000, extra_body={"timeout_s": 0.001, "ignore_eos": True}
        )
    assert late.value.status_code == 504


def test_async_and_leaving_a_stream(server: Running) -> None:
    async def use() -> None:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY)
        asks = [
            client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0)
            for _ in range(20)
        ]
        texts = {reply.choices[0].message.content for reply in await asyncio.gather(*asks)}
        assert len(texts) == 1
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        await client.close()

    asyncio.run(use())
    server.idle()


def test_an_error_in_a_stream_raises(server: Running, client) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=2040, stream=True, extra_body={"ignore_eos": True, "timeout_s": 0.2}
    )
    with pytest.raises(openai.APIError, match="longer than"):
        for _ in stream:
            pass


def test_langchain(server: Running) -> None:
    def model(**fields: object):
        return langchain_openai.ChatOpenAI(
            model=MODEL,
            base_url=f"http://127.0.0.1:{server.port}/v1",
            api_key=KEY,
            temperature=0,
            max_tokens=10,
            **fields,
        )

    reply = model().invoke("Hello")
    assert reply.content and reply.usage_metadata["output_tokens"] == 10
    assert reply.response_metadata["finish_reason"] == "length"
    assert "".join(part.content for part in model().stream("Hello")) == reply.content
    assert [item.content for item in model().batch(["Hello", "Hello"])] == [reply.content] * 2
    assert asyncio.run(model().ainvoke([("system", "Be brief."), ("human", "Hello")])).content
    probs = model(logprobs=True, top_logprobs=1).invoke("Hello").response_metadata["logprobs"]
    assert len(probs["content"]) == 10


DIFY = [
    {  # a chat application, streaming
        "model": MODEL, "messages": [{"role": "system", "content": "You are helpful."}, *HELLO], "stream": True,
        "temperature": 0.7, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 16,
        "user": "b0a4b9f2", "stop": [],
    },
    {  # validation of the credentials of a model
        "model": MODEL, "messages": [{"role": "user", "content": "ping"}], "max_tokens": 5, "stream": False,
    },
    {  # an agent with tools
        "model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 16, "tool_choice": "auto", "user": "x",
        "tools": [{"type": "function", "function": {"name": "current_time", "description": "Time", "parameters":
                  {"type": "object", "properties": {"format": {"type": "string"}}, "required": []}}}],
    },
    {  # the second turn of an agent
        "model": MODEL, "stream": False, "max_tokens": 16, "response_format": {"type": "text"},
        "messages": [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "current_time", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "name": "current_time", "content": "noon"},
        ],
    },
]  # fmt: skip


@pytest.mark.parametrize("body", DIFY)
def test_requests_as_dify_sends_them(server: Running, body: dict) -> None:
    """FEATURES S16: all 2xx and of the right shape."""
    reply = server.call("/v1/chat/completions", body, headers={"authorization": f"Bearer {KEY}", "accept": "*/*"})
    assert reply.status == 200, reply
    if body["stream"]:
        events = parse_events(reply.body)
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    else:
        message = reply.json["choices"][0]["message"]
        assert message["role"] == "assistant" and isinstance(message["content"], str)
        assert set(reply.json["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    text = {"model": MODEL, "prompt": "ping", "max_tokens": 5, "stream": False}
    assert json.loads(server.call("/v1/completions", text).body)["object"] == "text_completion"
