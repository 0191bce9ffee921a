"""The requests as clients send them, typed; and from them sampling parameters.

Fields that are not here are ignored, as OpenAI does. Fields that would change the answer but are not built are
refused unless they have the value that changes nothing: a request never gets something else than it asked for.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from octavo.server.problem import Problem
from octavo.types import RepetitionDetection, SamplingParams

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TIMEOUT = 86_400.0
MAX_LOGPROBS = 20
PRIORITIES = {"low": -10, "normal": 0, "default": 0, "auto": 0, "high": 10}

_ID = re.compile(r"-?[0-9]{1,18}")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class LoopGuard(msgspec.Struct):
    """`repetition_detection`."""

    max_pattern_size: int = 16
    min_pattern_size: int = 1
    min_count: int = 8


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that all generating routes share. None is the same as left out."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    repetition_detection: LoopGuard | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    chunk_size: int | None = None
    priority: int | str | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None


class CompletionBody(Sampling, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ChatBody(Sampling, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


# Fields that are not built yet, with the values that ask for nothing.
_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)
UNBUILT: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "use_beam_search": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "suffix": (),
}
_NOT_IN_DEMO = (
    "logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "stream_options",
    "stream_interval", "chunk_size",
)  # fmt: skip
_COPIED = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "skip_special_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "allowed_token_ids", "bad_words", "prompt_logprobs", "truncate_prompt_tokens",
)  # fmt: skip


def sampling_params(body: Sampling, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Sampling parameters of a request. RequestError for values out of range, Problem for what is not built."""
    refuse_unbuilt(body)
    if body.best_of is not None and body.best_of not in (1, body.n or 1):
        raise Problem(400, f"best_of is {body.best_of}. Leave it out; use n.", param="best_of")
    given = {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    guard = body.repetition_detection
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        priority=priority_of(body),
        logit_bias=bias_of(body),
        repetition_detection=None if guard is None else RepetitionDetection(**msgspec.structs.asdict(guard)),
    )


def bias_of(body: Sampling) -> dict[int, float] | None:
    """`logit_bias` with the ids as numbers. Raises Problem."""
    if not body.logit_bias:
        return None
    wrong = next((key for key in body.logit_bias if not _ID.fullmatch(key)), None)
    if wrong is not None:
        raise Problem(400, f"logit_bias has the key {wrong[:40]!r}. Keys are token ids.", param="logit_bias")
    return {int(key): value for key, value in body.logit_bias.items()}


def refuse_unbuilt(body: Sampling) -> None:
    """Raise Problem for the first field that would change the answer but is not built."""
    for name, neutral in UNBUILT.items():
        value = getattr(body, name, None)
        if value not in _NOTHING and value not in neutral:
            raise Problem(400, f"{name} is not supported. Leave it out.", param=name)


def check_stream(body: Sampling) -> None:
    """Raise Problem for stream options that contradict each other or are out of range."""
    if body.stream_options is not None and not body.stream:
        raise Problem(400, "stream_options needs stream: true. Set it, or leave them out.", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:  # with echo they go into the ordinary lists
        raise Problem(400, "prompt_logprobs are not streamed. Set stream to false.", param="prompt_logprobs")
    for name in ("stream_interval", "chunk_size"):
        value = getattr(body, name)
        if value is not None and not 1 <= value <= 1 << 20:
            raise Problem(400, f"{name} is {value}. Give the number of tokens of one event, at least 1.", param=name)


def check_demo(body: CompletionBody) -> None:
    """Raise Problem for what the answers of `/generate`, which are texts with their prompts, have no place for."""
    for name in _NOT_IN_DEMO:
        value = getattr(body, name)
        if value is not None and value is not False:  # 0 log-probabilities are asked for, too
            raise Problem(400, f"{name} is not for this route. Use /v1/completions.", param=name)
    if body.echo is False:
        raise Problem(
            400, "This route always sends the prompt. Leave echo out, or use /v1/completions.", param="echo"
        )


def timeout_of(body: Sampling, default: float) -> float:
    """Seconds that the request may take, 0 for no limit. Raises Problem."""
    if body.timeout_s is None:
        return default
    if not 0 < body.timeout_s <= MAX_TIMEOUT:
        raise Problem(
            400, f"timeout_s is {body.timeout_s}. Give seconds, up to {MAX_TIMEOUT:.0f}.", param="timeout_s"
        )
    return body.timeout_s


def priority_of(body: Sampling) -> int:
    """The priority as a number: larger is served earlier. Raises Problem."""
    value = body.priority
    if value is None:
        return 0
    if isinstance(value, str):
        if value not in PRIORITIES:
            words = ", ".join(PRIORITIES)
            raise Problem(400, f"priority is {value[:40]!r}. Give an integer, or one of {words}.", param="priority")
        return PRIORITIES[value]
    return value


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a completions request: a text, token ids, or a list of either. Raises Problem."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(type(item) is int for item in prompt):
        return [prompt]
    if not prompt or len(prompt) > MAX_PROMPTS:
        raise Problem(400, f"There are {len(prompt)} prompts. Give 1 to {MAX_PROMPTS}.", param="prompt")
    for i, item in enumerate(prompt):
        ids = isinstance(item, list) and all(type(token) is int for token in item)
        if not isinstance(item, str) and not ids:
            raise Problem(400, f"Prompt {i} is neither a text nor a list of token ids. Mend it.", param="prompt")
    return prompt


def check_tools(body: ChatBody) -> None:
    """Raise Problem for tools that are malformed or a choice that cannot be kept."""
    tools, names = body.tools or [], set()
    if len(tools) > MAX_TOOLS:
        raise Problem(400, f"There are {len(tools)} tools. Give at most {MAX_TOOLS}.", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type", "function") != "function" or not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise Problem(400, f"Tool {i} is no function with a name. Mend it.", param="tools")
        if name in names:
            raise Problem(400, f"Two tools are named {name}. Rename one.", param="tools")
        names.add(name)
    if body.tool_choice in (None, "none", "auto"):
        return
    if isinstance(body.tool_choice, dict):
        function = body.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in names:
            raise Problem(
                400, "tool_choice names a function that is not among the tools. Add it.", param="tool_choice"
            )
    elif body.tool_choice != "required":
        raise Problem(400, "tool_choice is none of none, auto, required or a function.", param="tool_choice")
    elif not names:
        raise Problem(400, "tool_choice is required, but there are no tools. Add some.", param="tool_choice")
    raise Problem(400, "Forced tool calls are not supported. Use tool_choice auto.", param="tool_choice")


def chat_logprobs(body: ChatBody) -> int | None:
    """How many alternatives a chat wants for each token; None for no log-probabilities. Raises Problem."""
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise Problem(400, f"top_logprobs is {body.top_logprobs}. Give 0 to {MAX_LOGPROBS}.", param="top_logprobs")
    if not body.logprobs:
        if body.top_logprobs:
            raise Problem(400, "top_logprobs needs logprobs: true. Set it.", param="top_logprobs")
        return None
    return body.top_logprobs or 0
