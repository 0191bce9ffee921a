"""`LLM`: a model in this process, for offline generation.

    llm = LLM(model="folder, .gguf or hub id")
    for output in llm.generate(["Hello, my name is"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)

Names, defaults and result shapes are vLLM's. The engine runs in the caller's thread while a call is open; an `LLM` is
not thread-safe.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from octavo.config import engine_config
from octavo.engine.beam import BeamGroup, BeamParams, BeamSearch
from octavo.engine.build import Engine, build_engine, open_model, tokenizer_of, with_ends
from octavo.engine.client import build_beam_request, build_request, cut_prompt, with_keys
from octavo.engine.inspect import kv_state, kv_text
from octavo.errors import EngineError, RequestError
from octavo.scheduler.records import REASONS, STOP, Stats, TokenBatch
from octavo.text.bad_words import bad_sequences
from octavo.text.outputs import RequestText, SampledLogprobs
from octavo.text.template import render_chat
from octavo.text.tokenizer import Tokenizer
from octavo.types import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSequence,
    EngineRequest,
    RequestOutput,
    SamplingParams,
)

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine

_log = logging.getLogger(__name__)

KEYED = 8  # prompt tokens that get their keys in one turn, in steps' worth

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """A model and an engine for it. Keyword options are the fields of `octavo.config`, under vLLM's names.

    model: folder, .gguf file or hub id; None is the embedded SmolLM2-135M-Instruct. skip_tokenizer_init: token ids
    only, no text. Raises ConfigError for options, ModelError for a model that cannot be loaded. `name`: what the
    model was called. `weight_bytes`: of its tensors as stored.
    """

    def __init__(self, model: str | None = None, *, skip_tokenizer_init: bool = False, **options: Any) -> None:
        config, notices = engine_config(model=model, **options)
        for notice in notices:
            _log.warning("%s", notice)
        opened = open_model(config)
        self.tokenizer = None if skip_tokenizer_init else tokenizer_of(opened)
        if self.tokenizer is not None:
            opened = with_ends(opened, self.tokenizer.eos_ids)
        self.name = opened.files.name
        self.weight_bytes = sum(opened.checkpoint.info(name).nbytes for name in opened.checkpoint.names())
        self._engine: Engine = build_engine(config, opened)
        self._numbers = itertools.count()
        self._texts: dict[int, RequestText] = {}
        self._bare: dict[int, Callable[[int], None]] = {}  # for requests whose tokens need nothing but to be kept
        self._first: dict[int, float] = {}  # when the first token came, and the last, of requests in `_texts`
        self._last: dict[int, float] = {}
        self._beams: dict[int, BeamGroup] = {}

    @property
    def engine(self) -> Engine:
        """The engine inside: its facts and its scheduler."""
        return self._engine

    @property
    def llm_engine(self) -> LLMEngine:
        """This engine in the spelling of old scripts: step by step, and with a view of its block manager."""
        from octavo.engine.llm_engine import LLMEngine

        return LLMEngine(self)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError when there is none."""
        return self._text("texts")

    def kv_state(self) -> dict[str, Any]:
        """The KV cache now, as plain values: who holds which block, what is shared; see `octavo.engine.inspect`."""
        return kv_state(self._engine.scheduler.state)

    def kv_text(self) -> str:
        """The same as lines to read: `print(llm.kv_text())`."""
        return kv_text(self.kv_state())

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        return self._engine.scheduler.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str = "",
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts, many at a time; results in the order of the prompts.

        A prompt is a text, a list of token ids, or {"prompt": text} / {"prompt_token_ids": ids}. One set of
        parameters serves all prompts, or one each; so does `priority`, which stands over that of the parameters.
        Every prompt is checked before anything runs: RequestError names
        the first that cannot be served.
        """
        batch = _as_prompts(prompts)
        params = _params_for(sampling_params, len(batch), priority)
        made: list[EngineRequest] = []
        try:
            for i, (prompt, param) in enumerate(zip(batch, params, strict=True)):
                made.append(self._make(prompt, param, cache_salt, f"Prompt {i}: " if len(batch) > 1 else ""))
            return self._run(made, use_tqdm)
        finally:  # an interrupt too must not leave requests behind
            self.drop([request.id for request in made])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            {
                "prompt_token_ids": self.tokenize_chat(
                    conversation,  # type: ignore[arg-type]
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                )
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, cache_salt=cache_salt)

    def tokenize_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of one conversation as the model's chat template writes it."""
        tokenizer = self._text("chat")
        template = chat_template or tokenizer.chat_template
        if template is None:
            raise RequestError(f"{self.name} has no chat template.", "Use generate, or give chat_template.")
        text = render_chat(
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of all prompts, `beam_width` each; results in the order of the prompts."""
        params = params or BeamSearchParams()
        limits = self._engine.limits
        added: list[int] = []
        try:
            for prompt in _as_prompts(prompts):
                ids = self._prompt_ids(prompt)[1]
                search = BeamParams(
                    width=params.beam_width,
                    max_tokens=min(params.max_tokens, limits.max_model_len - len(ids)),
                    eos=frozenset() if params.ignore_eos else frozenset(limits.eos_ids),
                    length_penalty=params.length_penalty,
                    early_stopping=params.early_stopping,  # type: ignore[arg-type]
                )
                number = next(self._numbers)
                self._engine.loop.submit(build_beam_request(number, ids, search, limits))
                self._beams[number] = BeamGroup(number, BeamSearch(search))
                added.append(number)
            while any(not self._beams[number].done for number in added):
                self.turn()
            return [self._beam_output(self._beams[number]) for number in added]
        finally:
            for number in added:
                self._engine.scheduler.abort(number)
                del self._beams[number]

    def _beam_output(self, group: BeamGroup) -> BeamSearchOutput:
        if group.error:
            raise EngineError("The model's logits were not finite during a beam search.", "Try another dtype.")
        hidden = set(self._engine.limits.eos_ids)
        decode = (lambda ids: "") if self.tokenizer is None else self.tokenizer.decode
        return BeamSearchOutput(
            [
                BeamSequence(list(b.tokens), decode([t for t in b.tokens if t not in hidden]), b.score)
                for b in group.search.results()
            ]
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[RequestOutput]:
        """Yield the growing result of one prompt after every step that changed it. Closing the iterator aborts it."""
        number = self.open(prompt, sampling_params or SamplingParams(), cache_salt)
        text = self._texts[number]
        try:
            sent = False
            while not sent:
                # Another stream may have driven the engine until this one was finished.
                if text.finished or number in self.turn():
                    sent = text.finished
                    yield text.snapshot()
        finally:
            self.drop([number])

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise RequestError when `generate` would refuse this prompt."""
        limits = self._engine.limits
        ids = cut_prompt(self._prompt_ids(prompt)[1], params, limits)
        build_request(0, ids, params, limits, bad=bad_sequences(params.bad_words or (), self.tokenizer))

    def open(self, prompt: Prompt, params: SamplingParams, salt: str = "", where: str = "") -> int:
        """Queue a request and return its number; `turn`, `result` and `drop` do the rest. `where` begins refusals."""
        request = self._make(prompt, params, salt, where)
        try:
            self._engine.loop.submit(with_keys(request, self._engine.limits))
        except RequestError as error:
            self._forget(request.id)
            raise type(error)(where + error.cause, error.fix, error.param) from None
        return request.id

    def _make(self, prompt: Prompt, params: SamplingParams, salt: str, where: str) -> EngineRequest:
        """A request that the engine has accepted but not yet got, without keys, and the place for its result."""
        number = next(self._numbers)
        try:
            text, ids = self._prompt_ids(prompt)
            ids = cut_prompt(ids, params, self._engine.limits)
            if params.stop_strings and self.tokenizer is None:
                raise RequestError("stop strings need a tokenizer.", "Use stop_token_ids.", "stop")
            bad = bad_sequences(params.bad_words or (), self.tokenizer)
            request = build_request(number, ids, params, self._engine.limits, salt, bad, keys=False)
            self._engine.scheduler.check_room(request)
        except RequestError as error:
            raise type(error)(where + error.cause, error.fix, error.param) from None
        result = self._texts[number] = RequestText(str(number), text, ids, params, self.tokenizer)
        tokens = result.bare()
        if tokens is not None:
            self._bare[number] = tokens.append
        return request

    def _prompt_ids(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        text: Any = None
        ids: Any = None
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text = prompt
        else:
            ids = prompt
        if ids is None:
            if not isinstance(text, str) or not text:
                raise RequestError("The prompt is empty.", "Give some text or token ids.", "prompt")
            ids = self._text("text prompts").encode(text)
        elif isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
            raise RequestError(f"The token ids are a {type(ids).__name__}.", "Give a list of integers.", "prompt")
        return text, ids

    def _text(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"This LLM has no tokenizer, which {what} need.", "Give token ids.", "prompt")
        return self.tokenizer

    def _run(self, requests: list[EngineRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Feed the engine a step's worth of prompts a turn, so that it computes while the others are made ready."""
        loop, waiting = self._engine.loop, deque(enumerate(requests))
        left = {request.id for request in requests}
        # What depends on who waits, or for how long, must see all prompts at once.
        capped = loop.caps.requests is not None or loop.caps.tokens is not None
        timed = any(request.timeout for request in requests)
        at_once = capped or timed or len({request.priority for request in requests}) > 1
        bar = tqdm(total=len(left), desc="Generating", unit="req", disable=None if use_tqdm else True)
        with bar:
            while left:
                room = self._engine.facts.max_num_batched_tokens  # what may be new to the prefix cache ...
                keyed = KEYED * room  # ... and in all: making keys takes time
                while waiting and (at_once or (room > 0 and keyed > 0)):
                    i, request = waiting.popleft()
                    request = with_keys(request, self._engine.limits)
                    tokens = len(request.prompt) // 4
                    room, keyed = room - tokens + self._engine.scheduler.cached(request), keyed - tokens
                    try:
                        loop.submit(request)
                    except RequestError as error:
                        where = f"Prompt {i}: " if len(requests) > 1 else ""
                        raise type(error)(where + error.cause, error.fix, error.param) from None
                ended = left & self._turn()[1]
                left -= ended
                bar.update(len(ended))
        return [self._texts[request.id].output for request in requests]

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget requests; those that still run are aborted."""
        for number in numbers:
            text = self._forget(number)
            if text is not None and not text.finished:
                self._engine.scheduler.abort(number)

    def _forget(self, number: int) -> RequestText | None:
        for kept in (self._bare, self._first, self._last):
            kept.pop(number, None)
        return self._texts.pop(number, None)

    def result(self, number: int) -> RequestOutput:
        """A copy of what a request has given so far."""
        return self._texts[number].snapshot()

    def turn(self) -> set[int]:
        """One turn of the engine; returns the requests whose results changed."""
        return self._turn()[0]

    def _turn(self) -> tuple[set[int], set[int]]:
        """One turn of the engine; the requests whose results changed, and those of them that are finished."""
        touched: set[int] = set()
        finished: set[int] = set()
        for batch in self._engine.loop.step():
            self._take_in(batch, touched, finished)
        return touched, finished

    def _take_in(self, batch: TokenBatch, touched: set[int], finished: set[int]) -> None:
        for group in self._beams.values():
            group.take_in(batch, self._engine.scheduler)
        for number, first, entries in batch.prompts:
            if number in self._texts:
                self._texts[number].push_prompt(first, cast(Sequence[SampledLogprobs], entries))
        now, numbers = time.monotonic(), batch.request_id.tolist()
        appends = list(map(self._bare.get, numbers))
        others = [i for i, append in enumerate(appends) if append is None] if None in appends else []
        for append, token in zip(appends, batch.token.tolist(), strict=True):
            if append is not None:
                append(token)
        came = self._texts.keys() & numbers
        touched |= came
        if len(self._first) < len(self._texts):
            self._first.update(dict.fromkeys(came - self._first.keys(), now))
        self._last.update(dict.fromkeys(came, now))
        aborted = self._push(batch, others) if others else False
        for end in batch.ended:
            number, text = end.request_id, self._texts.get(end.request_id)
            if text is not None:
                touched.add(number)
                text.report(end, REASONS[end.reason])
                text.timed(self._first.get(number, 0.0), self._last.get(number, 0.0), now)
                if text.finished:
                    finished.add(number)
        if aborted:  # what the engine has to say about them, before they are forgotten
            self._take_in(TokenBatch.of_ends(self._engine.scheduler.take_ended()), touched, finished)

    def _push(self, batch: TokenBatch, places: list[int]) -> bool:
        """Tokens of requests that do more with them, at these places of a batch; True: one ended a child."""
        stops = {(end.request_id, end.child) for end in batch.ended if end.reason == STOP}
        rows = list(zip(batch.request_id.tolist(), batch.child.tolist(), batch.token.tolist(), strict=True))
        aborted = False
        for i in places:
            number, child, token = rows[i]
            text = self._texts.get(number)
            logprobs: Any = batch.logprobs.get(i)
            if text is not None and text.push(child, token, logprobs, ends=(number, child) in stops):
                self._engine.scheduler.abort(number, child)
                aborted = True
        return aborted


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list; a list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and isinstance(items[0], int) and not isinstance(items[0], bool):
        return [items]
    return items


def _params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, priority: Sequence[int] | None
) -> list[SamplingParams]:
    each = [params or SamplingParams()] * count if params is None or isinstance(params, SamplingParams) else params
    for name, given in (("sampling_params", each), ("priority", each if priority is None else priority)):
        if len(given) != count:
            raise RequestError(f"There are {count} prompts and {len(given)} {name}.", "Give one each.")
    if priority is None:
        return list(each)
    return [replace(param, priority=value) for param, value in zip(each, priority, strict=True)]
