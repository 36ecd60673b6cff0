"""Answers that the router itself gives: OpenAI's error bodies, and HTTP heads."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from pdplane.core.attempts import Failure
from pdplane.core.errors import Cause
from pdplane.wire.errors import error_body, error_event

from .refusals import FRAMING, NOT_PASSED_ON, content_type, without
from .upstream import WorkerAnswer

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


def late_error_event(cause: Cause) -> bytes:
    """An SSE event that ends a stream whose first bytes are out. The blank line ends what may have been cut."""
    return b"\n\n" + error_event(cause)


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


def failure_answer(failure: Failure, headers: bytes) -> bytes:
    """The worker's own answer where it gave one, else ours. `headers`: lines of ours."""
    cause, said = failure.cause, failure.reply
    if cause.status == 429 and cause.retry_after_s is None:
        headers += b"retry-after: 1\r\n"
    if isinstance(said, WorkerAnswer) and said.body:
        headers += without(said.head, NOT_PASSED_ON + FRAMING + (b"content-type:",))
        return answer(said.status, said.body, headers=headers, content_type=content_type(said.head))
    return error_answer(cause, headers=headers)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
