"""Everything that goes wrong, in the shape that OpenAI's clients read.

    {"error": {"message": cause and fix, "type": ..., "param": field or null, "code": ...}}

Handlers raise `Problem` or an `OctavoError`. Texts of other exceptions never reach a client: they get a number that
stands in the log as well.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from octavo.errors import EngineError, OctavoError, RequestError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class Problem(Exception):
    """One request cannot be answered. `extra` are further fields of the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.extra = extra or {}

    def body(self) -> dict[str, Any]:
        """The error as it is sent."""
        error = {
            "message": str(self),
            "type": _TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
            **self.extra,
        }
        return {"error": error}

    def response(self) -> Response:
        """The error as an HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`data` as JSON; no number that JSON does not know."""
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")


def problem_of(error: OctavoError) -> Problem:
    """What a client is told about one of our own errors."""
    if isinstance(error, RequestError):
        return Problem(400, str(error), param=error.param)
    if isinstance(error, EngineError):
        return Problem(503, "The engine is not running. Try again later.", headers={"retry-after": "5"})
    return Problem(500, "The server is not able to answer this request.")
