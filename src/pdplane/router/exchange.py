"""One client request in flight, from its body to the last byte of its answer."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from pdplane.core import attempts
from pdplane.core.errors import CLIENT_CLOSED, Refused

from .answers import failure_answer, late_error_event, status_line
from .body import Body, read_body
from .driver import Driver
from .legs.rooms import DecodeLeg
from .records import RequestRecord
from .refusals import FRAMING, NOT_PASSED_ON, pair_for, without
from .split import Split
from .upstream import framed

if TYPE_CHECKING:
    from .front import FrontConnection, Incoming
    from .routing import Router

MAX_LABEL = 256
_SSE = b"text/event-stream"


class Exchange(Driver):
    """`front` is None once the client's answer is finished or it has left."""

    __slots__ = ("_head", "front", "label")

    def __init__(self, router: Router, front: FrontConnection, incoming: Incoming, timeout_s: float) -> None:
        now = monotonic()
        number, request_id = router.mint_request_id()
        record = RequestRecord(number, request_id, incoming.path, now, now + router.unix_offset_s)
        super().__init__(router, incoming, record, timeout_s)
        self.front: FrontConnection | None = front
        self.label: tuple[bytes, str] | None = None
        self._head = b""  # of decode's answer, once it is passed on

    def start(self) -> None:
        """Read the body, choose a pair, send its legs; or refuse."""
        router, record = self.router, self._record
        router.enter(self, record)
        try:
            self._body = body = read_body(self._incoming.body, router.config.max_samples)
            if body.samples > 1:
                self.samples = record.samples = body.samples
            pair = pair_for(self.path, body, router.pairing)
        except Refused as refused:
            self._carry(self._machine.no_pair(refused.cause))
            return
        self._incoming.body = b""  # its prefix is what is sent
        if body.stripped or self._incoming.headers:
            self._keep_label(body)
        if self.samples > 1 and pair is not None and pair.one_each:
            self._split(body)
        else:
            self._chosen(pair)

    def _keep_label(self, body: Body) -> None:
        for name in body.stripped:
            self.router.metrics.stripped[name] += 1
        label = self._incoming.headers.get(b"x-request-id", b"").decode("latin-1") or body.label
        if label:
            self._record.label = label = label[:MAX_LABEL]
            self.label = (self.authorization, label)
            self.router.labels.setdefault(self.label, []).append(self)

    def _split(self, body: Body) -> None:
        """Workers of this kind take one sample each: another object answers, in this one's place."""
        assert self.front is not None
        split = Split(self.router, self.front, self._incoming, self._record, self.timeout_s, body)
        self.router.replace(self, split)
        self.front.current = split
        split.start()

    def client_left(self) -> None:
        self.front = None
        super().client_left()

    def forward(self, data: bytes) -> None:
        if self.front is not None:
            self.router.outbox.write(self.front, data)

    # --- effects ----------------------------------------------------------------------------------------------------

    def _forward(self, _: attempts.Forward) -> None:
        """Decode's head, with what is ours added, and what has come of its body."""
        leg, front, record = self._decode_leg, self.front, self._record
        assert isinstance(leg, DecodeLeg)
        assert front is not None
        assert self._attempt is not None
        record.status = leg.status
        now = self._attempt.first_byte = monotonic()
        self.router.metrics.first_byte.observe(now - record.received)
        self._body = None
        self._head = head = leg.head()
        low = head.lower()
        if b"connection:" in low or b"keep-alive:" in low or b"x-request-id:" in low or b"x-pd-mode:" in low:
            head = without(head, NOT_PASSED_ON)
        if self._incoming.http10 and b"chunked" in low:
            leg.unframe()
            head = without(head, FRAMING)
            front.keep = False
        elif b"content-length:" not in low and b"transfer-encoding:" not in low:
            front.keep = False
        data = (status_line(leg.status), head, self._own_headers(front), b"\r\n", leg.take_held())
        self.router.outbox.write(front, b"".join(data))
        if front.paused:
            self.pause(True)

    def _own_headers(self, front: FrontConnection) -> bytes:
        mode = self._attempt.mode if self._attempt is not None else "pd"
        ours = f"x-request-id: {self.request_id}\r\nx-pd-mode: {mode}\r\n".encode()
        return ours if front.keep and not self._incoming.http10 else ours + front.connection_header()

    def _reply(self, effect: attempts.Reply) -> None:
        self._record.status = effect.failure.cause.status
        front = self.front
        if front is not None:
            front.write(failure_answer(effect.failure, self._own_headers(front)))

    def _break(self, effect: attempts.Break) -> None:
        """Bytes are out: an SSE answer ends with an error event, any other is cut."""
        front, leg = self.front, self._decode_leg
        if front is None:
            return
        front.keep = False
        assert isinstance(leg, DecodeLeg)
        if _SSE not in self._head.lower():
            return
        event = late_error_event(effect.cause)
        if not leg.raw or not framed(self._head):
            front.write(event)
        elif leg.at_chunk_boundary():
            front.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))

    def _finish(self, effect: attempts.Finish) -> None:
        cause = effect.cause
        record, front = self._record, self.front
        record.finished = now = monotonic()
        record.cause = cause
        if cause is not None and cause.code == "client_left":
            record.status = CLIENT_CLOSED
        self.front = None
        if self._attempt is not None:
            self._attempt.cause = cause
        self.router.finished(self, record)
        if self._machine.phase == attempts.DRAINING:
            self._drains(now)
        if front is not None:
            front.finished()


Exchange.carry = Driver.carry | {
    attempts.Forward: Exchange._forward,
    attempts.Finish: Exchange._finish,
    attempts.Reply: Exchange._reply,
    attempts.Break: Exchange._break,
}
