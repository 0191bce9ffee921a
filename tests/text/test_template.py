"""Chat templates: equal to `transformers` for honest ones, stopped for hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.text import sandbox
from octavo.text.template import prepare_messages, render_chat
from octavo.text.tokenizer import Tokenizer

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2-greedy.json"
USER = [{"role": "user", "content": "hi"}]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is <b>1+1</b>? \n"},
    {"role": "assistant", "content": "2 — \"two\" 😀"},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather, \"now\" & <here>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALLS = [
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "22 C"},
]

# Each uses other parts of the language as real templates do.
TEMPLATES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "namespace": "{%- set ns = namespace(last=-1, seen=[]) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% set ns.seen = ns.seen + [m.content | trim] %}{% endif %}{% endfor %}"
    "{{ ns.last }} {{ ns.seen | join(' / ') }} {{ ns.seen | length }} {{ ns.seen }}",
    "macros": "{% macro turn(role, text, sep='\\n') -%}<{{ role | upper }}>{{ sep }}{{ text }}{%- endmacro %}"
    "{% for m in messages recursive %}{{ turn(m.role, m.content.split('\\n')[0].strip(), sep=': ') }}\n{% endfor %}"
    "{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}z{% endcall %}",
    "tools": "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{{ tool.function | tojson(indent=2) }}"
    "{% for key, value in tool.function.parameters.properties.items() %}{{ key }}={{ value.type }}{% endfor %}"
    "{% endfor %}{% endif %}{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}"
    "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}",
    "filters": "{{ messages | map(attribute='role') | unique | list | tojson }} "
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} "
    "{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | join(', ') }} "
    "{{ [3, 1, 2] | sort | reverse | first }} {{ {'b': 1, 'a': 2} | dictsort }} {{ [1, 2] | last }} "
    "{{ 'ab' | replace('a', 'x') | capitalize }} {{ none | default('d', true) }} {{ '5' | int + 1 }} "
    "{{ 'a\nb' | indent(2) }} {{ 2.5 | string ~ true ~ none }} {{ undefined_name }} {{ 7 % 4 }} {{ 'x' * 3 }} "
    "{{ 7 // 2 }} {{ -3 | abs }} {{ ['b', 'a'] | max }} {{ messages | map('length') | list }} {{ 'a-b c' | title }}",
    "control": "{% for m in messages if m.role != 'system' %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{{ loop.last }}{{ loop.previtem.role }}"
    "{% else %}none{% endfor %}{% set text %}a{{ messages | length }}{% endset %}{{ text }}{{ text[::-1] }}"
    "{% generation %}g{% endgeneration %}{{ messages[-1:][0].content[:3] }}"
    "{% for i in range(3, 0, -1) %}{{ i }}{% endfor %}"
    "{{ 'yes' if 'user' in messages[-1].values() and 'role' in messages[0] else 'no' }}"
    "{{ bos_token }}{{ eos_token }}",
    "methods": "{{ 'a,b'.split(',') }}{{ 'x'.join(['1', '2']) }}{{ ' a '.strip() }}{{ 'abc'.replace('b', '') }}"
    "{{ 'Ab'.lower() }}{{ 'ab'.startswith('a') }}{{ {'k': 1}.get('z', 5) }}{{ 'a'.upper().title() }}"
    "{% for m in messages %}{{ 'aXb'.partition('X') }}{{ m.get('content').rstrip() }}"
    "{{ m.items() | list }}{% endfor %}",
    "empty": "{% if messages | selectattr('role', 'equalto', 'nobody') %}generators are true{% endif %}",
}


@pytest.fixture(scope="module")
def fast() -> Any:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def expected(fast: Any, template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"add_generation_prompt": True} | options
    text = fast.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def mine(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>", **options)


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("messages", [CONVERSATION, CALLS, USER], ids=["conversation", "calls", "user"])
def test_equals_transformers(fast: Any, name: str, messages: list[dict[str, Any]]) -> None:
    template = TEMPLATES[name]
    for tools in (None, TOOLS):
        assert mine(template, messages, tools=tools) == expected(fast, template, messages, tools=tools)
    assert mine(template, messages, add_generation_prompt=False) == expected(
        fast, template, messages, add_generation_prompt=False
    )


def test_smollm2_equals_transformers_and_the_recorded_prompts(fast: Any, smollm2: Tokenizer) -> None:
    template = smollm2.chat_template
    assert template is not None
    for messages in (CONVERSATION, USER, CONVERSATION[:2]):
        assert mine(template, messages) == expected(fast, template, messages)
    rows = [row for row in json.loads(REFERENCE.read_text())["rows"] if row["kind"] == "chat"]
    assert rows
    for row in rows:
        text = render_chat(template, [{"role": "user", "content": row["user_text"]}])
        assert text == row["prompt"]
        assert smollm2.encode(text, add_special_tokens=False) == row["prompt_ids"]


def test_model_without_template() -> None:
    """Case B-51."""
    with pytest.raises(RequestError, match="no chat template"):
        render_chat(None, USER)


def test_continue_final_message(smollm2: Tokenizer) -> None:
    """Case B-52."""
    messages = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "1, 2, 3,"}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    text = render_chat(smollm2.chat_template, messages, **options)
    closed = render_chat(smollm2.chat_template, messages, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\n1, 2, 3,") and closed == text + "<|im_end|>\n"
    assert messages[-1]["content"] == "1, 2, 3,"
    with pytest.raises(RequestError, match="exclude each other"):
        render_chat(smollm2.chat_template, messages, continue_final_message=True)
    with pytest.raises(RequestError, match="leaves out"):
        render_chat("{{ messages[0].content }}", messages, **options)


@pytest.mark.parametrize("content", ["1, 2, ", " x", "x \n", "<|im_end|>"])
@pytest.mark.parametrize(
    "template",
    [TEMPLATES["chatml"], "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"],
    ids=["as is", "trimmed"],
)
def test_continue_equals_transformers(fast: Any, template: str, content: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert mine(template, messages, **options) == expected(fast, template, messages, **options)


def test_content_parts() -> None:
    """Case B-53."""
    parts = [{"type": "text", "text": "Alpha "}, {"type": "text", "text": "Beta"}]
    template = TEMPLATES["chatml"]
    joined = render_chat(template, [{"role": "user", "content": parts}])
    assert joined == render_chat(template, [{"role": "user", "content": "Alpha \nBeta"}])
    assert render_chat(template, [{"role": "user", "content": []}]) == render_chat(
        template, [{"role": "user", "content": ""}]
    )
    image = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    for bad in ([{"type": "text"}], [{"text": "x"}], [{"type": "video"}], [image], [5], [None], 5, {"a": 1}):
        with pytest.raises(RequestError) as caught:
            render_chat(template, [{"role": "user", "content": bad}])
        assert caught.value.param == "messages"


def test_replayed_tool_calls() -> None:
    """Case B-50."""

    def call(arguments: Any) -> list[dict[str, Any]]:
        function = {"name": "get_weather", "arguments": arguments}
        calls = [{"id": "c1", "type": "function", "function": function}]
        return [*USER, {"role": "assistant", "content": None, "tool_calls": calls}]

    def arguments_of(messages: list[dict[str, Any]]) -> Any:
        return prepare_messages(messages)[1]["tool_calls"][0]["function"]["arguments"]

    original = call('{"city": "Paris"}')
    assert arguments_of(original) == {"city": "Paris"}
    assert original[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    assert prepare_messages(original)[1]["content"] == ""
    assert arguments_of(call("")) == {}
    for odd in ("not json", "[1]", "[" * 100_000, {"city": "Paris"}, None):
        assert arguments_of(call(odd)) == odd
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "22 C"}]}
    assert prepare_messages([result])[0]["content"] == "22 C"
    for bad in ([{}], [5], [{"function": 5}]):
        with pytest.raises(RequestError, match="without a function"):
            prepare_messages([{"role": "assistant", "tool_calls": bad}])


@pytest.mark.parametrize("messages", [[], [5], [{"content": "x"}], [{"role": 1, "content": "x"}]])
def test_messages_that_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        render_chat("x", messages)
    assert caught.value.param == "messages"


def test_extra_variables() -> None:
    """Case B-54: unknown names are harmless, ours cannot be replaced."""
    extra = {"enable_thinking": False, "x": {"y": 1}}
    assert render_chat("{{ enable_thinking }}{{ x.y }}", USER, extra=extra) == "False1"
    for name in ("messages", "chat_template", "range", "raise_exception", "bos_token"):
        with pytest.raises(RequestError) as caught:
            render_chat("x", USER, extra={name: "y"})
        assert caught.value.param == "chat_template_kwargs"


def test_template_refuses_messages_itself() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render_chat("{{ raise_exception('roles must alternate') }}", USER)
    assert caught.value.param == "messages"
    with pytest.raises(RequestError) as caught:
        render_chat("{{ raise_exception('x' * 1000000) }}", USER)
    assert len(str(caught.value)) < 500


def test_strftime() -> None:
    assert len(render_chat("{{ strftime_now('%d %b %Y') }}", USER)) >= 11


@pytest.mark.parametrize("template", ["{% if %}", "{{ 1 | nofilter }}", "{% for x in %}", "{{ x", "{% nope %}"])
def test_invalid_templates(template: str) -> None:
    with pytest.raises(RequestError, match="not valid"):
        render_chat(template, USER)


def test_failing_expressions() -> None:
    for template in ("{{ 1 / 0 }}", "{{ messages[0].content.x.y }}", "{{ 'a' + 1 }}", "{{ [] | sort(5) }}{{ x.y }}"):
        with pytest.raises(RequestError):
            render_chat(template, USER)


_STRING = "{% set s = 'a' * 4000000 %}"
_LIST = "{% set s = range(100000) | list %}"
_GROW = "{% set ns = namespace(s=[1], t=[1], text='abcdefgh', n=3) %}{% for i in range(100) %}"

# Case B-54 and its relatives: each would run for hours, fill the memory, or reach Python objects.
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "silent loops": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}x{% endfor %}{% endfor %}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "repeated string": "{{ 'a' * 10**10 }}",
    "repeated list": "{{ [1] * 10**10 }}",
    "doubling ~": _GROW + "{% set ns.text = ns.text ~ ns.text %}{% endfor %}",
    "doubling +": _GROW + "{% set ns.text = ns.text + ns.text %}{% endfor %}",
    "doubling list": _GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling set": "{% set a %}abcdefgh{% endset %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "shared lists printed": _GROW + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "shared lists as JSON": _GROW + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}",
    "shared lists compared": _GROW
    + "{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}",
    "deep JSON indented": _GROW + "{% set ns.s = [ns.s, 1] %}{% endfor %}"
    "{% for i in range(99999) %}{% set x = ns.s | tojson(indent=64) %}{% endfor %}",
    "big number": "{{ 10 ** (10 ** 10) }}",
    "squaring": _GROW + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "macro tree": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "replace": _STRING + "{{ s.replace('a', s) }}",
    "replace filter": _STRING + "{{ s | replace('', s) }}",
    "join": _STRING + "{{ s.join(s) }}",
    "join filter": _STRING + "{{ s | join(s) }}",
    "strip": "{% set s = 'a' * 1000000 %}{{ s.strip('bcdefghijk' * 100000 ~ 'a') }}",
    "split": _STRING + "{{ s.split('a') }}",
    "title": _STRING + "{{ s | title }}",
    "upper in a loop": _STRING + "{% for i in range(99999) %}{% set x = s.upper() %}{% endfor %}",
    "search in a loop": _STRING + "{% for i in range(99999) %}{{ 'b' in s }}{% endfor %}",
    "slices in a loop": _STRING + "{% for i in range(99999) %}{% set x = s[1:] %}{% endfor %}",
    "list search": _LIST + "{% for i in range(99999) %}{{ 'b' in s }}{% endfor %}",
    "sort in a loop": _LIST + "{% for i in range(99999) %}{% set x = s | sort %}{% endfor %}",
    "maps of maps": "{% for i in range(999) %}{% set x = range(99999)" + " | map('string')" * 50 + "%}{% endfor %}",
    "changed": _STRING + "{% for i in range(99999) %}{{ loop.changed(s ~ '') }}{% endfor %}",
    "long range": "{{ range(10**9) | list }}",
    "endless range": "{{ range(10**30) }}",
    "indent": "{{ 'a' | indent(10**10) }}",
    "JSON indent": "{{ [1] | tojson(indent=10**10) }}",
    "center": "{{ 'a' | center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "round": "{{ 1 | round(-10**9) }}",
    "date width": "{{ strftime_now('%1000000000d') }}",
    "output": "{% set s = 'a' * 1000000 %}{% for i in range(100) %}{{ s }}{% endfor %}",
    "template size": "x" * 70_000,
    "class walk": "{{ ().__class__.__base__.__subclasses__() }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "map attribute": "{{ ([''] | map(attribute='__class__') | first)() }}",
    "globals": "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}",
    "class of dict": "{{ dict.__subclasses__() }}",
    "mutation": "{{ messages.append(1) }}",
    "print of a method": "{{ ''.join }}",
    "print of a function": "{{ [range] | string }}",
    "namespace loop": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "include": "{% include 'x' %}",
    "import": "{% import 'x' as y %}",
    "autoescape": "{% autoescape 'a' * 10**10 %}{% endautoescape %}",
    "lipsum": "{{ lipsum(10**8) }}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "additions": "{{ " + "1+" * 20_000 + "1 }}",
    "dots": "{{ a" + ".a" * 20_000 + " }}",
    "nested ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "nested fors": "{% for x in [1] %}" * 1500 + "{% endfor %}" * 1500,
    "braces": "{{" * 30_000,
    "quotes": "{{ " + "'" * 50_001 + " }}",
    "long number": "{{ " + "9" * 60_000 + " }}",
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "nested loops":  # with all of the budget this takes a minute in sum
        monkeypatch.setattr(sandbox, "BUDGET", sandbox.BUDGET // 10)
    with pytest.raises(RequestError) as caught:
        render_chat(HOSTILE[name], USER)
    assert "<class" not in str(caught.value) and " at 0x" not in str(caught.value)


_SNIPPETS = (
    "{% for i in x %}@{% endfor %}@{% if x %}@{% else %}@{% endif %}@{% set x = messages %}@"
    "{% set ns = namespace() %}@{% macro f(x) %}@{% endmacro %}@{{ f(x) }}@{{ x }}@{{ messages }}@"
    "{{ x|join }}@{{ x|tojson }}@{{ x[1:] }}@"
    "{{ x ~ x }}@{{ x * 9 }}@{{ x + x }}@{{ x.y }}@{{ x.items() }}@{{ x|map('upper')|list }}@"
    "{{ x|sort }}@{{ x == x }}@"
    "{{ loop.index }}@{% set x = [x, x] %}@{% set x = x|string %}@{% break %}@{%- set x = 1 -%}@{{@{# c #}@text@'"
).split("@")


@settings(max_examples=300)
@given(st.lists(st.sampled_from(_SNIPPETS), max_size=15))
def test_any_template_gives_text_or_a_request_error(snippets: list[str]) -> None:
    try:
        assert isinstance(render_chat(" ".join(snippets), USER), str)
    except RequestError as error:
        assert len(str(error)) < 1000


def test_cost_is_the_same_every_time_and_starts_anew() -> None:
    template = "{% for i in range(20000) %}{{ i }}{% endfor %}"
    first = render_chat(template, USER)
    assert all(render_chat(template, USER) == first for _ in range(3))


def test_long_honest_conversations_fit() -> None:
    messages = [{"role": "user", "content": "word " * 2000}, {"role": "assistant", "content": "word " * 2000}] * 100
    text = render_chat(TEMPLATES["chatml"], messages)
    assert len(text) > 2_000_000 > sandbox.MAX_TEMPLATE_CHARS
