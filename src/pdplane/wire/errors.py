"""Causes as HTTP answers: the error body that OpenAI's clients read, with two keys more.

`retryable` says whether a new attempt is safe. `side` names where the cause arose and is left out where the answer
would be the same on every side, so that bad input gets one body from an aggregated worker, a leg and the router.
"""

from __future__ import annotations

import msgspec

from pdplane.core.errors import Cause

JSON = "application/json"

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retryable: bool = False
    side: str | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_type(status: int) -> str:
    """OpenAI's error class of an HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_detail(cause: Cause) -> ErrorDetail:
    return ErrorDetail(
        message=cause.message,
        type=error_type(cause.status),
        param=cause.param,
        code=cause.code,
        retryable=cause.retryable,
        side=cause.side or msgspec.UNSET,
    )


def error_body(cause: Cause) -> bytes:
    return msgspec.json.encode(ErrorBody(error_detail(cause)))


def error_event(cause: Cause) -> bytes:
    """The same body as a server-sent event, for a stream whose head has gone out."""
    return b"data: " + error_body(cause) + b"\n\n"


def error_headers(cause: Cause) -> dict[str, str]:
    return {} if cause.retry_after_s is None else {"retry-after": str(cause.retry_after_s)}
