"""A request of several samples before workers that take one each: a pair of legs per sample, and one answer.

Every sample has a machine, legs and retries of its own (`Part`). The first one that fails for good ends the others:
before any byte has gone out its failure is the answer, after it an error event. A client that leaves ends all.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from pdplane.core import attempts
from pdplane.core.attempts import Failure
from pdplane.core.errors import CLIENT_CLOSED, Cause, Refused, client_left, deadline

from .answers import answer, chunk, failure_answer, late_error_event, status_line
from .body import Body, samples_of
from .driver import Driver
from .legs.params import CHAT
from .legs.rooms import DecodeLeg
from .merge import MergedBody, MergedStream, Merger, SampleFailed
from .records import RequestRecord
from .refusals import FRAMING, NOT_PASSED_ON, pair_for, without

if TYPE_CHECKING:
    from .front import FrontConnection, Incoming
    from .routing import Router

_SSE = b"text/event-stream"
_LAST_CHUNK = b"0\r\n\r\n"


class Part(Driver):
    """One sample. What it would say to a client, it says to its `Split`."""

    __slots__ = ("_split",)

    def __init__(self, split: Split, number: int, body: Body, incoming: Incoming, record: RequestRecord) -> None:
        super().__init__(split.router, incoming, record, split.timeout_s)
        self._split = split
        self.sample = number
        self._body = body

    def begin(self) -> None:
        assert self._body is not None
        try:
            pair = pair_for(self.path, self._body, self.router.pairing)
        except Refused as refused:
            self._carry(self._machine.no_pair(refused.cause))
            return
        self._chosen(pair)

    def forward(self, data: bytes) -> None:
        self._split.took(self, data)

    def _forward(self, _: attempts.Forward) -> None:
        leg = self._decode_leg
        assert isinstance(leg, DecodeLeg)
        assert self._attempt is not None
        self._attempt.first_byte = monotonic()
        self._body = None
        leg.unframe()
        self._split.began(self, leg)
        self._split.took(self, leg.take_held())

    def _reply(self, effect: attempts.Reply) -> None:
        self._split.failed(effect.failure)

    def _break(self, effect: attempts.Break) -> None:
        self._split.failed(Failure(cause=effect.cause))

    def _finish(self, effect: attempts.Finish) -> None:
        if self._attempt is not None:
            self._attempt.cause = effect.cause
        if self._machine.phase == attempts.DRAINING:
            self._drains(monotonic())
        if effect.cause is None:
            self._split.finished()


Part.carry = Driver.carry | {
    attempts.Forward: Part._forward,
    attempts.Finish: Part._finish,
    attempts.Reply: Part._reply,
    attempts.Break: Part._break,
}


class Split:
    """The whole: it stands where an exchange stands, before client and router. `front` is None once the answer is
    finished or the client has left."""

    __slots__ = (
        "_incoming",
        "_left",
        "_merger",
        "_parts",
        "_per_prompt",
        "_record",
        "_streaming",
        "deadline",
        "front",
        "label",
        "path",
        "request_id",
        "router",
        "timeout_s",
    )

    def __init__(
        self,
        router: Router,
        front: FrontConnection,
        incoming: Incoming,
        record: RequestRecord,
        timeout_s: float,
        body: Body,
    ) -> None:
        self.router = router
        self.front: FrontConnection | None = front
        self.path = incoming.path
        self.request_id = record.request_id
        self.timeout_s = timeout_s
        self.deadline = record.received + timeout_s
        self.label: tuple[bytes, str] | None = None
        self._incoming = incoming
        self._record = record
        bodies, self._per_prompt = samples_of(body, chat=self.path == CHAT)
        self._parts = [Part(self, number, one, incoming, record) for number, one in enumerate(bodies)]
        self._left = len(self._parts)
        self._merger: Merger | None = None  # once one answer has begun
        self._streaming = False  # our head is out

    def start(self) -> None:
        self._record.samples = self._left
        for part in self._parts:
            if self._over:
                return
            part.begin()

    @property
    def _over(self) -> bool:
        return self._record.finished > 0

    # --- from the client, and from the router -----------------------------------------------------------------------

    @property
    def authorization(self) -> bytes:
        return self._incoming.headers.get(b"authorization", b"")

    def client_left(self) -> None:
        self.front = None
        self._record.status = CLIENT_CLOSED
        self._end(client_left("router"))

    def cancel(self, cause: Cause) -> None:
        self.failed(Failure(cause=cause))

    def expired(self) -> None:
        self.failed(Failure(cause=deadline("router", self.timeout_s)))

    def pause(self, paused: bool) -> None:
        for part in self._parts:
            part.pause(paused)

    def end_silent(self) -> None:
        for part in self._parts:
            part.end_silent()

    # --- from the parts -----------------------------------------------------------------------------------------------

    def began(self, part: Part, leg: DecodeLeg) -> None:
        """The first byte of a sample's answer is there."""
        if self._over:
            return
        front = self.front
        assert front is not None
        if self._merger is None:
            self._begin(leg.status, leg.head(), front)
        if front.paused:
            part.pause(True)

    def _begin(self, status: int, head: bytes, front: FrontConnection) -> None:
        """The first of all: it decides whether the answer is a stream, and then its head is the answer's."""
        made_of = len(self._parts), self._per_prompt, self.request_id
        if _SSE not in head.lower():
            self._merger = MergedBody(*made_of)
            return
        self._merger = MergedStream(*made_of)
        self._streaming = True
        self._answers(status)
        if self._incoming.http10:
            front.keep = False
        framing = b"" if self._incoming.http10 else b"transfer-encoding: chunked\r\n"
        head = without(head, NOT_PASSED_ON + FRAMING)
        front.write(b"".join((status_line(status), head, framing, self._own_headers(front), b"\r\n")))

    def took(self, part: Part, data: bytes) -> None:
        """The next bytes of a sample's body."""
        if self._over or not data:
            return
        assert self._merger is not None
        try:
            self._write(self._merger.feed(part.sample, data))
        except SampleFailed as failed:
            self._broken(failed)

    def finished(self) -> None:
        """A sample's answer is complete."""
        self._left -= 1
        if self._left or self._over:
            return
        assert self._merger is not None
        try:
            closing = self._merger.closing()
        except SampleFailed as failed:
            self._broken(failed)
            return
        front = self.front
        assert front is not None
        if self._streaming:
            self._write(closing, last=True)
        else:
            self._answers(200)
            front.write(answer(200, closing, headers=self._own_headers(front)))
        self._end(None)

    def _broken(self, failed: SampleFailed) -> None:
        self.failed(Failure(cause=Cause("sample_failed", str(failed), 502, retryable=True, side="decode")))

    def failed(self, failure: Failure) -> None:
        """A sample failed for good, or something that ends all of them."""
        front, cause = self.front, failure.cause
        if self._over:
            return
        if front is not None and self._streaming:
            front.keep = False
            self._write(late_error_event(cause), last=True)
        elif front is not None:
            self._record.status = cause.status
            front.write(failure_answer(failure, self._own_headers(front)))
        self._end(cause)

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _answers(self, status: int) -> None:
        now = monotonic()
        self._record.status = status
        self.router.metrics.first_byte.observe(now - self._record.received)

    def _own_headers(self, front: FrontConnection) -> bytes:
        ours = f"x-request-id: {self.request_id}\r\nx-pd-mode: {self._record.mode}\r\n".encode()
        return ours if front.keep and not self._incoming.http10 else ours + front.connection_header()

    def _write(self, data: bytes, *, last: bool = False) -> None:
        front = self.front
        if front is None:
            return
        if not self._incoming.http10:
            data = (chunk(data) if data else b"") + (_LAST_CHUNK if last else b"")
        if data:
            front.write(data)

    def _end(self, cause: Cause | None) -> None:
        """The verdict, once: what still runs is ended."""
        if self._over:
            return
        record, front = self._record, self.front
        record.finished = monotonic()
        record.cause = cause
        self.front = None
        self.router.finished(self, record)
        if cause is not None:
            ended = cause if cause.expected else Cause("peer_leg_closed", f"the request ended: {cause}", CLIENT_CLOSED)
            for part in self._parts:
                if not part.over:
                    part.cancel(ended)
        if front is not None:
            front.finished()
