"""The text that `octavo quantize` reads to see what a model's products are given, in pieces of equal length.

Without a file it is half prose (`calibration.txt`: from the proceedings of a workshop at the Library of Congress in
1992, in the public domain), a quarter code (modules of Python itself) and a quarter chat (Python's language reference
as answers in the model's own format).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

_MODULES = ("argparse", "difflib", "heapq", "textwrap", "statistics", "random", "datetime", "typing", "doctest")
_MOST_ANSWER = 1500  # characters of one answer in the chat


def pieces(tokenizer: Tokenizer, path: Path | None, tokens: int, context: int) -> list[list[int]]:
    """`tokens` ids in pieces of `context`, spread over the text. ConfigError: it cannot be read, or is too short."""
    count = max(tokens // context, 1)
    if path is None:
        chat = _spread(_chat(tokenizer), count // 4, context)
        code = _spread(tokenizer.encode(_code(), parse_special=False), count // 4, context)
        rest = count - len(chat) - len(code)
        return [*_spread(tokenizer.encode(_prose(), parse_special=False), rest, context), *code, *chat]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", "Give a UTF-8 text file.") from None
    ids = tokenizer.encode(text, parse_special=False)
    if len(ids) < context:
        raise ConfigError(f"The text has {len(ids)} tokens, fewer than --context {context}.", "Give a longer text.")
    return _spread(ids, count, context)


def _spread(ids: list[int], count: int, context: int) -> list[list[int]]:
    step = max(context, len(ids) // max(count, 1))
    return [ids[at : at + context] for at in range(0, len(ids) - context + 1, step)][:count]


def _prose() -> str:
    return Path(__file__).with_name("calibration.txt").read_text(encoding="utf-8")


def _code() -> str:
    import sysconfig

    folder = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES)


def _chat(tokenizer: Tokenizer) -> list[int]:
    """Questions and answers; nothing for a model without a chat format for them."""
    from pydoc_data.topics import topics

    from octavo.text.template import render_chat

    found: list[int] = []
    for name, text in sorted(topics.items()):
        question = {"role": "user", "content": f"Explain {name} in Python."}
        answer = {"role": "assistant", "content": text[:_MOST_ANSWER]}
        try:
            rendered = render_chat(
                tokenizer.chat_template,
                [question, answer],
                add_generation_prompt=False,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
            )
        except RequestError:
            return []
        found += tokenizer.encode(rendered, add_special_tokens=False)
    return found
