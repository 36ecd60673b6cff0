"""Connections to workers: one Protocol per leg, kept in a LIFO pool per worker.

A leg belongs to one attempt of one exchange at a time, or to nobody (idle). It never replays: an idle connection
that turns out to be dead is a failed attempt, and the next attempt has another room.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

import httptools

from pdplane.core.attempts import NOBODY, Failure
from pdplane.core.errors import Cause

from .worker import Worker

if TYPE_CHECKING:
    from .driver import Driver
    from .outbox import Outbox

MAX_HEAD_BYTES = 64 * 1024
MAX_ERROR_BYTES = 1024 * 1024
STALE_WITHIN_S = 0.2
"""A connection that was closed while idle says so within a round trip of its next request. Later than this, the worker
had the request and died over it: it is to blame, and a retry must not go there again."""
HEAD_END = b"\r\n\r\n"


def with_length(lines: bytes, body: bytes) -> bytes:
    """The end of a request: header lines up to the value of content-length, which is added, and the body."""
    return b"".join((lines, str(len(body)).encode(), HEAD_END, body))


class WorkerAnswer:
    """A worker's own answer, whole: passed on verbatim where it is an error. `head` is raw header lines."""

    __slots__ = ("body", "head", "status")

    def __init__(self, status: int, head: bytes, body: bytes) -> None:
        self.status, self.head, self.body = status, head, body


class Leg(asyncio.Protocol):
    """Parses one worker's answers: `status` (0 until the head is here), `complete`, and what is `held` of the raw
    bytes. Subclasses say what a received piece means (`_received`)."""

    __slots__ = (
        "_keep",
        "_outbox",
        "_overrun",
        "_parser",
        "attempt",
        "complete",
        "exchange",
        "held",
        "idle_since",
        "paused",
        "reused",
        "sent_at",
        "status",
        "transport",
        "worker",
    )

    side = ""

    def __init__(self, worker: Worker, outbox: Outbox) -> None:
        self.worker = worker
        self._outbox = outbox
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.exchange: Driver | None = None
        self.attempt = 0
        self.reused = False
        self.idle_since = 0.0
        self.sent_at = 0.0
        self.paused = False
        self._reset()

    def _reset(self) -> None:
        self.held = b""
        self.status = 0
        self.complete = False
        self._keep = False
        self._overrun = False

    def send(self, exchange: Driver, attempt: int, data: bytes, now: float) -> None:
        """Take the leg for this attempt and send its request."""
        self.exchange, self.attempt, self.sent_at = exchange, attempt, now
        self._outbox.write(self, data)

    def pause(self, paused: bool) -> None:
        """Read no further, or again. A leg never goes back to the pool paused."""
        if paused is self.paused or self.transport is None:
            return
        self.paused = paused
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # --- ending ---------------------------------------------------------------------------------------------

    def end(self) -> bool:
        """Close it, whatever it does. True where the worker may have seen the request, so that an abort is owed."""
        self.exchange = None
        unsent = self._outbox.drop(self)
        self.discard()
        return not unsent

    def discard(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _free(self) -> None:
        """The answer was read to its end: back to the pool, or closed where it cannot serve again."""
        exchange, self.exchange = self.exchange, None
        if not self._keep or self.transport is None or exchange is None:
            self.discard()
            return
        if self.paused:
            self.pause(False)
        self.reused = True
        self._reset()
        self.idle_since = exchange.router.now
        self.worker.idle.append(self)

    # --- asyncio ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            self.discard()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("upstream_garbled", f"answered with what is not HTTP: {error}")
            return
        if self._overrun:
            self._fail("upstream_garbled", "sent bytes beyond its answer")
            return
        self._received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._outbox.drop(self)
        if self.exchange is None:
            if self in self.worker.idle:
                self.worker.idle.remove(self)
                self.worker.doubt()  # it closed what it might have kept: has it gone?
        elif self._ends_by_closing(exc):
            self.complete = True
            self._received(b"")
        elif self.reused and not self.status and not self.held and monotonic() < self.sent_at + STALE_WITHIN_S:
            self.worker.drop_idle()
            self._fail("stale_connection", "had closed an idle connection", blames=NOBODY)
        else:
            what = "broke off its answer" if self.status else "closed the connection before its answer"
            self._fail("upstream_reset", f"{what} ({exc})" if exc else what)

    def _ends_by_closing(self, exc: Exception | None) -> bool:
        """An answer without length or chunks ends where its connection does."""
        return exc is None and 200 <= self.status < 300 and not framed(self.head())

    # --- httptools --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            self._overrun = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        self.complete = True
        self._keep = self._parser.should_keep_alive()

    # --- for subclasses ---------------------------------------------------------------------------------------

    def _received(self, data: bytes) -> None:
        raise NotImplementedError

    def _hold(self, data: bytes) -> None:
        """Keep raw bytes until it is known what becomes of them; too many fail the leg."""
        self.held = self.held + data if self.held else data
        if len(self.held) > (MAX_ERROR_BYTES if self.status else MAX_HEAD_BYTES):
            self._fail("upstream_garbled", "sent a head without end" if not self.status else "sent an endless error")

    def head(self) -> bytes:
        """The header lines of what is held, each with its end, without the status line."""
        start, end = self.held.find(b"\r\n") + 2, self.held.find(HEAD_END) + 2
        return self.held[start:end]

    def _fail(self, code: str, what: str, *, blames: str = "") -> None:
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        cause = Cause(code, f"{self.side} {self.worker.url} {what}", 502, retryable=True, side=self.side)
        exchange.leg_failed(self, Failure(cause=cause, answered=False, blames=blames))
        self.discard()

    def _refused(self) -> None:
        """An error answer is here in full."""
        if self.status < 200:
            self._fail("upstream_garbled", f"answered with status {self.status}, which was not asked for")
            return
        exchange, answer = self.exchange, WorkerAnswer(self.status, self.head(), unframed(self.held))
        assert exchange is not None
        self._free()
        exchange.leg_refused(self, answer)


class Unframer:
    """A second parser beside the leg's, for who wants a body without its chunk framing (the slow path)."""

    __slots__ = ("_parser", "_parts")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def feed(self, raw: bytes) -> bytes:
        """The body's bytes in the next piece of a raw answer (head included)."""
        self._parser.feed_data(raw)
        parts, self._parts[:] = b"".join(self._parts), ()
        return parts


def unframed(raw: bytes) -> bytes:
    """The body of a whole raw answer."""
    return Unframer().feed(raw)


def framed(head: bytes) -> bool:
    """Whether the header lines say where the body ends."""
    low = b"\r\n" + head.lower()
    return b"\r\ncontent-length:" in low or b"\r\ntransfer-encoding:" in low


class Dial:
    """A leg whose connection is being made. It stands in for the leg until then."""

    __slots__ = ("_data", "_kind", "_task", "attempt", "exchange", "worker")

    def __init__(self, worker: Worker, exchange: Driver, attempt: int, data: bytes) -> None:
        self.worker, self.attempt, self._data = worker, attempt, data
        self.exchange: Driver | None = exchange
        self._kind = exchange.router.leg_class(worker)  # as the worker is now: its dialect is its process's
        self._task = asyncio.get_running_loop().create_task(self._connect(exchange))

    def end(self) -> bool:
        self.exchange = None
        self._task.cancel()
        return False

    async def _connect(self, exchange: Driver) -> None:
        router, worker, kind = exchange.router, self.worker, self._kind
        try:
            async with asyncio.timeout(router.config.connect_timeout_s):
                _, leg = await asyncio.get_running_loop().create_connection(
                    lambda: kind(worker, router.outbox), worker.address.host, worker.address.port
                )
        except (OSError, ValueError) as error:  # TimeoutError is an OSError; a host that is no name, a ValueError
            if self.exchange is not None:
                self._fail(exchange, kind.side, error)
            return
        if self.exchange is None:
            leg.discard()
            return
        exchange.dialled(self, leg, self._data)

    def _fail(self, exchange: Driver, side: str, error: Exception) -> None:
        why = "connection refused" if isinstance(error, ConnectionRefusedError) else str(error) or "connect timed out"
        cause = Cause("upstream_unreachable", f"{side} {self.worker.url}: {why}", 502, retryable=True, side=side)
        exchange.leg_failed(self, Failure(cause=cause))
