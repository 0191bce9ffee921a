"""Jinja for strangers' chat templates: no reach into Python, and a bound on work and memory.

A template is a program, and nothing can stop a running Python thread from outside, so the bound is counted from
within. Every render has a budget of units, one per character made and 64 per step taken, and each place
where a template can do much with little text pays before it acts:

- the body of every loop, macro and block pays for its size at each run (a call inserted into the syntax tree);
- operators, comparisons, slices, string methods and filters pay for the sizes of what they read and make;
- methods, filters and functions that are not listed here do not exist.

The same template and messages cost the same on every machine. The budget is worth one or two seconds.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, Undefined, filters, nodes, pass_context, pass_environment
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 64 << 10
MAX_OUTPUT_CHARS = 8 << 20
MAX_RANGE = 100_000
BUDGET = 200_000_000
_STEP = 64
_MAX_INT_BITS = 4096
_MAX_INDENT = 64

_left: ContextVar[list[int]] = ContextVar("template_budget")


class LimitError(Exception):
    """A template asked for more than a render may cost."""


def _spend(units: int) -> None:
    budget = _left.get()
    budget[0] -= units
    if budget[0] < 0:
        raise LimitError("it needs more work or memory than a chat template may use")


# ---- sizes


_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
_COLLECTIONS: Any = (list, tuple, dict, range, *_VIEWS)
_SIZED: Any = (str, *_COLLECTIONS)


def _size(value: Any) -> int:
    """The number of characters or direct elements."""
    return len(value) if isinstance(value, _SIZED) else 1


def _weigh(value: Any, printing: bool = False) -> int:
    """Pays for walking through a whole value, and returns the depth of its nesting.

    `printing` refuses what is not data: the text of functions and the like shows addresses.
    """
    stack, deepest = [(value, 1)], 1
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            _spend(_STEP + len(item))
        elif isinstance(item, _COLLECTIONS):
            _spend(_STEP * (1 + len(item)))
            deepest = max(deepest, depth)
            if isinstance(item, dict):
                stack.extend((key, depth + 1) for key in item)
                item = item.values()
            if not isinstance(item, range):
                stack.extend((inner, depth + 1) for inner in item)
        elif printing and not isinstance(item, (int, float, Undefined, type(None))):
            raise LimitError(f"a {type(item).__name__} cannot be turned into text")
        else:
            _spend(_STEP)
    return deepest


def _text(value: Any) -> str:
    """`str(value)`, paid for."""
    _weigh(value, printing=True)
    return str(value)


@pass_context
def _finalize(context: Context, value: Any) -> str:
    """What `{{ value }}` writes. Taking the context keeps Jinja from evaluating constants while it compiles."""
    return _text(value)


# ---- functions, filters and methods that exist


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(_text(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"%[^A-Za-z%]", form):
        raise LimitError(f"the date format has {len(form)} characters or field widths")
    return datetime.now().strftime(form)


def _range(*bounds: int) -> range:
    result = range(*bounds)
    if len(result) > MAX_RANGE:
        raise LimitError(f"a range of {len(result)} is longer than {MAX_RANGE}")
    return result


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face templates expect it: not escaped for HTML."""
    depth = _weigh(value, printing=True)
    if indent is not None:
        if not isinstance(indent, int) or indent > _MAX_INDENT:
            raise LimitError(f"the indent {indent!r} is not a number up to {_MAX_INDENT}")
        before = _left.get()[0]
        _weigh(value)
        # Each element may start a line of its own.
        _spend((before - _left.get()[0]) // _STEP * depth * indent)
    _spend(sum(len(part) * _STEP for part in separators or ()))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = _text(text), _text(old), _text(new)
    _spend(text.count(old) * len(new))
    return str(text.replace(old, new, -1 if count is None else count))


def _concat(parts: Iterable[Any], separator: str = "") -> str:
    texts = [_text(part) for part in parts]
    _spend(sum(map(len, texts)) + len(texts) * (_STEP + len(separator)))
    return separator.join(texts)


@pass_environment
def _join(environment: Environment, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = [filters.make_attrgetter(environment, attribute)(item) for item in value]
    return _concat(value, _text(d))


def _trim(value: Any, chars: str | None = None) -> str:
    text = _text(value)
    _spend(len(text) * len(chars or " "))
    return text.strip(chars)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if _size(width) > _MAX_INDENT or (isinstance(width, int) and width > _MAX_INDENT):
        raise LimitError(f"the indent {width!r} is larger than {_MAX_INDENT}")
    text = _text(value)
    _spend((text.count("\n") + 1) * _MAX_INDENT)
    return filters.do_indent(text, width, first, blank)


def _title(value: Any) -> str:
    text = _text(value)
    _spend(len(text) * _STEP)  # it is cut at every space and hyphen
    return filters.do_title(text)


class _Lazy(list[Any]):
    """The items of a filter that Jinja evaluates lazily; like a generator it is true even when empty."""

    def __bool__(self) -> bool:
        return True


def _priced(function: Callable[..., Any], deep: bool) -> Callable[..., Any]:
    """A builtin filter that pays for walking its first argument (`deep`) or once per element of it."""

    @functools.wraps(function)
    def priced(*args: Any, **kwargs: Any) -> Any:
        # Jinja passes the context or environment first to filters that ask for it.
        value = args[1] if hasattr(function, "jinja_pass_arg") else args[0]
        if deep:
            _weigh(value, printing=True)
        _spend(_STEP * (1 + _size(value)))
        result = function(*args, **kwargs)
        return _Lazy(result) if hasattr(result, "__next__") else result

    return priced


def _shallow(function: Callable[..., Any]) -> Callable[..., Any]:
    return _priced(function, deep=False)


def _deep(function: Callable[..., Any]) -> Callable[..., Any]:
    return _priced(function, deep=True)


_FILTERS: dict[str, Callable[..., Any]] = {
    "abs": _deep(abs),
    "capitalize": _deep(filters.do_capitalize),
    "count": len,
    "d": filters.do_default,
    "default": filters.do_default,
    "dictsort": _deep(filters.do_dictsort),
    "first": filters.do_first,
    "float": _deep(filters.do_float),
    "indent": _indent,
    "int": _deep(lambda value, default=0: filters.do_int(value, default)),
    "items": _shallow(filters.do_items),
    "join": _join,
    "last": filters.do_last,
    "length": len,
    "list": _shallow(list),
    "lower": _deep(filters.do_lower),
    "map": _shallow(filters.sync_do_map),
    "max": _deep(filters.do_max),
    "min": _deep(filters.do_min),
    "reject": _shallow(filters.sync_do_reject),
    "rejectattr": _shallow(filters.sync_do_rejectattr),
    "replace": _replace,
    "reverse": _shallow(filters.do_reverse),
    "safe": lambda value: value,
    "select": _shallow(filters.sync_do_select),
    "selectattr": _shallow(filters.sync_do_selectattr),
    "sort": _deep(filters.do_sort),
    "string": _text,
    "title": _title,
    "tojson": _tojson,
    "trim": _trim,
    "unique": _deep(filters.do_unique),
    "upper": _deep(filters.do_upper),
}

_COMPARING_TESTS = ("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge") + (
    "<", "lt", "lessthan", "<=", "le", "in", "lower", "upper"
)  # fmt: skip

_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (
        str,
        frozenset(
            "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower "
            "isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace "
            "rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper".split()
        ),
    ),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    ((list, tuple), frozenset({"copy", "count", "index"})),
    ((LoopContext, Namespace, Macro, TemplateReference, BlockReference, Undefined), frozenset()),
)


def _call_method(method: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A method of a string, mapping or list, paid for."""
    name = method.__name__
    for arg in (*args, *kwargs.values()):
        _weigh(arg)
    if not isinstance(owner, str):
        if name in ("count", "index"):
            _weigh(owner)
        _spend(_STEP * (1 + (0 if name == "get" else len(owner))))
        return method(*args, **kwargs)
    if name == "join":
        return _concat(args[0], owner)
    if name == "replace":
        return _replace(owner, *args, **kwargs)
    size = len(owner)
    if name.endswith("strip"):
        # Looked up in the set of characters one by one.
        _spend(size * max(1, *map(_size, args), 1))
    elif name.startswith("split") or name == "rsplit":
        pieces = owner.count(args[0]) if args and isinstance(args[0], str) and args[0] else size // 2
        _spend(size + _STEP * (1 + pieces))
    else:
        _spend(_STEP + 3 * size)
    return method(*args, **kwargs)


# ---- the environment


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; it changes nothing here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face chat templates expect it, restricted as the module docstring says."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self.filters = dict(_FILTERS)
        tests: dict[str, Any] = dict(self.tests)
        self.tests = tests | {name: functools.partial(_compared, tests[name]) for name in _COMPARING_TESTS}
        self.globals = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "range": _range,
            "namespace": Namespace,
            "dict": dict,
        }
        self._functions = tuple(self.globals.values())

    def compile_template(self, source: str) -> Template:
        """Compiled, with the payments in place. Any exception of Jinja or Python may come out."""
        tree = self.parse(source)
        _Instrument().visit(tree)
        return Template.from_code(self, self.compile(tree), self.globals)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only the listed methods of data, and the public attributes of Jinja's own objects."""
        for kind, allowed in _METHODS:
            if isinstance(obj, kind):
                return attr in allowed if allowed else super().is_safe_attribute(obj, attr, value)
        return False

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` is not among the methods, so it needs no wrapping."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        """Every call of a template ends here, those that `_Instrument` inserts included."""
        # Jinja adds these inside loops and blocks, for functions that ask for the context.
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        owner = __obj.__self__ if isinstance(__obj, (MethodType, BuiltinMethodType)) else None
        if owner is __self:
            return __obj(*args)
        if isinstance(owner, (str, dict, list, tuple)):
            return _call_method(__obj, owner, args, kwargs)
        runtime = isinstance(__obj, (Macro, BlockReference, LoopContext, Undefined)) or isinstance(owner, LoopContext)
        if not runtime and not any(__obj is function for function in __self._functions):
            raise LimitError(f"a {type(__obj).__name__} cannot be called")
        for arg in args:
            _spend(_STEP + _size(arg))
        return __context.call(__obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic on numbers is free while they are small; sequences pay for the result."""
        sequences = (str, list, tuple)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1)
            if max(bits, bits + right.bit_length() if operator == "*" else 0) > _MAX_INT_BITS:
                raise LimitError(f"a number of more than {_MAX_INT_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            raise LimitError("formatting with % is not available; join strings with ~")
        elif operator == "*" and isinstance(left, sequences) and isinstance(right, int):
            _spend(len(left) * max(right, 0) * (1 if isinstance(left, str) else _STEP))
        elif operator == "*" and isinstance(right, sequences) and isinstance(left, int):
            _spend(len(right) * max(left, 0) * (1 if isinstance(right, str) else _STEP))
        else:
            _spend((_size(left) + _size(right)) * (1 if isinstance(left, str) else _STEP))
        return self.binop_table[operator](left, right)

    # Called from places that `_Instrument` inserts:

    def tick(self, units: int) -> bool:
        """Pays for one run of a body."""
        _spend(units)
        return True

    def weighed(self, value: Any) -> Any:
        """Pays for comparing or copying `value`, and returns it."""
        if isinstance(value, str):
            _spend(_STEP + len(value) // _STEP)
        else:
            _weigh(value)
        return value

    def searched(self, value: Any) -> Any:
        """Pays for looking something up in `value`, and returns it."""
        return value if isinstance(value, dict) else self.weighed(value)

    def concatenated(self, *values: Any) -> str:
        """The `~` operator."""
        return _concat(values)


def _compared(test: Callable[..., Any], *args: Any) -> Any:
    for arg in args:
        _weigh(arg)
    return test(*args)


class _Instrument(NodeTransformer):
    """Inserts payments into a template's syntax tree; refuses statements that reach for other templates."""

    def __init__(self) -> None:
        self._weight = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Counts the weight of everything passed on the way."""
        self._weight += _STEP + (len(node.data) if isinstance(node, nodes.TemplateData) else 0)
        return super().visit(node, *args, **kwargs)

    def _body(self, node: Any) -> nodes.Node:
        before = self._weight
        self.generic_visit(node)
        weight = nodes.Const(self._weight - before)
        node.body.insert(0, nodes.ExprStmt(_insert("tick", weight)).set_lineno(node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(_insert("tick", weight), node.test)
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _body

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Both sides of every comparison pay for being read."""
        self.generic_visit(node)
        node.expr = _insert_unless_constant("weighed", node.expr)
        for operand in node.ops:
            kind = "searched" if operand.op in ("in", "notin") else "weighed"
            operand.expr = _insert_unless_constant(kind, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """A slice copies."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _insert("weighed", node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`~` becomes a call, because the sandbox does not intercept it."""
        self.generic_visit(node)
        return _insert("concatenated", *node.nodes)

    def _refuse(self, node: nodes.Node) -> NoReturn:
        raise LimitError(f"{type(node).__name__.lower()} is not available in a chat template")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = _refuse


def _insert(method: str, *args: nodes.Expr) -> nodes.Call:
    """A call of a method of `Sandbox`."""
    call = nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)
    return call.set_lineno(args[0].lineno if args else 1)  # type: ignore[return-value]


def _insert_unless_constant(method: str, expression: nodes.Expr) -> nodes.Expr:
    return expression if isinstance(expression, nodes.Const) else _insert(method, expression)


_sandbox = Sandbox()


@functools.lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return _sandbox.compile_template(source)


def render(source: str, variables: dict[str, Any]) -> str:
    """The text of a template. LimitError when a bound is passed; any exception of Jinja or Python otherwise."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise LimitError(f"it has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
    token = _left.set([BUDGET])
    try:
        pieces, length = [], 0
        for piece in _compiled(source).generate(variables):
            length += len(piece)
            if length > MAX_OUTPUT_CHARS:
                raise LimitError(f"its output is longer than {MAX_OUTPUT_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _left.reset(token)
