"""The command line of `octavo serve`: what is read as the model, and as nothing."""

from __future__ import annotations

import argparse

import pytest

from octavo.cli import serve
from octavo.config import NOTICES


@pytest.mark.parametrize("name", sorted(NOTICES))
def test_options_without_meaning_do_not_swallow_the_model(name: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flag = "--" + name.replace("_", "-")
    for arguments in ([flag, "owner/model"], ["owner/model", flag], ["--no-" + flag[2:], "owner/model"]):
        parsed = parser.parse_args(arguments)
        assert parsed.name == "owner/model" and getattr(parsed, name) is not None
    assert getattr(parser.parse_args(["owner/model"]), name) is None
