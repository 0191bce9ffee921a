"""The pages on models and sampling name everything there is, and their example is the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from octavo.model.families import FAMILIES
from octavo.model.gguf_keys import ARCHITECTURES
from octavo.quantization.ggml import READABLE
from octavo.types import SamplingParams

ROOT = Path(__file__).resolve().parents[1]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_families_and_formats_are_listed() -> None:
    text = page("models.md")
    missing = [name for name in (*FAMILIES, *ARCHITECTURES) if f"`{name}`" not in text]
    missing += [kind for kind in READABLE if kind not in text and not re.match(r"[IU]\d", kind)]
    assert not missing


def test_sampling_fields_are_listed() -> None:
    text = page("sampling.md")
    hidden = {"detokenize"}
    assert [f.name for f in fields(SamplingParams) if f"| `{f.name}` |" not in text and f.name not in hidden] == []


def test_named_tests_exist() -> None:
    names = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for text in (page("models.md"), page("sampling.md"), page("adding-a-model.md")):
        assert set(re.findall(r"\btest_\w+\.py", text)) <= names


def test_the_worked_example_is_the_family() -> None:
    blocks = re.findall(r"```python\n(.*?)```", page("adding-a-model.md"), re.DOTALL)
    assert blocks[0] == (ROOT / "octavo/model/families/granite.py").read_text(encoding="utf-8")
    assert len(blocks[0].splitlines()) <= 30
    assert blocks[1] in (ROOT / "octavo/model/families/__init__.py").read_text(encoding="utf-8")
