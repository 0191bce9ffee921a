"""What routes do before and after the engine, on a stub: text work outside the event loop, seats, answers' ends."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from octavo.server import service as service_module
from octavo.text.bad_words import bad_sequences
from octavo.text.tokenizer import Tokenizer
from octavo.weights.gguf import GgufCheckpoint
from tests.server.stub import ask, make


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Any) -> Tokenizer:
    return Tokenizer.from_gguf(GgufCheckpoint(smollm2_gguf).metadata)


def test_bad_words_are_spelled_once_and_not_on_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[threading.Thread] = []

    def spell(*args: Any) -> Any:
        seen.append(threading.current_thread())
        return bad_sequences(*args)

    monkeypatch.setattr(service_module, "bad_sequences", spell)
    service = make(tokenizer)
    body = {"prompt": ["a", "b", "c"], "bad_words": ["word"]}
    assert asyncio.run(ask(service, "/v1/completions", body))[0] == 200
    assert len(seen) == 1 and seen[0] is not threading.main_thread()
    wanted = bad_sequences(["word"], tokenizer)
    assert [request["bad"] for request in service.llm.submitted] == [wanted] * 3  # type: ignore[attr-defined]
    status, data = asyncio.run(ask(service, "/v1/completions", {"prompt": "a", "bad_words": ["a" * 64] * 64}))
    assert status == 400 and json.loads(data)["error"]["param"] == "bad_words" and service.gate.taken == 0
