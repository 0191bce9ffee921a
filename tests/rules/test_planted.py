"""Each rule catches a violation planted in a small source, and lets the nearest correct source pass."""

from __future__ import annotations

import pytest

from tests.rules.checks import EDGES, RULES, Module, check_text, options


def hits(rule: str, source: str, name: str = "octavo.engine.loop", is_package: bool = False) -> list[str]:
    """What `rule` says about `source` as the module `name`."""
    return [hit.message for hit in RULES[rule](Module.parse(name, source, is_package))]


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("octavo.engine.loop", "import octavo.server.app"),
        ("octavo.engine.loop", "from octavo.server import app"),
        ("octavo.engine.loop", "from octavo import server"),
        ("octavo.engine.loop", "from ..server import app"),
        ("octavo.engine.loop", "def f():\n    from octavo.server import app"),
        ("octavo.engine.loop", "if TYPE_CHECKING:\n    from octavo.server import app"),
        ("octavo.engine.loop", "import importlib\nimportlib.import_module('octavo.server.app')"),
        ("octavo.engine.loop", "from octavo.text.tokenizer import Tokenizer"),
        ("octavo.server.app", "from octavo.engine.loop import run"),
        ("octavo.server.app", "from octavo.scheduler.plan import StepPlan"),
        ("octavo.runner.step", "from octavo.scheduler.slots import SlotTable"),
        ("octavo.runner.step", "from octavo.scheduler import StepPlan"),
        ("octavo.scheduler.scheduler", "from octavo.runner.step import step"),
        ("octavo.kernels.ops", "from octavo.layers.base import Module"),
        ("octavo.kernels.ops", "from octavo.attention.base import StepBatch"),
        ("octavo.quantization.ggml", "from octavo.weights.gguf import open_gguf"),
        ("octavo.weights.load", "from octavo.model.spec import ModelSpec"),
        ("octavo.model.spec", "from octavo.weights.load import load"),
        ("octavo.attention.base", "from octavo.layers.rope import rotate"),
        ("octavo.bench.host", "from octavo.server.app import app"),
        ("octavo.errors", "from octavo.types import SamplingParams"),
        ("octavo.types", "from octavo.scheduler.plan import StepPlan"),
        ("octavo.cli.generate", "from octavo.engine.llm import LLM"),
        ("octavo.elsewhere", "x = 1"),
    ],
)
def test_direction(importer: str, source: str) -> None:
    assert len(hits("direction", source, importer)) == 1


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        (
            "octavo.server.app",
            "from octavo.engine.client import Client\nfrom octavo.text.tokenizer import Tokenizer",
        ),
        ("octavo.server.app", "from octavo.engine import client\nfrom . import auth\nfrom .auth import Key"),
        (
            "octavo.engine.loop",
            "from octavo.scheduler.scheduler import Scheduler\nimport octavo.runner.runner",
        ),
        (
            "octavo.runner.runner",
            "from octavo.scheduler.plan import StepPlan\nfrom octavo.model.spec import ModelSpec",
        ),
        (
            "octavo.model.spec",
            "from octavo.weights.needs import TensorNeed\nfrom octavo.errors import ModelError",
        ),
        ("octavo.model.families.llama", "from ..spec import ModelSpec\nfrom ...errors import ModelError"),
        (
            "octavo.cli.generate",
            "def run(args):\n    from octavo.engine.llm import LLM\nfrom octavo.env import log_level",
        ),
        ("octavo.types", "from octavo.errors import RequestError"),
        ("octavo.config", "from octavo.types import SamplingParams\nfrom octavo.env import variables"),
    ],
)
def test_direction_lets_pass(importer: str, source: str) -> None:
    assert not hits("direction", source, importer)


def test_direction_of_the_package_itself() -> None:
    lazy = "def __getattr__(name):\n    from octavo.engine.llm import LLM\n    return LLM"
    assert not hits("direction", lazy, "octavo", is_package=True)
    assert hits("direction", "from octavo.engine.llm import LLM", "octavo", is_package=True)
    assert hits("direction", "from .engine.llm import LLM", "octavo", is_package=True)


def test_nobody_below_imports_the_server() -> None:
    importers = {part for part, allowed in EDGES.items() if allowed and "server" in allowed}
    assert importers == {"entrypoints"}


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("octavo.scheduler.plan", "import torch"),
        ("octavo.scheduler.plan", "import torch.nn as nn"),
        ("octavo.scheduler.plan", "def f():\n    from torch import Tensor"),
        ("octavo.scheduler.plan", "if TYPE_CHECKING:\n    import torch"),
        ("octavo.weights.load", "import torch"),
        ("octavo.text.tokenizer", "import torch"),
        ("octavo.engine.llm", "import transformers"),
        ("octavo.engine.llm", "import requests"),
        ("octavo.cli.doctor", "import torch"),
        ("octavo.cli.doctor", "import numpy"),
    ],
)
def test_third_party(importer: str, source: str) -> None:
    assert len(hits("third_party", source, importer)) == 1


def test_third_party_lets_pass() -> None:
    assert not hits("third_party", "import os, numpy\nfrom collections import abc", "octavo.scheduler.plan")
    assert not hits("third_party", "import torch", "octavo.runner.step")
    assert not hits("third_party", "def run(args):\n    import torch", "octavo.cli.doctor")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import cloudpickle",
        "import dill",
        "import marshal",
        "import shelve",
        "import joblib",
        "import multiprocessing",
        "import multiprocessing.shared_memory",
        "from multiprocessing import Process",
        "def f():\n    import pickle",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('pickle')",
        "from torch import load",
        "import torch.multiprocessing",
        "from torch import multiprocessing",
        "torch.load(path)",
        "load = torch.load",
        "torch.jit.load(path)",
        "torch.multiprocessing.spawn(f)",
        "eval('1')",
        "exec(code)",
        "run = eval",
        "builtins.exec(code)",
        "ast.literal_eval(text)",
        "from ast import literal_eval",
        "socket.recv_pyobj()",
        "socket.send_pyobj(x)",
        "dist.broadcast_object_list(x)",
        "dist.gather_object_list(x)",
        "from torch.distributed import broadcast_object_list",
        "from concurrent.futures import ProcessPoolExecutor",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_banned(source: str) -> None:
    assert len(hits("banned", source)) == 1


def test_banned_lets_pass() -> None:
    fine = "model.eval()\njson.load(f)\nre.compile('a')\nevaluate = executor.submit\n'pickle'\nnp.load(path)"
    assert not hits("banned", fine)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "import os\nos.environ.get('A')",
        "import os\nos.getenv('A')",
        "import os\nos.putenv('A', 'b')",
        "from os import environ",
        "from os import getenv as g",
        "import os as o\no.environ",
    ],
)
def test_environment(source: str) -> None:
    assert len(hits("environment", source)) == 1
    assert not hits("environment", source, "octavo.env")


def test_size() -> None:
    body = "    x = 1\n"
    assert not hits("size", "def f():\n" + body * 59)
    assert len(hits("size", "def f():\n" + body * 60)) == 1
    assert len(hits("size", "class A:\n  async def f():\n" + body * 60)) == 1
    assert len(hits("size", "def f():\n def g():\n" + body * 60)) == 2
    assert not hits("size", "x = 1\n" * 600)
    assert len(hits("size", "x = 1\n" * 601)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        "'''M.'''\ndef f(): pass",
        "'''M.'''\nasync def f(): pass",
        "'''M.'''\nclass A: pass",
        "'''M.'''\nclass A:\n  '''A.'''\n  def f(self): pass",
        "'''M.'''\nclass A:\n  '''A.'''\n  @property\n  def f(self): pass",
        "'''M.'''\nif True:\n  def f(): pass",
        "'''M.'''\ntry:\n  pass\nexcept ImportError:\n  class A: pass",
    ],
)
def test_docstrings(source: str) -> None:
    assert len(hits("docstrings", source)) == 1


def test_docstrings_let_pass() -> None:
    fine = (
        "'''M.'''\ndef _f(): pass\nclass _A:\n  def f(self): pass\n"
        "def g():\n  '''G.'''\n  def inner(): pass\n"
        "class B:\n  '''B.'''\n  x: int\n  def __init__(self): pass\n  def _p(self): pass\n"
        "  @value.setter\n  def value(self, x): pass\n  @overload\n  def h(self): pass\n"
    )
    assert not hits("docstrings", fine)
    assert not hits("docstrings", "")


def test_options() -> None:
    source = (
        "@dataclass(frozen=True)\nclass CacheConfig:\n  block_size: int = 16\n  swap_space: float = 0.0\n"
        "  def check(self): pass\nclass Facts:\n  blocks: int\n  late: int = option(1, 'an option')\n"
        "class EngineConfig:\n  cache: CacheConfig = field(default_factory=CacheConfig)\n"
    )
    assert options(Module.parse("octavo.config", source)) == [
        "CacheConfig.block_size",
        "CacheConfig.swap_space",
        "Facts.late",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "see /wo" + "rk/main/octavo",
        "open('../sha" + "red/reference.json')",
        "pip install --find-links /opt/whe" + "els",
        "made in this Work" + "place",
        "get it from py" + "pi.org",
        "--extra-" + "index-url https://github.com/x",
        "https:" + "//somewhere.example.org/simple",
        "http:" + "//user:secret@mirror.example.net/",
    ],
)
def test_text(text: str) -> None:
    assert [hit.line for hit in check_text("file", "fine\n" + text)] == [2]


def test_text_lets_pass() -> None:
    fine = "https://arxiv.org/abs/2309.06180 and http://127.0.0.1:8000/v1 and http://localhost/x, a network/path"
    assert not list(check_text("file", fine))
