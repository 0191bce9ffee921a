"""Models without a chat template: case B-51."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.text.tokenizer import Tokenizer
from octavo.weights.gguf import GgufCheckpoint
from tests.server.running import Running


def test_b51_a_model_without_a_chat_template(tmp_path: Path, smollm2_gguf: Any) -> None:
    """Completions work, chat is a 400 that says so; with --chat-template chat works."""
    backend = Tokenizer.from_gguf(GgufCheckpoint(smollm2_gguf).metadata)._backend
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (tmp_path / "config.json").write_text("{}")
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    model = ("--model", str(tmp_path), "--served-model-name", "bare")
    with Running(*model) as server:
        assert server.complete().status == 200
        reply = server.chat()
        assert reply.status == 400 and "chat template" in reply.error["message"]
    with Running(*model, "--chat-template", str(template)) as server:
        assert server.chat(max_tokens=2).status == 200
        ids = server.call("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json["tokens"]
        assert server.call("/detokenize", {"tokens": ids}).json["prompt"] == "user: Hi\n"
