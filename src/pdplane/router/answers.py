"""Answers that the router itself gives: OpenAI's error bodies, and HTTP heads."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from pdplane.core.errors import Cause

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_encode = msgspec.json.Encoder().encode


def status_line(status: int) -> bytes:
    """``HTTP/1.1 200 OK`` with its line end."""
    line = _LINES.get(status)
    if line is None:
        line = _LINES[status] = f"HTTP/1.1 {status} {_phrase(status)}\r\n".encode()
    return line


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Client Closed Request" if status == 499 else "Unknown"


_LINES: dict[int, bytes] = {}


def error_body(cause: Cause) -> bytes:
    """``{"error": {...}}`` as OpenAI's clients read it; `side` and `retryable` are ours."""
    error: dict[str, object] = {
        "message": cause.message,
        "type": _TYPES.get(cause.status, "invalid_request_error" if cause.status < 500 else "server_error"),
        "param": cause.param,
        "code": cause.code,
        "retryable": cause.retryable,
    }
    if cause.side:
        error["side"] = cause.side
    return _encode({"error": error})


def error_event(cause: Cause) -> bytes:
    """An SSE event that ends a stream whose first bytes are out. The blank line ends what may have been cut."""
    return b"\n\ndata: " + error_body(cause) + b"\n\n"


def answer(
    status: int, body: bytes, *, headers: bytes = b"", content_type: bytes = b"application/json", close: bool = False
) -> bytes:
    """A whole answer. `headers` are ready lines with their ends."""
    return b"".join((
        status_line(status),
        b"content-type: ", content_type, b"\r\n",
        headers,
        b"content-length: %d\r\n" % len(body),
        b"connection: close\r\n\r\n" if close else b"\r\n",
        body,
    ))  # fmt: skip


def json_answer(value: object, *, status: int = 200, close: bool = False) -> bytes:
    return answer(status, _encode(value), close=close)


def error_answer(cause: Cause, *, headers: bytes = b"", close: bool = False) -> bytes:
    if cause.retry_after_s is not None:
        headers += b"retry-after: %d\r\n" % cause.retry_after_s
    return answer(cause.status, error_body(cause), headers=headers, close=close)
