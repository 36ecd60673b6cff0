"""The client's side: one Protocol per connection. Heads and bodies in, answers out, one request at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

import httptools
import msgspec

from pdplane.core.errors import Cause, bad_request

from .answers import error_answer

if TYPE_CHECKING:
    from .routing import InFlight, Router

log = logging.getLogger(__name__)

PIPELINED = 8  # whole requests of one connection that may wait before it is read no further, or be handled in one turn

_WANTED = frozenset(
    {
        b"content-length",
        b"authorization",
        b"traceparent",
        b"x-request-id",
        b"x-request-timeout",
        b"expect",
        b"connection",
    }
)
_PATHS = {path.encode(): path for path in ("/v1/chat/completions", "/v1/completions", "/generate")}


class Incoming(msgspec.Struct, eq=False, gc=False):
    """One whole request. `refusal` where it was refused while being read; the connection closes after its answer."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    keep: bool = True
    http10: bool = False
    refusal: Cause | None = None

    def passed_on(self) -> bytes:
        """Header lines that go on to the workers."""
        return self.line(b"authorization") + self.line(b"traceparent") if self.headers else b""

    def line(self, name: bytes) -> bytes:
        value = self.headers.get(name)
        return b"%b: %b\r\n" % (name, value) if value is not None else b""


class FrontConnection(asyncio.Protocol):
    """`current` is the exchange being answered; `keep` whether the connection outlives the answer."""

    __slots__ = (
        "_body",
        "_busy",
        "_dead",
        "_expect",
        "_handled",
        "_head_done",
        "_head_size",
        "_headers",
        "_http10",
        "_parser",
        "_parts",
        "_queue",
        "_reading_paused",
        "_refusal",
        "_router",
        "_size",
        "_url",
        "current",
        "keep",
        "lingering_since",
        "paused",
        "reading_since",
        "transport",
    )

    def __init__(self, router: Router) -> None:
        self._router = router
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Incoming] = deque()
        self._busy = False
        self._dead = False
        self._reading_paused = False
        self._handled = 0
        self._http10 = False
        self.transport: asyncio.Transport | None = None
        self.current: InFlight | None = None
        self.keep = True
        self.paused = False
        self.reading_since = 0.0  # a request has begun to arrive; 0: none
        self.lingering_since = 0.0  # closed for writing, reading what the client still sends; 0: not
        self._url = self._body = b""
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] | None = None
        self._head_size = self._size = 0
        self._head_done = False
        self._expect = False
        self._refusal: Cause | None = None

    # --- asyncio ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._router.fronts.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._dead = True
        self._queue.clear()
        self._router.fronts.discard(self)
        self._router.outbox.drop(self)
        exchange, self.current = self.current, None
        if exchange is not None:
            exchange.client_left()

    def data_received(self, data: bytes) -> None:
        if self._dead:
            return
        self._handled = 0
        if len(data) > self._router.config.max_head_bytes and not self._head_done:
            end = data.find(b"\r\n\r\n")
            self._check_head(end if end >= 0 else len(data))
            if self._refusal is not None:
                self._refused()
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._ignore_upgrade()
        except httptools.HttpParserError as error:
            self._refuse(bad_request(f"the request is not valid HTTP: {error}", code="bad_http"))
        if self._refusal is None and not self._head_done and self.reading_since:
            self._head_size += len(data)
            self._check_head(self._head_size)
        if self._refusal is not None:
            self._refused()

    def pause_writing(self) -> None:
        self.paused = True
        if self.current is not None:
            self.current.pause(True)

    def resume_writing(self) -> None:
        self.paused = False
        if self.current is not None:
            self.current.pause(False)
        elif self._queue:
            self._router.loop.call_soon(self._next)

    # --- httptools --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = self._body = b""
        self._headers = {}
        self._parts = None
        self._head_size = self._size = 0
        self._head_done = False
        self.reading_since = self._router.now

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        if key in _WANTED:
            self._headers[key] = value

    def on_headers_complete(self) -> None:
        self._head_done = True
        headers = self._headers
        length = headers.pop(b"content-length", None)
        if length is not None and int(length) > self._router.config.max_body_bytes:
            self._refuse(self._too_large())
        if b"expect" in headers and headers.pop(b"expect").lower() == b"100-continue":
            self._expect = self._refusal is None
            self._continue()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._refusal is not None:
            return
        if self._size > self._router.config.max_body_bytes:
            self._refuse(self._too_large())
            self._parts = None
        elif not self._body:
            self._body = body
        elif self._parts is None:
            self._parts = [self._body, body]
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        self.reading_since = 0.0
        if self._refusal is not None or self._dead:
            return
        parser = self._parser
        body = self._body if self._parts is None else b"".join(self._parts)
        path = _PATHS.get(self._url) or self._url.partition(b"?")[0].decode("latin-1")
        incoming = Incoming(parser.get_method().decode(), path, self._headers, body)
        incoming.keep = keep = parser.should_keep_alive()
        if not keep or b"connection" in self._headers:
            incoming.http10 = parser.get_http_version() == "1.0"
        self._expect = False
        if self._busy or self._queue or self._handled >= PIPELINED:
            self._wait(incoming)
        else:
            self._handle(incoming)

    # --- one at a time ------------------------------------------------------------------------------------------

    def _handle(self, incoming: Incoming) -> None:
        self._busy = True
        self._handled += 1
        self.keep = incoming.keep
        self._http10 = incoming.http10
        try:
            self._router.handle(self, incoming)
        except Exception:
            log.exception("handling %s %s failed", incoming.method, incoming.path)
            self._failed()

    def _failed(self) -> None:
        """A fault of ours is a 500, now and not at the deadline, and the connection's last answer."""
        self.keep = False
        cause = Cause("internal_error", "the router failed to handle the request", 500, side="router")
        if self.current is not None:
            self.current.cancel(cause)
        elif self._busy:
            self.respond(error_answer(cause, close=True))

    def _wait(self, incoming: Incoming) -> None:
        if not self._queue and not self._busy:
            self._router.loop.call_soon(self._next)
        self._queue.append(incoming)
        if len(self._queue) >= PIPELINED and not self._reading_paused and self.transport is not None:
            self._reading_paused = True
            self.transport.pause_reading()

    def _next(self) -> None:
        """Takes up what waits: a few a turn, so that one connection never holds up the others, and nothing while the
        client does not read."""
        self._handled = 0
        while self._queue and not (self._busy or self._dead or self.paused) and self._handled < PIPELINED:
            self._handle(self._queue.popleft())
        if self._queue and not (self._busy or self.paused):
            self._router.loop.call_soon(self._next)
        if self._reading_paused and len(self._queue) < PIPELINED and self.transport is not None:
            self._reading_paused = False
            self.transport.resume_reading()
        self._continue()

    def connection_header(self) -> bytes:
        """The line that says whether the connection stays open, where the client cannot know."""
        if not self.keep:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if self._http10 else b""

    def write(self, data: bytes) -> None:
        self._router.outbox.write(self, data)

    def respond(self, data: bytes) -> None:
        """A whole answer to the current request."""
        self.write(data)
        self.finished()

    def finished(self) -> None:
        """The current answer is out."""
        self.current = None
        self._busy = False
        if not self.keep or self._dead:
            self.close()
        elif self._queue or self._expect:
            self._router.loop.call_soon(self._next)

    def close(self) -> None:
        """Flush, then close."""
        self._dead = True
        if self.transport is not None:
            self._router.outbox.flush_one(self)
            self.transport.close()

    def _continue(self) -> None:
        if self._expect and not self._busy and not self._queue and not self._http10:
            self._expect = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # --- refusing what cannot be read ---------------------------------------------------------------------------

    def _refuse(self, cause: Cause) -> None:
        if self._refusal is None:
            self._refusal = cause

    def _check_head(self, size: int) -> None:
        limit = self._router.config.max_head_bytes
        if size > limit:
            self._refuse(
                Cause(
                    "head_too_large",
                    f"the request's head is over {limit} bytes; send fewer headers",
                    431,
                    side="router",
                )
            )

    def _too_large(self) -> Cause:
        limit = self._router.config.max_body_bytes
        return Cause("body_too_large", f"the request's body is over the limit of {limit} bytes", 413, side="router")

    def _refused(self) -> None:
        """No more is parsed. The refusal waits for its turn, and what the client still sends is read and dropped."""
        self._dead = True
        refused = Incoming("", "", {}, b"")
        refused.refusal = self._refusal
        refused.keep = False
        if self._busy or self._queue:
            self.keep = False  # the answer before it closes the connection
            self._queue.clear()
        else:
            self._router.handle(self, refused)

    def _ignore_upgrade(self) -> None:
        """The request is answered in plain HTTP/1.1, which refuses the other protocol; what follows is not ours."""
        if self._busy or self._queue:
            self.keep = False
            for waiting in self._queue:
                waiting.keep = False
        else:
            self.close()

    def linger(self, data: bytes) -> None:
        """A last answer to a client that may still be sending: write, say that no more comes, drop what arrives."""
        if self.transport is None:
            return
        self._router.outbox.flush_one(self)  # what was answered before goes first
        self.transport.write(data)
        self.lingering_since = self._router.now
        if self.transport.can_write_eof():
            self.transport.write_eof()
