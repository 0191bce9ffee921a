"""The text that `octavo quantize` reads to see what a model's products are given, in pieces of equal length.

Without a file it is half prose (`calibration.txt`: from the proceedings of a workshop at the Library of Congress in
1992, in the public domain), a quarter code (modules of Python itself) and a quarter chat (Python's language reference
as answers in the model's own format).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_MODULES = ("argparse", "difflib", "heapq", "textwrap", "statistics", "random", "datetime", "typing", "doctest")
_MOST_ANSWER = 1500  # characters of one answer in the chat


def pieces(tokenizer: Tokenizer, path: Path | None, tokens: int, context: int) -> list[list[int]]:
    """`tokens` ids in whole pieces of `context`, one at least, spread over the text; a warning where it has fewer.

    ConfigError: it cannot be read, or makes no piece.
    """
    count = max(tokens // context, 1)
    rest: list[list[int]] = []
    if path is None:
        rest = _spread(tokenizer.encode(_code(), parse_special=False), count // 4, context)
        rest += _spread(_chat(tokenizer), count // 4, context)
    text = _prose() if path is None else _read(path)
    ids = tokenizer.encode(text, parse_special=False)
    if len(ids) < context:
        cause = f"The calibration text has {len(ids)} tokens, fewer than --context {context}."
        raise ConfigError(cause, "Give a longer text, or a smaller --context.")
    found = _spread(ids, count - len(rest), context) + rest
    if len(found) < count:
        _log.warning("The calibration text makes %d tokens; %d were asked for.", len(found) * context, tokens)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", "Give a UTF-8 text file.") from None


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
