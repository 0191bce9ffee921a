"""The generating routes: `/v1/completions`, `/v1/chat/completions`, and `/generate` of the old demo server.

Order, which matters: the gate is asked before the body is read; seats are taken before any text is looked at; then
parameters, text, engine. What is started is closed by `stream.EventStream` or `stream.whole`, or here when something
goes wrong in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server import protocol
from octavo.server.body import read_json
from octavo.server.job import ClientGone, Job, as_problem
from octavo.server.problem import Problem, json_response
from octavo.server.protocol import ChatBody, CompletionBody, Sampling
from octavo.server.service import Service
from octavo.server.shape import ChatShape, Pieces, Shape, TextShape, prompt_logprobs
from octavo.server.stream import EventStream, Writer, whole

_log = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI has it; a chat may fill the context

Prepared = tuple[str | None, list[int]]
Extra = Callable[[], dict[str, Any]]  # further fields of a whole answer, once it is there


class Generation:
    """Handlers of the generating routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        self._service.gate.check()
        body = await read_json(request, CompletionBody)
        model = self._service.check_model(body.model)
        protocol.check_stream(body)
        prompts = protocol.prompts_of(body.prompt)
        most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        only_prompt = most == 0 and bool(body.echo) and not body.stream
        scored, reported = bool(body.echo) and body.logprobs is not None, body.prompt_logprobs is not None
        if scored and not reported:
            body.prompt_logprobs = body.logprobs
        params = protocol.sampling_params(body, 1 if only_prompt else most, body.logprobs)
        job = self._open(request, "completions", body, params, len(prompts))
        job.only_prompt = only_prompt
        try:
            special = body.add_special_tokens is not False
            await self._submit(request, job, body, [await self._prompt(prompt, special) for prompt in prompts])
            outputs = [stream.text.output for stream in job.streams]
            shape = TextShape(
                self._pieces(body),
                body.logprobs,
                self._echoes(body, job),
                params.n,
                bool(body.return_token_ids),
                outputs if scored else None,
                outputs if reported else None,
            )
        except BaseException:
            job.close()
            raise

        def extra() -> dict[str, Any]:
            return {"prompt_token_ids": [o.prompt_token_ids for o in outputs]} if body.return_token_ids else {}

        return await self._answer(job, shape, body, model, body.logprobs is None, extra)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        self._service.gate.check()
        body = await read_json(request, ChatBody)
        model = self._service.check_model(body.model)
        protocol.check_stream(body)
        protocol.check_tools(body)
        alternatives = protocol.chat_logprobs(body)
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        params = protocol.sampling_params(body, most, alternatives)
        job = self._open(request, "chat", body, params, 1)
        try:
            text = await self._service.render(body, body.messages)
            ids = await self._service.tokenize(text, special=False)
            await self._submit(request, job, body, [(text, ids)])
            shape = ChatShape(self._pieces(body), alternatives, "", bool(body.return_token_ids))
        except BaseException:
            job.close()
            raise
        output = job.streams[0].text.output

        def extra() -> dict[str, Any]:
            made: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if body.return_token_ids else {}
            return made if body.prompt_logprobs is None else made | {"prompt_logprobs": prompt_logprobs(output)}

        return await self._answer(job, shape, body, model, alternatives is None, extra)

    async def generate(self, request: Request) -> Response:
        """`POST /generate`: the demo server of old guides. The texts start with the prompt."""
        self._service.gate.check()
        body = await read_json(request, CompletionBody)
        self._service.check_model(body.model)
        protocol.check_demo(body)
        if not isinstance(body.prompt, str):
            raise Problem(400, "prompt is not a text. Give one.", param="prompt")
        most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = protocol.sampling_params(body, most, None)
        job = self._open(request, "generate", body, params, 1)
        try:
            special = body.add_special_tokens is not False
            await self._submit(request, job, body, [await self._prompt(body.prompt, special)])
        except BaseException:
            job.close()
            raise
        if body.stream:
            return DemoStream(job, body.prompt)
        try:
            while not job.finished:
                await job.changed()
            job.check()
            return json_response(demo_texts(job, body.prompt))
        finally:
            job.close()

    def _open(self, request: Request, route: str, body: Sampling, params: Any, prompts: int) -> Job:
        service = self._service
        timeout = protocol.timeout_of(body, service.config.default_timeout)
        job = service.open(Job(service.llm, service.gate, route, params, prompts))
        job.end_after(timeout)
        job.watch(request.receive)
        return job

    async def _prompt(self, prompt: str | list[int], special: bool) -> Prepared:
        if isinstance(prompt, list):
            return None, prompt
        if not prompt:
            raise Problem(400, "A prompt is empty. Give some text or token ids.", param="prompt")
        return prompt, await self._service.tokenize(prompt, special)

    async def _submit(self, request: Request, job: Job, body: Sampling, prepared: Sequence[Prepared]) -> None:
        tenant = request.state.tenant
        salt = ""
        if tenant or body.cache_salt:
            check_salt(body.cache_salt)
            salt = sha256(f"{tenant}:{body.cache_salt or ''}".encode()).hexdigest()
        bad = await self._service.bad_words(job.params.bad_words or ())
        for text, ids in prepared:
            job.submit(ids, text, salt, tenant, bad)

    def _echoes(self, body: CompletionBody, job: Job) -> list[str]:
        """What goes before each prompt's answers: the prompt as it was given, or as it was cut."""
        if not body.echo:
            return [""] * len(job.streams)
        decode, cut = self._service.llm.tokenizer.decode, body.truncate_prompt_tokens is not None
        outputs = [stream.text.output for stream in job.streams]
        return [decode(o.prompt_token_ids) if cut or o.prompt is None else o.prompt for o in outputs]

    def _pieces(self, body: Sampling) -> Pieces:
        tokenizer = self._service.llm.tokenizer
        hidden = frozenset() if body.skip_special_tokens is False else tokenizer.special_ids
        return Pieces(tokenizer, bool(body.return_tokens_as_token_ids), hidden)

    async def _answer(
        self, job: Job, shape: Shape, body: Sampling, model: str, silent: bool, extra: Extra
    ) -> Response:
        if not body.stream:
            return await whole(job, shape, model, extra)
        interval = body.stream_interval or body.chunk_size or self._service.config.stream_interval
        options, ids = body.stream_options or protocol.StreamOptions(), bool(body.return_token_ids)
        writer = Writer(
            job,
            shape,
            model,
            interval,
            bool(options.include_usage),
            silent and not ids,
            running_usage=bool(options.continuous_usage_stats),
            prompts=ids,
        )
        return EventStream(job, writer)


def check_salt(salt: str | None) -> None:
    """Raise Problem for a cache salt that is not a short printable text."""
    if salt is not None and (len(salt) > 64 or not salt.isprintable()):
        raise Problem(400, "cache_salt is not a printable text of at most 64 characters.", param="cache_salt")


def demo_texts(job: Job, prompt: str) -> dict[str, list[str]]:
    """The body of the demo server's answers."""
    return {"text": [prompt + choice.text for _, _, choice in job.choices]}


class DemoStream(Response):
    """`/generate` with `stream`: JSON objects with all the text so far, each followed by a zero byte.

    The last one has all the text, or an `error`.
    """

    def __init__(self, job: Job, prompt: str) -> None:
        self.background = None
        self.status_code = 200
        self._job = job
        self._prompt = prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by Starlette."""
        job, started = self._job, False
        try:
            while True:
                await job.changed()
                data = msgspec.json.encode(demo_texts(job, self._prompt)) + b"\0"
                over = job.finished  # as `data` is; more may come while it is sent
                if not started:
                    headers = [(b"content-type", b"application/json")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    started = True
                await send({"type": "http.response.body", "body": data, "more_body": not over})
                if over:
                    return
        except ClientGone:
            return
        except Exception as error:
            problem = as_problem(error)
            if problem.status == 500 and not isinstance(error, Problem):
                _log.exception("A stream failed.")
            if not started:
                await problem.response()(scope, receive, send)
                return
            data = msgspec.json.encode(problem.body()) + b"\0"
            await send({"type": "http.response.body", "body": data, "more_body": False})
        finally:
            job.close()
