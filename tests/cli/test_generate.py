"""`octavo generate`: prompts from arguments, a file and standard input; text and JSON lines; bad lines alone fail."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from octavo.cli.main import main

SMALL = ["--max-model-len", "256", "--num-gpu-blocks-override", "64", "--max-tokens", "6"]


def test_arguments_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["generate", "What is the capital of France?", "--max-tokens", "16", "--dtype", "float32", *SMALL[:4]])
        == 0
    )
    out, err = capsys.readouterr()
    assert "The capital of France is Paris." in out
    for words in ("1 prompts together", "tokens/s", "KV blocks used", "waste", "prefix hits"):
        assert words in err


def test_a_file_of_json_lines_and_a_bad_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "Hello",
        json.dumps({"prompt": "Hello", "max_tokens": 2, "n": 2, "temperature": 1, "seed": 4}),
        json.dumps({"prompt_token_ids": [1, 999999]}),
        json.dumps({"messages": [{"role": "user", "content": "Hi"}]}),
        json.dumps({"prompt": "x", "temperature": -1}),
        json.dumps({"prompt": "x", "logit_bias": {"504": 100}, "max_tokens": 3, "prompt_logprobs": 0}),
        json.dumps({"prompt": "x", "logit_bias": {"the": 100}}),
        "{no json",
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    assert main(["generate", "--file", str(path), "--jsonl", *SMALL]) == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["error" in record for record in records] == [False, False, True, False, True, False, True, True]
    assert "999999" in records[2]["error"] and "temperature" in records[4]["error"]
    assert records[5]["outputs"][0]["token_ids"] == [504] * 3 and records[5]["prompt_logprobs"][0] is None
    assert [len(completion["token_ids"]) for completion in records[1]["outputs"]] == [2, 2]


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon a time\n\nIn the beginning\n"))
    assert main(["generate", "--raw", *SMALL]) == 0
    assert capsys.readouterr().out.count("> ") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--file", "/no/such/file"], 2, "/no/such/file"),
        (["x", "--file", "y"], 2, "file"),
        (["x", "--block-size", "7"], 2, "block_size is 7"),
        (["x", "--model", "/no/such/model"], 3, "/no/such/model"),
        (["x", "--temperature", "nan"], 1, "temperature"),
        (["x", "--n", "100000"], 1, "n is 100000"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments]) == code
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and "Traceback" not in err
