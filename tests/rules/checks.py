"""The rules of the code base as functions from one parsed module to the places that break them.

Each rule reads only the syntax tree or the text, so it needs nothing installed, and no comment stops it.
`RULES` holds those that apply to every module of the package; `test_tree.py` runs them on the package, and
`test_planted.py` shows that each one catches what it is there for.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600
MAX_DEBUG_VARIABLES = 5
MAX_OPTIONS = 44

# Everyone may import these; they import only each other, downwards in this order.
BASE = ("config", "types", "files", "machine", "env", "errors")

# Part -> the parts it may import, besides itself and BASE. The most specific entry counts, on both sides:
# "engine.client" allows that module only. `None`: anything, but inside functions only.
EDGES: dict[str, tuple[str, ...] | None] = {
    "kernels": (),
    "quantization": ("kernels",),
    "attention": ("kernels",),
    "layers": ("attention.base", "quantization", "kernels"),
    "model": ("layers", "attention", "quantization", "kernels", "weights.needs"),
    "files": (),
    "weights": ("quantization",),
    "scheduler": (),
    "runner": ("model", "layers", "attention", "quantization", "kernels", "weights", "scheduler.plan"),
    "text": (),
    "metrics": (),
    "engine": ("scheduler", "runner", "metrics"),
    # Where an engine is put together, and the offline front end, which adds the text.
    "engine.build": (
        "scheduler", "runner", "metrics", "model", "weights", "quantization.scheme", "text.held", "text.tokenizer",
    ),
    "engine.llm": ("scheduler", "runner", "metrics", "model", "weights", "text"),
    "engine.tokenizer": ("weights", "text"),
    # The client side of an engine process, with the text; the process itself has none.
    "engine.async_llm": ("scheduler.records", "metrics", "text", "weights"),
    "server": ("engine.client", "engine.async_llm", "text", "metrics"),
    "bench": ("engine", "scheduler", "runner", "model", "kernels.quant"),
    "entrypoints": ("cli", "server"),
    "cli": None,
    "__main__": ("cli",),
    "": None,
    "errors": (),
    "env": (),
    "types": (),
    "machine": (),
    "config": (),
}

# Import name -> the parts that may use it (None: all). Whatever is not here is not a dependency of Octavo.
NUMERIC = ("kernels", "quantization", "attention", "layers", "model", "runner", "engine", "bench", "cli")
THIRD_PARTY: dict[str, tuple[str, ...] | None] = {
    "numpy": None,
    "msgspec": None,
    "tokenizers": ("text",),
    "jinja2": ("text",),
    "huggingface_hub": ("weights",),
    "tqdm": ("weights", "engine", "bench", "cli"),
    "torch": NUMERIC,
    "triton": ("kernels", "attention"),
    "starlette": ("server",),
    "uvicorn": ("server",),
    "uvloop": ("server", "bench"),
    "transformers": ("bench",),
}

BANNED_MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing",
}  # fmt: skip
BANNED_DOTTED = {"torch.load", "torch.jit.load", "torch.multiprocessing", "torch.package", "ast.literal_eval"}
BANNED_BUILTINS = {"eval", "exec"}
BANNED_ANYWHERE = re.compile(r"(send|recv)_pyobj|\w*_object_list|ProcessPoolExecutor")
BANNED_KEYWORDS = {"allow_pickle", "trust_remote_code"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

# Hosts that a file of the project may link to: papers, sources, licences, and names that lead nowhere.
LINKS = ("arxiv.org", "github.com", "huggingface.co", "www.apache.org", "example.com")
# Written in two halves, so that this file passes its own rule.
UNNAMED = tuple(
    left + right
    for left, right in (
        ("/wo", "rk/"), ("../sha", "red/"), ("/opt/whe", "els"), ("/opt/py", "pi"), ("work", "place"),
        ("py", "pi.org"), ("python", "hosted"), ("download.py", "torch"), ("--extra-", "index-url http"),
    )
)  # fmt: skip


class Hit(NamedTuple):
    """One place that breaks a rule."""

    place: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Module:
    """One module of the package. `name` is dotted; `part` is what follows "octavo."."""

    name: str
    source: str
    tree: ast.Module
    is_package: bool = False

    @classmethod
    def parse(cls, name: str, source: str, is_package: bool = False) -> Module:
        """Parses `source` as the module `name`."""
        return cls(name, source, ast.parse(source), is_package)

    @property
    def part(self) -> str:
        """The name without the package: "scheduler.plan"; "" for the package itself."""
        return self.name.partition(".")[2]

    def hit(self, node: ast.AST, message: str) -> Hit:
        """A hit at `node`."""
        return Hit(self.name, getattr(node, "lineno", 1), message)


class Import(NamedTuple):
    """One imported name. `target` is absolute and dotted; `lazy`: inside a function or for types only."""

    target: str
    node: ast.AST
    lazy: bool


def imports(module: Module) -> list[Import]:
    """All imports of `module`, relative ones made absolute, constant `import_module(...)` calls included."""
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            found.extend(Import(f"{base}.{alias.name}", node, lazy) for alias in node.names)
        elif isinstance(node, ast.Call) and _dotted(node.func).endswith(("import_module", "__import__")):
            if node.args and isinstance(node.args[0], ast.Constant):
                found.append(Import(str(node.args[0].value), node, lazy))
        inner = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inner = inner or (isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING"))
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(module.tree, False)
    return found


def check_direction(module: Module) -> Iterator[Hit]:
    """Imports inside the package go downwards only, along `EDGES`."""
    entry = _entry(module.part)
    if entry not in EDGES:
        yield module.hit(module.tree, "this part has no place in EDGES")
        return
    allowed = EDGES[entry]
    own = module.part.partition(".")[0]
    below = BASE[BASE.index(own) + 1 :] if own in BASE else BASE
    for target, node, lazy in imports(module):
        root, _, part = target.partition(".")
        if root != "octavo" or _within(part, (own, *below)):
            continue
        if allowed is None:
            if not lazy:
                yield module.hit(node, f"imports {target} at import time; import it inside the function")
        elif not _within(part, allowed):
            yield module.hit(node, f"imports {target}, which is not below it")


def check_third_party(module: Module) -> Iterator[Hit]:
    """Only declared dependencies are imported, each only by the parts that may use it."""
    for target, node, lazy in imports(module):
        root = target.partition(".")[0]
        if root in sys.stdlib_module_names or root == "octavo":
            continue
        if root not in THIRD_PARTY:
            yield module.hit(node, f"imports {root}, which is not a declared dependency")
        elif (parts := THIRD_PARTY[root]) is not None and not _within(module.part, parts):
            yield module.hit(node, f"imports {root}, which this part may not use")
        elif _within(module.part, ("cli", "__main__", "")) and not lazy:
            yield module.hit(node, f"imports {root} at import time; import it inside the function")


def check_banned(module: Module) -> Iterator[Hit]:
    """Nothing that turns bytes into code or objects."""
    for target, node, _ in imports(module):
        if target.partition(".")[0] in BANNED_MODULES or _within(target, BANNED_DOTTED):
            yield module.hit(node, f"imports {target}")
        elif BANNED_ANYWHERE.fullmatch(target.rpartition(".")[2]):
            yield module.hit(node, f"imports {target}")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in BANNED_BUILTINS:
            yield module.hit(node, f"uses {node.id}")
        elif isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            bare = dotted.removeprefix("builtins.")
            if dotted in BANNED_DOTTED or (bare != dotted and bare in BANNED_BUILTINS):
                yield module.hit(node, f"uses {dotted}")
            elif BANNED_ANYWHERE.fullmatch(node.attr):
                yield module.hit(node, f"uses {node.attr}")
        elif isinstance(node, ast.keyword) and node.arg in BANNED_KEYWORDS:
            yield module.hit(node.value, f"passes {node.arg}")


def check_environment(module: Module) -> Iterator[Hit]:
    """The process environment is read in `octavo.env` only."""
    if module.name == "octavo.env":
        return
    for target, node, _ in imports(module):
        if target.startswith("os.") and target.removeprefix("os.") in ENVIRONMENT:
            yield module.hit(node, f"imports {target}")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            yield module.hit(node, f"uses {_dotted(node)}")


def check_size(module: Module) -> Iterator[Hit]:
    """Functions of at most 60 lines, from `def` to the last one; files of at most 600."""
    lines = len(module.source.splitlines())
    if lines > MAX_FILE_LINES:
        yield Hit(module.name, lines, f"{lines} lines, more than {MAX_FILE_LINES}")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield module.hit(node, f"{node.name} has {length} lines, more than {MAX_FUNCTION_LINES}")


def check_docstrings(module: Module) -> Iterator[Hit]:
    """Every module with code in it and every public class, function and method has a docstring."""
    if module.tree.body and not ast.get_docstring(module.tree):
        yield module.hit(module.tree, "the module has no docstring")

    def visit(nodes: Iterable[ast.AST], prefix: str) -> Iterator[Hit]:
        for node in nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.name.startswith("_") or _is_copy(node):
                continue
            if not ast.get_docstring(node):
                yield module.hit(node, f"{prefix}{node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{node.name}.")

    yield from visit(_outside_functions(module.tree), "")


def options(module: Module) -> list[str]:
    """The options that the classes of `octavo.config` offer, as "Class.field": every field of a class whose name
    ends in "Config", and every field made by `option(...)`; a field that holds another such class is none."""
    found = []
    for owner in module.tree.body:
        for node in owner.body if isinstance(owner, ast.ClassDef) else ():
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            made = isinstance(node.value, ast.Call) and _dotted(node.value.func) == "option"
            if made or (owner.name.endswith("Config") and not ast.unparse(node.annotation).endswith("Config")):
                found.append(f"{owner.name}.{node.target.id}")
    return found


def check_text(place: str, text: str) -> Iterator[Hit]:
    """No file names where the project was made or a package index; links lead to known hosts only."""
    for number, line in enumerate(text.splitlines(), 1):
        lowered = line.lower()
        yield from (Hit(place, number, f"names {word!r}") for word in UNNAMED if word in lowered)
        for host in re.findall(r"https?://(?:[^/\s\"'@]*@)?([a-z0-9.-]+\.[a-z]{2,})", lowered):
            if host not in LINKS:
                yield Hit(place, number, f"links to {host}, which is not in LINKS")


RULES: dict[str, Callable[[Module], Iterator[Hit]]] = {
    "direction": check_direction,
    "third_party": check_third_party,
    "banned": check_banned,
    "environment": check_environment,
    "size": check_size,
    "docstrings": check_docstrings,
}


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    names = module.name.split(".")
    keep = len(names) - node.level + module.is_package
    return ".".join([*names[:keep], *([node.module] if node.module else [])])


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of nested attributes; "" in front when it starts from anything but a name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _within(name: str, parts: Iterable[str]) -> bool:
    """Whether `name` is one of `parts` or inside one; "" is the package itself, nothing is inside it."""
    return any(name == part or (part and name.startswith(part + ".")) for part in parts)


def _entry(part: str) -> str:
    """The most specific key of EDGES for `part`."""
    while part not in EDGES and "." in part:
        part = part.rpartition(".")[0]
    return part


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node` that no function or class contains, so those under `if` and `try` too."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _outside_functions(child)


def _is_copy(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether another definition of the same name carries the docstring: overloads, setters."""
    names = [_dotted(decorator) for decorator in node.decorator_list]
    return any(name.endswith(("overload", ".setter", ".deleter")) for name in names)
