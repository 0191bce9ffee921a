"""`octavo quantize` and the table of methods, on a tiny model with a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.calibration import pieces
from octavo.cli.main import main
from octavo.engine.llm import LLM
from octavo.text.tokenizer import Tokenizer
from octavo.types import SamplingParams
from tests.model.test_gguf_families import rival_of, write
from tests.quantization.writers import awq, byte_model, write_pair

TEXT = "The river rises in the hills north of the town and runs for forty miles, past meadows, to the sea. " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = byte_model(tmp_path_factory.mktemp("model"))
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.mark.parametrize("method", ["awq", "gptq", "rtn"])
def test_makes_a_checkpoint_that_loads(method: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["quantize", str(folder), str(out), "--method", method, "--group-size", "32", "--device", "cpu"]
    text = ["--calibration", str(folder / "text.txt"), "--context", "128", "--calibration-tokens", "512"]
    assert main([*words, *text]) == 0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == ("awq" if method == "awq" else "gptq") and config["group_size"] == 32
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    params = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0)
    for device in ("cpu", "torch-cpu"):
        texts = []
        for path in (folder, out):
            llm = LLM(str(path), device=device, max_model_len=128, num_gpu_blocks_override=20)
            entries = llm.generate(TEXT[:60], params, use_tqdm=False)[0].prompt_logprobs or []
            texts.append([next(iter(entry.values())).logprob for entry in entries if entry is not None])
        assert sum(abs(a - b) for a, b in zip(*texts, strict=True)) / len(texts[0]) < 0.6
    assert main(words) == 2  # the folder is there now
    assert main(["quantize", str(out), str(tmp_path / "again")]) == 3


@pytest.mark.parametrize("wish", [["--context", "0"], ["--context", "-8"], ["--calibration-tokens", "0"]])
def test_numbers_that_make_no_text(
    wish: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(folder), str(tmp_path / "out"), *wish]) == 2
    assert f"{wish[0][2:]} is {wish[1]}" in capsys.readouterr().err


def refused(words: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `octavo quantize`, which must read no weight and leave nothing."""
    monkeypatch.setattr("octavo.runner.build.load_params", lambda *_: pytest.fail("weights were read"))
    before = sorted(out.parent.iterdir())
    code = main(["quantize", words[0], str(out), *words[1:]])
    assert sorted(out.parent.iterdir()) == before
    return code


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (["--method", "best"], "method is 'best'"),
        (["--group-size", "48"], "Groups of 48"),
        (["--calibration", "/no/such/file"], "cannot be read"),
        (["--group-size", "32", "--calibration", __file__, "--context", "100000000"], "tokens, fewer than"),
    ],
)
def test_a_refused_wish_leaves_nothing(
    wish: list[str],
    words: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Short.")
    wish = [str(path) if word == __file__ else word for word in wish]
    assert refused([str(folder), *wish], tmp_path / "out", monkeypatch) == 2
    assert words in capsys.readouterr().err


def test_refused_models_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = write_pair(tmp_path / "odd", awq(32), {}, {"intermediate_size": 132}, skip=("proj",))[1]
    assert refused([str(odd), "--group-size", "32"], tmp_path / "out", monkeypatch) == 2
    assert "do not divide" in capsys.readouterr().err
    narrow = {"head_dim": 4, "num_attention_heads": 16, "num_key_value_heads": 1}
    narrow_model = write_pair(tmp_path / "narrow", awq(32), {}, narrow, skip=("proj",))[1]
    assert refused([str(narrow_model), "--group-size", "32"], tmp_path / "out", monkeypatch) == 3
    assert "k_proj.weight has 4 outputs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arch", "code", "words"), [("granite", 3, "cannot be rewritten"), ("qwen3moe", 2, "Models with experts")]
)
def test_models_in_gguf_that_cannot_become_a_folder(
    arch: str,
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "model.gguf", arch, rival_of(arch))
    assert refused([str(tmp_path / "model.gguf"), "--group-size", "32"], tmp_path / "out", monkeypatch) == code
    assert words in capsys.readouterr().err


def test_the_text_without_a_file(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    found = pieces(tokenizer, None, 640, 64)
    assert [len(ids) for ids in found] == [64] * 10 and len({tuple(ids) for ids in found}) == 10
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with_chat = pieces(tokenizer, None, 640, 64)
    assert len(with_chat) == 10 and with_chat[0] == found[0]
    assert sum("<assistant>" in tokenizer.decode(ids) for ids in with_chat) >= 1


def test_table_of_methods(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "perplexity", str(folder / "text.txt"), "--model", str(folder), "--context", "128"]
    words += ["--max-windows", "2", "--group-size", "32"]
    assert main([*words, "--methods", "int8,rtn,fp8,fp8-kv,int4", "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["float32", "int8", "rtn", "fp8", "fp8-kv", "int4"]
    assert rows["float32"]["loss"] == 0 and all(abs(row["loss"]) < 0.2 for row in rows.values())
    assert rows["rtn"]["smaller"] > 3.3 and 1.9 < rows["int8"]["smaller"] < 2 and rows["fp8-kv"]["smaller"] == 0.5
    assert main([*words, "--methods", "best"]) == 2
    assert main([*words, "--methods", "int8"]) == 0
    assert "| int8 |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_gguf_file_becomes_a_folder_that_others_read(smollm2_gguf: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    out = tmp_path / "out"
    words = ["quantize", str(smollm2_gguf), str(out), "--method", "rtn", "--group-size", "64", "--device", "cpu"]
    assert main(words) == 0
    config = AutoConfig.from_pretrained(out)
    assert config.model_type == "llama" and config.quantization_config["quant_method"] == "gptq"
    ids = AutoTokenizer.from_pretrained(out)("The capital of France is").input_ids
    made, given = LLM(str(out), max_model_len=128), LLM(str(smollm2_gguf), max_model_len=128)
    assert made.get_tokenizer().encode("The capital of France is") == ids
    assert made.get_tokenizer().eos_ids == given.get_tokenizer().eos_ids
    params = SamplingParams(max_tokens=3, temperature=0)
    for llm in (made, given):
        assert "Paris" in llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text
