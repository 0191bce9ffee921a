"""What all routes share: the engine, the gate, the names it answers to, and the work on text.

Short texts are tokenised and rendered on the spot; long ones, and templates that a client brings, in two threads, so
that the event loop goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from octavo.config import ServerConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import ConfigError
from octavo.metrics.server import ServerMetrics
from octavo.server.admit import Gate
from octavo.server.job import Job
from octavo.server.problem import Problem
from octavo.server.protocol import MAX_MESSAGES, ChatBody, TokenizeBody
from octavo.text.bad_words import bad_sequences
from octavo.text.template import render_chat

QUEUED_REQS = 1024  # sequences that may wait, unless the user gives a number
INLINE_CHARS = 8192
SIGN_SECONDS = 5.0  # readiness: how old the engine's last sign of life may be
_MAX_TEMPLATE = 1 << 16

T = TypeVar("T")


class Service:
    """One model behind HTTP. `jobs`: what is under way."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, metrics: ServerMetrics) -> None:
        self.llm = llm
        self.config = config
        self.metrics = metrics
        queue = llm.config.scheduler.max_num_queued_reqs
        self.gate = Gate(QUEUED_REQS if queue is None else queue, metrics.refused)
        self.jobs: set[Job] = set()
        self.names = [name.strip() for name in (config.served_model_name or llm.name).split(",") if name.strip()]
        self.created = int(time.time())
        self.template = _read_template(config.chat_template) or llm.tokenizer.chat_template
        self._longest = max(len(llm.tokenizer.token_bytes(i)) for i in range(llm.tokenizer.vocab_size))
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="text")

    @property
    def ready(self) -> bool:
        """Whether a request that comes now would be served: the engine runs a step, or gave a sign of life lately."""
        well = self.llm.failure is None and not self.llm.overdue(SIGN_SECONDS)
        return not self.gate.closed and self.gate.running > 0 and well

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises Problem for a model that is not served."""
        if name is None or name in self.names:
            return name or self.names[0]
        raise Problem(
            404,
            f"The model {name[:80]!r} is not served here. Served: {', '.join(self.names)}.",
            code="model_not_found",
        )

    def open(self, job: Job) -> Job:
        """Keep track of a job until it closes."""
        self.jobs.add(job)
        job.on_close = self._closed
        return job

    def _closed(self, job: Job) -> None:
        self.jobs.discard(job)

    async def tokenize(self, text: str, special: bool) -> list[int]:
        """Token ids of a text. Raises Problem when it can be told unseen that it does not fit."""
        most = self._longest * self.llm.limits.max_model_len
        if len(text) > most:
            raise Problem(
                400,
                f"The prompt has {len(text)} characters, which are more than {self.llm.limits.max_model_len} tokens "
                "(max_model_len). Shorten it.",
                param="prompt",
            )
        return await self.work(len(text), lambda: self.llm.tokenizer.encode(text, add_special_tokens=special))

    async def render(self, body: ChatBody | TokenizeBody, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that messages make. Raises Problem, RequestError."""
        if len(messages) > MAX_MESSAGES:
            raise Problem(400, f"There are {len(messages)} messages. Give at most {MAX_MESSAGES}.", param="messages")
        if body.chat_template is not None and not self.config.trust_request_chat_template:
            raise Problem(
                400,
                "chat_template of requests is not used here. Leave it out, or start with "
                "--trust-request-chat-template.",
                param="chat_template",
            )
        extra = dict(body.chat_template_kwargs or {})
        if body.documents is not None:
            extra["documents"] = body.documents
        if isinstance(body, ChatBody) and body.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", body.reasoning_effort)
        generation = body.add_generation_prompt
        if generation is None:
            generation = not body.continue_final_message
        tokenizer = self.llm.tokenizer

        def task() -> str:
            return render_chat(
                body.chat_template or self.template,
                messages,
                tools=body.tools or None,
                add_generation_prompt=generation,
                continue_final_message=bool(body.continue_final_message),
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                extra=extra,
            )

        size = INLINE_CHARS + 1 if body.chat_template else sum(map(_size, (*messages, body.tools, extra)))
        return await self.work(size, task)

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell `words`. Raises RequestError."""
        if not words:
            return ()
        return await self.work(INLINE_CHARS + 1, lambda: bad_sequences(words, self.llm.tokenizer))

    async def work(self, size: int, task: Callable[[], T]) -> T:
        """Run a task on `size` characters: here when that is short, else in a thread."""
        if size <= INLINE_CHARS:
            return task()
        return await asyncio.get_running_loop().run_in_executor(self._pool, task)

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _size(value: Any) -> int:
    """About how many characters a JSON value has."""
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, Mapping):
        return sum(len(key) + _size(item) for key, item in value.items())
    return sum(map(_size, value)) if isinstance(value, list) else 8


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template {path} cannot be read: {error}.", "Check --chat-template.") from None
    if len(text) > _MAX_TEMPLATE:
        raise ConfigError(f"The chat template {path} has {len(text)} characters.", f"At most {_MAX_TEMPLATE}.")
    return text
