"""The ASGI application: routes, and what stands around them.

From the outside in: counting of responses, the guard (`octavo.server.auth`), Starlette's router with exact paths, and
the handlers. Every error leaves in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import OctavoError
from octavo.metrics.server import ServerMetrics
from octavo.server.auth import Guard, Keys
from octavo.server.body import decoder, read_json
from octavo.server.debug import job_table, step_table
from octavo.server.job import ClientGone
from octavo.server.openai import Generation
from octavo.server.problem import Problem, json_response, problem_of
from octavo.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo.server.service import Service

_log = logging.getLogger(__name__)

MAX_DETOKENIZE = 1 << 20
KV_STATE_SECONDS = 5.0
_STATIC = {"/": ("index.html", "text/html"), "/static/page.js": ("page.js", "text/javascript"),
           "/static/page.css": ("page.css", "text/css")}  # fmt: skip
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def build_app(service: Service, keys: Keys, check_host: bool) -> ASGIApp:
    """The application around one service."""
    for kind in (ChatBody, CompletionBody, DetokenizeBody, TokenizeBody):
        decoder(kind)  # now, not during the first request
    generation, control = Generation(service), Control(service)
    table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("POST", "/v1/chat/completions", generation.chat),
        ("POST", "/v1/completions", generation.completions),
        ("POST", "/generate", generation.generate),
        ("GET", "/v1/models", control.models),
        ("GET", "/v1/models/{model:path}", control.model),
        ("POST", "/tokenize", control.tokenize),
        ("POST", "/detokenize", control.detokenize),
        ("GET", "/livez", control.live),
        ("GET", "/readyz", control.ready),
        ("GET", "/health", control.ready),
        ("GET", "/version", control.version),
        ("GET", "/metrics", control.metrics),
        ("GET", "/debug/kv", control.kv),
        ("GET", "/debug/kv.txt", control.kv_text),
        ("GET", "/debug/requests", control.requests),
        ("GET", "/debug/steps", control.steps),
        *(("GET", path, control.page) for path in _STATIC),
    ]
    handlers: dict[Any, Any] = {
        Problem: _on_problem,
        OctavoError: _on_octavo_error,
        ClientGone: _on_client_gone,
        HTTPException: _on_http_exception,
        Exception: _on_bug,
    }
    routes = [Route(path, handler, methods=[method]) for method, path, handler in table]
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Count(Guard(app, keys, check_host), service.metrics)


class Count:
    """ASGI middleware: counts responses by class of status; adds an id to each."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = secrets.token_hex(8)
        scope["state"]["number"], scope["state"]["send"] = number, send

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.http.add(1, f"{message['status'] // 100}xx")
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", number.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:  # Starlette raises it again once the client has its answer
            _log.exception("Request %s failed.", number)


async def _on_problem(request: Request, error: Problem) -> Response:
    return error.response()


async def _on_octavo_error(request: Request, error: OctavoError) -> Response:
    return problem_of(error).response()


async def _on_client_gone(request: Request, error: ClientGone) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        return Problem(404, "There is no such route. See docs/server.md for the list.").response()
    return Problem(error.status_code, str(error.detail), headers=dict(error.headers or {})).response()


async def _on_bug(request: Request, error: Exception) -> Response:
    number = request.state.number
    return Problem(500, f"The server failed on this request; the log has it under {number}.").response()


class Control:
    """Handlers of all routes that generate nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        data = [self._card(name) for name in self._service.names]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        return json_response(self._card(self._service.check_model(request.path_params["model"])))

    def _card(self, name: str) -> dict[str, Any]:
        service = self._service
        facts = service.llm.facts
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "octavo",
            "root": service.names[0],
            "max_model_len": facts.max_model_len if facts is not None else None,
            "scheduling_policy": service.llm.config.scheduler.scheduling_policy,
            "priority_order": service.llm.config.scheduler.priority_order,
        }

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: of a prompt, or of messages through the chat template."""
        service = self._service
        service.gate.check()
        body = await read_json(request, TokenizeBody)
        service.check_model(body.model)
        with service.gate.seat():
            return await self._tokenized(body)

    async def _tokenized(self, body: TokenizeBody) -> Response:
        service = self._service
        if (body.prompt is None) == (body.messages is None):
            raise Problem(400, "Give either prompt or messages.", param="prompt")
        if body.messages is not None:
            text = await service.render(body, body.messages)
            ids = await service.tokenize(text, bool(body.add_special_tokens))
        else:
            ids = await service.tokenize(body.prompt or "", body.add_special_tokens is not False)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.llm.limits.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [service.llm.tokenizer.id_to_token(i) for i in ids]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        gate = self._service.gate
        gate.check()
        body = await read_json(request, DetokenizeBody)
        tokenizer, size = self._service.llm.tokenizer, self._service.llm.limits.vocab_size
        if len(body.tokens) > MAX_DETOKENIZE:
            raise Problem(400, f"There are {len(body.tokens)} tokens. Give at most {MAX_DETOKENIZE}.", param="tokens")
        wrong = next((token for token in body.tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise Problem(400, f"{wrong} is no token id. Ids are 0 to {size - 1}.", param="tokens")
        with gate.seat():
            text = await self._service.work(len(body.tokens), lambda: tokenizer.decode(body.tokens, False))
        return json_response({"prompt": text})

    async def live(self, request: Request) -> Response:
        """`GET /livez`: this process answers."""
        return json_response({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """`GET /readyz`, `GET /health`: a request that comes now would be served."""
        if self._service.ready:
            return json_response({"status": "ready"})
        reason = self._service.gate.closed or "The engine gives no sign of life."
        return Problem(503, reason, headers={"retry-after": "5"}).response()

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        try:
            return json_response({"version": version("octavo")})
        except PackageNotFoundError:
            return json_response({"version": "0+checkout"})

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        return PlainTextResponse(
            self._service.metrics.text(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def kv(self, request: Request) -> Response:
        """`GET /debug/kv`: blocks, who holds them, what is shared."""
        try:
            async with asyncio.timeout(KV_STATE_SECONDS):
                return json_response(await self._service.llm.kv_state())
        except TimeoutError:
            raise Problem(503, "The engine did not answer in time.", headers={"retry-after": "5"}) from None

    async def kv_text(self, request: Request) -> Response:
        """`GET /debug/kv.txt`: the same as lines to read."""
        try:
            async with asyncio.timeout(KV_STATE_SECONDS):
                return PlainTextResponse(await self._service.llm.kv_text())
        except TimeoutError:
            raise Problem(503, "The engine did not answer in time.", headers={"retry-after": "5"}) from None

    async def requests(self, request: Request) -> Response:
        """`GET /debug/requests`: what is under way."""
        return json_response(job_table(self._service))

    async def steps(self, request: Request) -> Response:
        """`GET /debug/steps`: the engine's numbers of the last minute."""
        return json_response(step_table(self._service, time.monotonic()))

    async def page(self, request: Request) -> Response:
        """The page and its two files: static, without any data."""
        name, media_type = _STATIC[request.url.path]
        data = (files("octavo.server") / "static" / name).read_bytes()
        return Response(data, media_type=media_type, headers=_PAGE_HEADERS)
