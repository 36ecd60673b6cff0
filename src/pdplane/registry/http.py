"""A small HTTP/1.1 server for handlers that answer at once: one asyncio Protocol a connection, httptools' parser.

Requests are answered in the order that they come, pipelined ones too. Malformed or oversize ones get their status and
the connection is closed; nothing they do reaches another connection.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable
from typing import cast

import httptools
import msgspec

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
MAX_HEAD_BYTES = 64 << 10
MAX_DISCARDED_BYTES = 8 << 20
JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in http.HTTPStatus}


class Request(msgspec.Struct):
    """`query` is filled in by whoever routes."""

    method: bytes
    url: bytes
    body: bytearray
    authorization: bytes = b""
    query: bytes = b""


class Response(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    content_type: str = TEXT

    def encoded(self, *, close: bool = False, bodyless: bool = False) -> bytes:
        head = (
            f"{_STATUS_LINES[self.status]}Content-Type: {self.content_type}\r\nContent-Length: {len(self.body)}\r\n"
            f"{'Connection: close' if close else 'Connection: keep-alive'}\r\n\r\n"
        )
        return head.encode() if bodyless else head.encode() + self.body


Handler = Callable[[Request], Response]


class HttpConnection(asyncio.Protocol):
    """`connections` is the set of open ones, kept by their server; `last_used` is for its idle sweep."""

    def __init__(self, handler: Handler, connections: set[HttpConnection], clock: Callable[[], float]) -> None:
        self._handler = handler
        self._connections = connections
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._refusal: Response | None = None
        self._discarded = 0
        self.last_used = clock()
        self.on_message_begin()

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._refusal is not None:
            self._discard(data)
            return
        self.last_used = self._clock()
        if not self._in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.close()  # the request was answered; what follows is not HTTP/1.1
        except httptools.HttpParserError as error:
            self._refuse(400, f"malformed HTTP: {error}")
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"request head over {MAX_HEAD_BYTES} bytes")
        if self._refusal is not None and self._transport is not None:
            self._transport.write(self._refusal.encoded(close=True))
            self._transport.write_eof()

    def _discard(self, data: bytes) -> None:
        """The refused client may still be sending: closing at once could take the answer from under it."""
        self._discarded += len(data)
        if self._discarded > MAX_DISCARDED_BYTES:
            self.close()

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        self._url = b""
        self._body = bytearray()
        self._authorization = b""
        self._in_body = False
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"authorization":
            self._authorization = value
        elif name == b"content-length" and int(value) > MAX_BODY_BYTES:
            self._refuse(413, f"body of {int(value)} bytes: the most is {MAX_BODY_BYTES}")
        elif name == b"expect" and value.lower() == b"100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        if len(self._body) + len(body) > MAX_BODY_BYTES:
            self._refuse(413, f"body over {MAX_BODY_BYTES} bytes")
        elif self._refusal is None:
            self._body += body

    def on_message_complete(self) -> None:
        if self._refusal is not None or self._transport is None or self._transport.is_closing():
            return
        method = self._parser.get_method()
        request = Request(method, self._url, self._body, self._authorization)
        keep = self._parser.should_keep_alive()
        self._answer(self._handled(request), close=not keep, bodyless=method == b"HEAD")

    # --- answers ---

    def _handled(self, request: Request) -> Response:
        try:
            return self._handler(request)
        except Exception:
            log.exception("%r %r", request.method, request.url)
            return Response(500, b"500: Internal Server Error")

    def _answer(self, response: Response, *, close: bool = False, bodyless: bool = False) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(response.encoded(close=close, bodyless=bodyless))
        if close:
            self._transport.close()

    def _refuse(self, status: int, text: str) -> None:
        """Answered when the parser returns; the first reason stays."""
        self._refusal = self._refusal or Response(status, text.encode())
