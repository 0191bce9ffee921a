"""Chat messages to prompt text, through the model's Jinja template in a bounded sandbox.

Messages come as the OpenAI API has them and are brought to the shape that templates expect: content is one
string, arguments of tool calls are a mapping. Everything that goes wrong is a `RequestError`: the template may
come from the request, and a template may refuse messages on purpose.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from octavo.errors import RequestError
from octavo.text import sandbox

_RESERVED = frozenset(
    "messages tools add_generation_prompt continue_final_message bos_token eos_token chat_template tokenize "
    "raise_exception strftime_now range namespace dict loop self caller".split()
)
_MAX_REASON = 300
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    bos_token: str = "",
    eos_token: str = "",
    extra: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of `messages`; encode it with `add_special_tokens=False`.

    `continue_final_message` ends the text inside the last message, so that the model goes on with it; it
    excludes `add_generation_prompt`. `extra` are further variables for the template, such as
    `enable_thinking`. RequestError names the field at fault.
    """
    if template is None:
        raise RequestError(
            "The model has no chat template.", "Use completions, or start with a chat template.", param="messages"
        )
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            "Set one of them to false.",
            param="continue_final_message",
        )
    variables = dict(extra or {})
    if clash := _RESERVED.intersection(variables):
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(sorted(clash))}.",
            "Leave it out.",
            param="chat_template_kwargs",
        )
    prepared = prepare_messages(messages)
    marker = ""
    if continue_final_message:
        marker = _mark_end(prepared)
    variables |= {
        "messages": prepared,
        "tools": None if tools is None else list(tools),
        "documents": variables.get("documents"),
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    text = _render(template, variables)
    return _cut_at(marker, text) if marker else text


def prepare_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of `messages` with content as one string and tool-call arguments as mappings."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages is no list.", "Send a list of objects.", param="messages")
    if not messages:
        raise RequestError("There are no messages.", "Send at least one.", param="messages")
    prepared = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"Message {index} is not an object with a role.", param="messages")
        copy = dict(message)
        copy["content"] = _joined_content(message.get("content"), index)
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, (list, tuple)):
                raise RequestError(f"The tool_calls of message {index} are no list.", param="messages")
            copy["tool_calls"] = [_with_mapping(call, index) for call in calls]
        prepared.append(copy)
    return prepared


def _joined_content(content: Any, index: int) -> str:
    """The text of a message: a string, a list of parts (joined by line ends), or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"The content of message {index} is no string or list of parts.", param="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        text = part if isinstance(part, str) else part.get(field) if field is not None else None
        if not isinstance(text, str):
            raise RequestError(
                f"Message {index} has a part of type {_named(kind)} without text.",
                "This model reads parts of type 'text' only.",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _named(kind: Any) -> str:
    """A type as a message may show it."""
    return repr(kind[:40]) if isinstance(kind, str) else "null" if kind is None else f"({type(kind).__name__})"


def _with_mapping(call: Any, index: int) -> Any:
    """A tool call whose arguments, a JSON object in a string on the wire, are a mapping for the template."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError(f"Message {index} has a tool call without a function.", param="messages")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return dict(call) | {"function": function}


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Appends a marker to the last message, where the text is to be cut.

    The space after the marker shows whether the template trims the message.
    """
    marker = uuid.uuid4().hex
    messages[-1]["content"] += marker + " "
    return marker


def _cut_at(marker: str, text: str) -> str:
    start = text.rfind(marker)
    if start < 0:
        raise RequestError(
            "The chat template leaves out the final message, which was to be continued.",
            "Set continue_final_message to false.",
            param="continue_final_message",
        )
    head = text[:start]
    return head if text[start + len(marker) :].startswith(" ") else head.rstrip()


def _render(template: str, variables: dict[str, Any]) -> str:
    try:
        return sandbox.render(template, variables)
    except sandbox.LimitError as error:
        raise RequestError(f"The chat template was stopped: {_brief(error)}.", param="chat_template") from None
    except TemplateSyntaxError as error:
        reason = f"{_brief(error)}, line {error.lineno}"
        raise RequestError(f"The chat template is not valid ({reason}).", param="chat_template") from None
    except TemplateError as error:
        raise RequestError(f"The chat template refused the messages: {_brief(error)}.", param="messages") from None
    except Exception as error:  # whatever the template's expressions raise
        reason = f"{type(error).__name__}: {_brief(error)}"
        raise RequestError(f"The chat template failed on these messages ({reason}).", param="messages") from None


def _brief(error: Exception) -> str:
    """The message of an error, which a template may have filled, cut to a length for a log."""
    text = error.message if isinstance(error, TemplateError) else str(error)
    text = text or ""
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."
