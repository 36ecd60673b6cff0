"""One client request in flight: carries out what core/attempts.py decides, and tells it what happened."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from pdplane.core import attempts
from pdplane.core.attempts import BUSY, PREFILL, Effects, Failure, RequestAttempts
from pdplane.core.errors import CLIENT_CLOSED, Cause, Refused, client_left, deadline
from pdplane.core.ids import Room

from .answers import answer, error_answer, late_error_event, status_line
from .body import Body, read_body
from .legs import rooms as dialect
from .pairing import Pair
from .ranks import RankLoads
from .records import AttemptRecord, RequestRecord
from .refusals import content_type, fitting, refusal, without
from .upstream import HEAD_END, Dial, Leg, WorkerAnswer, framed
from .worker import Worker

if TYPE_CHECKING:
    from .front import FrontConnection, Incoming
    from .routing import Router

MAX_LABEL = 256
DRAINING_CODE, INCOMPATIBLE_CODE = "draining", "incompatible"  # 503s of workers that are no busyness
_SSE = b"text/event-stream"
_NOT_PASSED_ON = (b"connection:", b"keep-alive:", b"x-request-id:", b"x-pd-mode:")
_FRAMING = (b"content-length:", b"transfer-encoding:")


class Exchange:
    """Owns both legs of the current attempt. `front` is None once the client's answer is finished or it has left."""

    __slots__ = (
        "_body",
        "_decode_leg",
        "_head",
        "_incoming",
        "_machine",
        "_pair",
        "_prefill_leg",
        "_ranks",
        "_record",
        "deadline",
        "front",
        "http10",
        "label",
        "path",
        "request_id",
        "router",
        "timeout_s",
    )

    def __init__(self, router: Router, front: FrontConnection, incoming: Incoming, timeout_s: float) -> None:
        now = monotonic()
        self.router = router
        self.front: FrontConnection | None = front
        self.path = incoming.path
        number, self.request_id = router.mint_request_id()
        self.timeout_s = timeout_s
        self.deadline = now + timeout_s
        self.label: tuple[bytes, str] | None = None
        self.http10 = incoming.http10
        self._incoming = incoming
        self._machine = RequestAttempts(router.config.retries)
        self._record = RequestRecord(number, self.request_id, incoming.path, now, now + router.unix_offset_s)
        self._body: Body | None = None
        self._head = b""  # of decode's answer, once it is passed on
        self._pair: Pair | None = None
        self._ranks: RankLoads | None = None  # of this attempt's prefill, where it has several
        self._prefill_leg: Leg | Dial | None = None
        self._decode_leg: Leg | Dial | None = None

    # --- from the client ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Read the body, choose a pair, send both legs; or refuse."""
        router = self.router
        router.enter(self, self._record)
        try:
            self._body = body = read_body(self._incoming.body, router.config.max_samples)
            pair = fitting(body, router.pairing)
        except Refused as refused:
            self._carry(self._machine.no_pair(refused.cause))
            return
        self._incoming.body = b""  # its prefix is what is sent
        if body.stripped or self._incoming.headers:
            self._keep_label(body)
        self._chosen(pair)

    def _keep_label(self, body: Body) -> None:
        for name in body.stripped:
            self.router.metrics.stripped[name] += 1
        label = self._incoming.headers.get(b"x-request-id", b"").decode("latin-1") or body.label
        if label:
            self._record.label = label = label[:MAX_LABEL]
            self.label = (self.authorization, label)
            self.router.labels.setdefault(self.label, []).append(self)

    def client_left(self) -> None:
        self.front = None
        self._carry(self._machine.cancel(client_left("router")))

    def cancel(self, cause: Cause) -> None:
        """An abort call, a stop of the router, or a worker that fell silent."""
        self._carry(self._machine.cancel(cause))

    def expired(self) -> None:
        """The sweep says that `deadline` has passed: the request's, or that of prefill's draining."""
        if self._machine.phase == attempts.DRAINING:
            self._carry(self._machine.drain_limit())
        else:
            self._carry(self._machine.cancel(deadline("router", self.timeout_s)))

    def pause(self, paused: bool) -> None:
        """The client reads slower than decode sends: decode's connection waits."""
        leg = self._decode_leg
        if isinstance(leg, Leg) and leg.exchange is self:
            leg.pause(paused)

    @property
    def authorization(self) -> bytes:
        return self._incoming.headers.get(b"authorization", b"")

    def side_silent(self, worker: Worker) -> None:
        """`worker` has answered nothing for too long: its leg is taken for lost."""
        leg = self._prefill_leg if worker is self._worker(PREFILL) else self._decode_leg
        if leg is None:
            return
        message = f"{worker.role} {worker.url} has answered nothing for {self.router.config.silent_s:g} s"
        cause = Cause("worker_silent", message, 502, retryable=True, side=worker.role)
        self.leg_failed(leg, Failure(cause=cause, answered=False))

    def silent_side(self) -> Worker | None:
        """A worker of this attempt that has answered nothing for too long, while its leg is open."""
        for leg in (self._prefill_leg, self._decode_leg):
            if leg is not None and leg.exchange is self and leg.worker.silent:
                return leg.worker
        return None

    # --- from the legs --------------------------------------------------------------------------------------------

    def dialled(self, dial: Dial, leg: Leg, data: bytes) -> None:
        """A connection is there: it takes the dial's place."""
        if dial is self._prefill_leg:
            self._prefill_leg = leg
        else:
            self._decode_leg = leg
        leg.send(self, dial.attempt, data)

    def prefill_done(self, attempt: int) -> None:
        assert self._pair is not None
        assert self._pair.prefill is not None
        self._pair.prefill.succeeded(self._record.attempts[-1].opened)
        self._carry(self._machine.prefill_done(attempt))

    def decode_first_byte(self, leg: Leg) -> None:
        self._carry(self._machine.decode_first_byte(leg.attempt))

    def forward(self, data: bytes) -> None:
        if self.front is not None:
            self.router.outbox.write(self.front, data)

    def decode_done(self, attempt: int) -> None:
        assert self._pair is not None
        self._pair.decode.succeeded(self._record.attempts[-1].opened)
        self._carry(self._machine.decode_done(attempt))

    def leg_refused(self, leg: Leg, said: WorkerAnswer) -> None:
        """A worker answered with an error."""
        failure = refusal(leg, said)
        culprit, opened = self._worker(failure.blames or leg.side), self._record.attempts[-1].opened
        code = failure.cause.code
        if code == DRAINING_CODE and said.status == 503:
            self.router.drains(culprit, failure.cause.message)
        elif code == INCOMPATIBLE_CODE and said.status == 503:
            for worker in filter(None, self._pair or ()):
                worker.doubt()
        elif said.status in BUSY:
            self.router.busy(culprit, failure.cause.retry_after_s or 1)
        elif said.status < 500:
            leg.worker.succeeded(opened)
        elif said.status != 504:
            self.router.blame(culprit, failure.cause, opened)
        self._failed(leg, failure)

    def _worker(self, side: str) -> Worker:
        assert self._pair is not None
        return self._pair.prefill if side == PREFILL and self._pair.prefill is not None else self._pair.decode

    def leg_failed(self, leg: Leg | Dial, failure: Failure) -> None:
        """A worker did not answer, or not to the end."""
        if failure.blames != attempts.NOBODY:
            self.router.blame(leg.worker, failure.cause, self._record.attempts[-1].opened)
        self._failed(leg, failure)

    def _failed(self, leg: Leg | Dial, failure: Failure) -> None:
        failed = self._machine.prefill_failed if leg is self._prefill_leg else self._machine.decode_failed
        self._carry(failed(leg.attempt, failure))

    # --- effects ----------------------------------------------------------------------------------------------------

    def _carry(self, effects: Effects) -> None:
        for effect in effects:
            _CARRY[effect.__class__](self, effect)

    def _chosen(self, pair: Pair | None) -> None:
        machine = self._machine
        if pair is None:
            self._carry(machine.no_pair(self.router.pairing.not_ready()))
            return
        self._pair = pair
        prefill = pair.prefill
        self._carry(machine.pair_chosen(prefill.url if prefill is not None else None, pair.decode.url))

    def _again(self, effect: attempts.Choose) -> None:
        failure, body = self._machine.failure, self._body
        assert failure is not None
        assert body is not None
        self._record.attempts[-1].cause = failure.cause
        try:
            pair = fitting(body, self.router.pairing, effect.excluded)
        except Refused as refused:
            self._carry(self._machine.no_pair(refused.cause))
            return
        if pair is not None:
            self.router.metrics.retries[failure.cause.code] += 1
        self._chosen(pair)

    def _open(self, effect: attempts.Open) -> None:
        attempt = effect.attempt
        body, pair, record, router = self._body, self._pair, self._record, self.router
        assert body is not None
        assert pair is not None
        prefill, decode = pair
        now = monotonic()
        rooms, ranks = self._rooms(prefill, body.samples) if prefill is not None else ((), ())
        rids = dialect.mint_rids(self.request_id, body.samples, attempt)
        content = dialect.paired(body, prefill, rooms, rids)
        head = self._incoming.passed_on() + router.timeout_line(self.timeout_s if attempt == 0 else self.deadline - now)
        rest = for_prefill = b"".join((head, str(len(content)).encode(), HEAD_END, content))
        if prefill is not None and prefill.pins_ranks:
            one, other = dialect.pinned(content, ranks[0])
            for_prefill = b"".join((head, str(len(one)).encode(), HEAD_END, one))
            rest = b"".join((head, str(len(other)).encode(), HEAD_END, other))
        record.samples = body.samples
        record.mode = "pd" if prefill is not None else "aggregated"
        record.attempts.append(
            AttemptRecord(attempt, prefill.url if prefill is not None else "", decode.url, rooms, rids, now, ranks)
        )
        router.metrics.attempts += 1
        if prefill is not None:
            prefill.took(body.samples)
            self._prefill_leg = self._send(prefill, attempt, prefill.head(self.path) + for_prefill)
        decode.took(body.samples)
        self._decode_leg = self._send(decode, attempt, decode.head(self.path) + rest)

    def _rooms(self, prefill: Worker, samples: int) -> tuple[tuple[Room, ...], tuple[int, ...]]:
        """A room per sample, and the ranks of `prefill` that they are for; no ranks where it has but one."""
        self._ranks = loads = prefill.ranks
        if loads is None:
            return dialect.mint_rooms(samples), ()
        ranks = loads.take(samples, together=prefill.pins_ranks)
        return dialect.mint_rooms_at(ranks, len(loads.loads)), ranks

    def _send(self, worker: Worker, attempt: int, data: bytes) -> Leg | Dial:
        if not worker.idle:
            return Dial(worker, self, attempt, data)
        leg = worker.idle.pop()
        leg.send(self, attempt, data)
        return leg

    def _release(self, effect: attempts.Release) -> None:
        pair, record = self._pair, self._record.attempts[-1]
        assert pair is not None
        if effect.side == PREFILL:
            assert pair.prefill is not None
            pair.prefill.let_go(self._record.samples)
            if self._ranks is not None:
                self._ranks.let_go(record.ranks)
            record.prefill_ended = monotonic()
        else:
            pair.decode.let_go(self._record.samples)
            record.decode_ended = monotonic()

    def _end_leg(self, effect: attempts.EndLeg) -> None:
        leg = self._prefill_leg if effect.side == PREFILL else self._decode_leg
        assert leg is not None
        if leg.end():
            record = self._record.attempts[-1]
            self.router.guard.abort(
                leg.worker, record.rids, record.rooms, effect.cause, self._incoming.line(b"authorization")
            )

    def _forward(self, _: attempts.Forward) -> None:
        """Decode's head, with what is ours added, and what has come of its body."""
        leg, front = self._decode_leg, self.front
        assert isinstance(leg, dialect.DecodeLeg)
        assert front is not None
        record = self._record
        record.status = leg.status
        now = record.attempts[-1].first_byte = monotonic()
        self.router.metrics.first_byte.observe(now - record.received)
        self._body = None
        self._head = head = leg.head()
        low = head.lower()
        if b"connection:" in low or b"keep-alive:" in low or b"x-request-id:" in low or b"x-pd-mode:" in low:
            head = without(head, _NOT_PASSED_ON)
        if self._incoming.http10 and b"chunked" in low:
            leg.unframe()
            head = without(head, _FRAMING)
            front.keep = False
        elif b"content-length:" not in low and b"transfer-encoding:" not in low:
            front.keep = False
        data = (status_line(leg.status), head, self._own_headers(front), b"\r\n", leg.take_held())
        self.router.outbox.write(front, b"".join(data))
        if front.paused:
            self.pause(True)

    def _own_headers(self, front: FrontConnection) -> bytes:
        ours = f"x-request-id: {self.request_id}\r\nx-pd-mode: {self._record.mode}\r\n".encode()
        return ours if front.keep and not self.http10 else ours + front.connection_header()

    def _reply(self, effect: attempts.Reply) -> None:
        failure = effect.failure
        self._record.status = failure.cause.status
        front, said = self.front, failure.reply
        if front is None:
            return
        headers = self._own_headers(front)
        if failure.cause.status == 429 and failure.cause.retry_after_s is None:
            headers += b"retry-after: 1\r\n"
        if isinstance(said, WorkerAnswer) and said.body:
            headers += without(said.head, _NOT_PASSED_ON + _FRAMING + (b"content-type:",))
            front.write(answer(said.status, said.body, headers=headers, content_type=content_type(said.head)))
        else:
            front.write(error_answer(failure.cause, headers=headers))

    def _break(self, effect: attempts.Break) -> None:
        """Bytes are out: an SSE answer ends with an error event, any other is cut."""
        front, leg = self.front, self._decode_leg
        if front is None:
            return
        front.keep = False
        assert isinstance(leg, dialect.DecodeLeg)
        if _SSE not in self._head.lower():
            return
        event = late_error_event(effect.cause)
        if not leg.raw or not framed(self._head):
            front.write(event)
        elif leg.at_chunk_boundary():
            front.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))

    def _finish(self, effect: attempts.Finish) -> None:
        cause = effect.cause
        record, router, front = self._record, self.router, self.front
        record.finished = now = monotonic()
        record.cause = cause
        if record.attempts:
            record.attempts[-1].cause = cause
        if cause is not None and cause.code == "client_left":
            record.status = CLIENT_CLOSED
        self.front = None
        self._body = None
        router.finished(self, record)
        if self._machine.phase == attempts.DRAINING:
            self.deadline = min(self.deadline, now + router.config.drain_s)
            router.draining.add(self)
        if front is not None:
            front.finished()

    def _done(self, _: attempts.Done) -> None:
        self._record.done = monotonic()
        self._record.late = self._machine.late
        self.router.metrics.late += self._machine.late
        self.router.draining.discard(self)


_CARRY: dict[type[attempts.Effect], Callable[[Exchange, Any], None]] = {
    attempts.Open: Exchange._open,
    attempts.Release: Exchange._release,
    attempts.Forward: Exchange._forward,
    attempts.Finish: Exchange._finish,
    attempts.Done: Exchange._done,
    attempts.EndLeg: Exchange._end_leg,
    attempts.Choose: Exchange._again,
    attempts.Reply: Exchange._reply,
    attempts.Break: Exchange._break,
}
