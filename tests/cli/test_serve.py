"""The command line of `octavo serve`: what is read as the model, and as nothing."""

from __future__ import annotations

import argparse

import pytest

from octavo.cli import serve
from octavo.config import NOTICES, NOTICES_WITH_VALUE


@pytest.mark.parametrize("name", sorted(NOTICES))
def test_options_without_meaning_do_not_swallow_the_model(name: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flag = "--" + name.replace("_", "-")
    if name in NOTICES_WITH_VALUE:
        cases = [[flag, "32", "owner/model"], ["owner/model", flag, "auto"]]
    else:
        cases = [[flag, "owner/model"], ["owner/model", flag], ["--no-" + flag[2:], "owner/model"]]
    for arguments in cases:
        parsed = parser.parse_args(arguments)
        assert parsed.name == "owner/model" and getattr(parsed, name) is not None
    assert getattr(parser.parse_args(["owner/model"]), name) is None
