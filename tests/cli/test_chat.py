"""`octavo chat`: turns, streaming, commands, a context that is too small, an interrupted answer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.chat import Chat
from octavo.cli.main import main

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> LLM:
    return LLM(dtype="float32", max_model_len=256, num_gpu_blocks_override=64)


def reader(lines: Iterable[str]) -> Callable[[], str | None]:
    left = iter(lines)
    return lambda: next(left, None)


def talk(chat: Chat, *lines: str) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    chat.loop(reader(lines), out, err)
    return out.getvalue(), err.getvalue()


def test_turns_are_remembered(llm: LLM) -> None:
    chat = Chat(llm, GREEDY)
    out, err = talk(chat, "What is the capital of France?", "", "And of \\", "Italy?")
    assert out.startswith(PARIS + "\n")
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"] * 2
    assert chat.turns[2]["content"] == "And of \nItaly?"
    assert err.count("tokens/s]") == 2
    alone = llm.chat(chat.turns[:3], GREEDY, use_tqdm=False)[0].outputs[0].text
    assert chat.turns[3]["content"] == alone
    assert llm.stats.prefix_hit_tokens > 0


def test_the_answer_is_streamed(llm: LLM) -> None:
    pieces: list[str] = []

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    Chat(llm, GREEDY).loop(reader(["What is the capital of France?"]), Out(), io.StringIO())
    assert len([piece for piece in pieces if piece.strip()]) > 4
    assert "".join(pieces) == PARIS + "\n"


def test_commands(llm: LLM, tmp_path: Path) -> None:
    chat = Chat(llm, GREEDY)
    path = tmp_path / "talk.json"
    out, err = talk(
        chat,
        "/retry",
        "/system You answer in one word.",
        "What is the capital of France?",
        "/retry",
        "/set temperature 0.5",
        "/set seed 7",
        "/set max-tokens none",
        "/set top_p 7",
        "/set colour red",
        "/set top_k many",
        f"/save {path}",
        "/save",
        "/save /no/such/folder/x",
        "/stats",
        "/help",
        "/nonsense",
        "/undo",
        "/exit",
        "never reached",
    )
    assert out.count("\n") >= 2 and chat.turns == []
    assert chat.params == SamplingParams(temperature=0.5, seed=7, max_tokens=None)
    saved = json.loads(path.read_text())
    assert [turn["role"] for turn in saved] == ["system", "user", "assistant"]
    for words in ("no question yet", "top_p is 7", "temperature 0.5", "could not convert", "No such file"):
        assert words in err
    assert "KV blocks" in err and "/undo" in err and "no command /nonsense" in err


def test_the_oldest_turns_give_way(llm: LLM) -> None:
    chat = Chat(llm, SamplingParams(temperature=0, max_tokens=8))
    questions = [f"Question {i}: " + "tell me more about the river, " * 8 for i in range(4)]
    _, err = talk(chat, *questions)
    assert "left out" in err
    assert chat.turns[0]["content"] != questions[0] and chat.turns[-2]["content"] == questions[-1]


def test_a_question_that_never_fits(llm: LLM) -> None:
    chat = Chat(llm, GREEDY)
    out, err = talk(chat, "long " * 400, "What is the capital of France?")
    assert "max_model_len" in err and PARIS in out
    assert len(chat.turns) == 2


def test_an_interrupted_answer_is_kept_as_far_as_it_came(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(llm, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    real = LLM.stream

    def interrupted(self: LLM, *args: Any, **kwargs: Any) -> Any:
        for i, output in enumerate(real(self, *args, **kwargs)):
            if i == 3:
                raise KeyboardInterrupt
            yield output

    monkeypatch.setattr(LLM, "stream", interrupted)
    _, err = talk(chat, "Count to one hundred.")
    assert "(stopped)" in err and chat.turns[1]["role"] == "assistant"
    pool = llm.engine.scheduler.state.pool
    assert pool.free == pool.usable


def test_from_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n/exit\n"))
    options = ["--temperature", "0", "--max-tokens", "16", "--dtype", "float32", "--max-model-len", "128"]
    assert main(["chat", *options, "--num-gpu-blocks-override", "16"]) == 0
    out, err = capsys.readouterr()
    assert PARIS in out and "/help" in err
