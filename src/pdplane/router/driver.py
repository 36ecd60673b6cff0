"""Carries out what core/attempts.py decides for one sample or one whole request, and tells it what happened.

Both legs of the current attempt are owned here; what becomes of decode's answer is for the subclasses to say: it goes
to a client (exchange.py), or into an answer of several samples (split.py).
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

from pdplane.core import attempts
from pdplane.core.attempts import HANDOFF, NOBODY, PREFILL, Effects, Failure, RequestAttempts
from pdplane.core.errors import Cause, Refused, client_left, deadline

from .backends import EndedLeg
from .body import Body
from .in_turn import InTurn
from .legs import params
from .legs import rooms as dialect
from .pairing import DECODE_ONLY, Pair
from .ranks import RankLoads
from .records import AttemptRecord, RequestRecord
from .refusals import pair_for
from .upstream import Dial, Leg, WorkerAnswer, with_length
from .worker import PARAMS, Worker

if TYPE_CHECKING:
    from .front import Incoming
    from .routing import Router

Carry = dict[type[attempts.Effect], Callable[[Any, Any], None]]


class Driver:
    """`sample`: which of a request's samples, where each has a driver of its own. `samples` count towards loads."""

    __slots__ = (
        "_attempt",
        "_body",
        "_decode_leg",
        "_incoming",
        "_machine",
        "_pair",
        "_prefill_leg",
        "_ranks",
        "_record",
        "_turn",
        "deadline",
        "path",
        "request_id",
        "router",
        "sample",
        "samples",
        "timeout_s",
    )

    carry: ClassVar[Carry]
    _pair: Pair  # of the current attempt: once one is chosen, and legs are open only then

    def __init__(self, router: Router, incoming: Incoming, record: RequestRecord, timeout_s: float) -> None:
        self.router = router
        self.path = incoming.path
        self.request_id = record.request_id
        self.timeout_s = timeout_s
        self.deadline = record.received + timeout_s
        self.sample = 0
        self.samples = 1
        self._incoming = incoming
        self._machine = RequestAttempts(router.config.retries)
        self._record = record
        self._attempt: AttemptRecord | None = None  # the current one
        self._body: Body | None = None
        self._ranks: RankLoads | None = None  # of this attempt's prefill, where it has several
        self._turn: InTurn | None = None  # of this attempt, where its legs leave one after the other
        self._prefill_leg: Leg | Dial | None = None
        self._decode_leg: Leg | Dial | None = None

    # --- from outside -------------------------------------------------------------------------------------------

    def client_left(self) -> None:
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
    def over(self) -> bool:
        return self._machine.over

    @property
    def authorization(self) -> bytes:
        return self._incoming.headers.get(b"authorization", b"")

    def end_silent(self) -> None:
        """A leg whose worker has answered nothing for too long is taken for lost."""
        for leg in (self._prefill_leg, self._decode_leg):
            if leg is None or leg.exchange is not self or not leg.worker.silent:
                continue
            worker, limit_s = leg.worker, self.router.config.silent_s
            message = f"{worker.role} {worker.url} has answered nothing for {limit_s:g} s"
            cause = Cause("worker_silent", message, 502, retryable=True, side=worker.role)
            self.leg_failed(leg, Failure(cause=cause, answered=False))
            return

    # --- from the legs --------------------------------------------------------------------------------------------

    def dialled(self, dial: Dial, leg: Leg, data: bytes) -> None:
        """A connection is there: it takes the dial's place."""
        if dial is self._prefill_leg:
            self._prefill_leg = leg
        else:
            too_late = self._turn.too_late() if self._turn is not None else None
            if too_late is not None:
                leg.discard()
                self._carry(self._machine.decode_failed(dial.attempt, Failure(cause=too_late, blames=HANDOFF)))
                return
            self._decode_leg = leg
        leg.send(self, dial.attempt, data, monotonic())

    def prefill_done(self, attempt: int) -> None:
        """Prefill's leg of a pair that left together has ended well."""
        assert self._pair.prefill is not None
        assert self._attempt is not None
        self._pair.prefill.succeeded(self._attempt.opened)
        self._carry(self._machine.prefill_done(attempt))

    def prefill_answered(self, attempt: int, body: bytes) -> None:
        """Prefill's leg has answered, and decode's is next."""
        turn, worker, opened = self._turn, self._worker(PREFILL), self._attempt
        if turn is None:
            self.prefill_done(attempt)
            return
        assert opened is not None
        failure = turn.answered(body)
        self.router.metrics.prefill_leg.observe(turn.record.answered - opened.opened)
        if failure is None:
            worker.succeeded(opened.opened)
            if not turn.held:
                opened.mode = DECODE_ONLY
                self.router.metrics.decode_only += 1
            self._carry(self._machine.prefill_done(attempt, turn.held))
            return
        if failure.blames != HANDOFF:
            self.router.blame(worker, failure.cause, opened.opened)
        self._carry(self._machine.prefill_failed(attempt, failure, turn.held))

    def decode_first_byte(self, leg: Leg) -> None:
        self._carry(self._machine.decode_first_byte(leg.attempt))

    def forward(self, data: bytes) -> None:
        """The next bytes of decode's answer, as they came (or unframed, where the leg was told to)."""
        raise NotImplementedError

    def decode_done(self, attempt: int) -> None:
        assert self._attempt is not None
        self._pair.decode.succeeded(self._attempt.opened)
        self._carry(self._machine.decode_done(attempt))

    def leg_refused(self, leg: Leg, said: WorkerAnswer) -> None:
        """A worker answered with an error."""
        assert self._attempt is not None
        failure = self.router.backend.refusal(leg, said, self._turn is not None and self._turn.held)
        self.router.refused(self._pair, leg, said.status, failure, self._attempt.opened)
        self._failed(leg, failure)

    def leg_failed(self, leg: Leg | Dial, failure: Failure) -> None:
        """A worker did not answer, or not to the end."""
        if failure.blames != NOBODY:
            assert self._attempt is not None
            self.router.blame(leg.worker, failure.cause, self._attempt.opened)
        self._failed(leg, failure)

    def leg_broke_off(self, leg: Leg, said: WorkerAnswer) -> None:
        """A worker ended a stream with an error of its own."""
        failure = self.router.backend.refusal(leg, said, False)
        message = f"decode {leg.worker.url} broke off its answer after its first byte: {failure.cause.message}"
        cause = Cause("decode_broke_off", message, 502, side=leg.side)
        self.leg_failed(leg, Failure(cause=cause))

    def _worker(self, side: str) -> Worker:
        return self._pair.of(side)

    def _failed(self, leg: Leg | Dial, failure: Failure) -> None:
        failed = self._machine.prefill_failed if leg is self._prefill_leg else self._machine.decode_failed
        self._carry(failed(leg.attempt, failure))

    # --- effects ----------------------------------------------------------------------------------------------------

    def _carry(self, effects: Effects) -> None:
        for effect in effects:
            self.carry[effect.__class__](self, effect)

    def _chosen(self, pair: Pair | None) -> None:
        machine = self._machine
        if pair is None:
            self._carry(machine.no_pair(self.router.pairing.not_ready()))
            return
        self._pair = pair
        prefill = pair.prefill
        in_turn = pair.decode.dialect == PARAMS
        self._carry(machine.pair_chosen(prefill.url if prefill is not None else None, pair.decode.url, in_turn))

    def _again(self, effect: attempts.Choose) -> None:
        failure = self._machine.failure
        assert failure is not None
        assert self._attempt is not None
        assert self._body is not None
        self._attempt.cause = failure.cause
        try:
            pair = pair_for(self.path, self._body, self.router.pairing, effect.excluded, again=True)
        except Refused as refused:
            self._carry(self._machine.no_pair(refused.cause))
            return
        if pair is not None:
            self.router.metrics.retries[failure.cause.code] += 1
        self._chosen(pair)

    def _open(self, effect: attempts.Open) -> None:
        """Both legs at once, or one that does both."""
        attempt, body, pair = effect.attempt, self._body, self._pair
        assert body is not None
        prefill, decode = pair
        now, samples = monotonic(), self.samples
        self._turn = None
        left_s = self.timeout_s if not attempt else self.deadline - now
        lines = self._incoming.passed_on() + self.router.timeout_line(left_s)
        if prefill is None:
            self._open_alone(pair, attempt, lines, now)
            return
        self._ranks = prefill.ranks
        rooms, ranks = dialect.mint_rooms_for(prefill, samples)
        rids = dialect.mint_rids(self.request_id, samples, attempt, self.sample)
        content = dialect.paired(body, prefill, rooms, rids)
        if prefill.pins_ranks:
            for_prefill, for_decode = (with_length(lines, one) for one in dialect.pinned(content, ranks[0]))
        else:
            for_prefill = for_decode = with_length(lines, content)
        self._begins(AttemptRecord(attempt, prefill.url, decode.url, rooms, rids, now, ranks, self.sample))
        prefill.took(samples)
        self._prefill_leg = self._send(prefill, attempt, prefill.head(self.path) + for_prefill, now)
        decode.took(samples)
        self._decode_leg = self._send(decode, attempt, decode.head(self.path) + for_decode, now)

    def _open_alone(self, pair: Pair, attempt: int, lines: bytes, now: float) -> None:
        """The leg of a worker that does both."""
        body, worker, backend = self._body, pair.decode, self.router.backend
        assert body is not None
        number = attempt
        if pair.mode == DECODE_ONLY:
            number = 2 * attempt + 1  # as legs are numbered that leave in turn
            self.router.metrics.decode_only += 1
        rids = dialect.mint_rids(self.request_id, self.samples, number, self.sample)
        content = dialect.alone(body, rids) if backend.names_in_body else body.plain()
        if not backend.names_in_body:
            lines = b"x-request-id: %b\r\n%b" % (rids[0].encode(), lines)
        self._ranks = None
        self._begins(AttemptRecord(attempt, "", worker.url, (), rids, now, (), self.sample, pair.mode, worker.dialect))
        worker.took(self.samples)
        self._decode_leg = self._send(worker, attempt, worker.head(self.path) + with_length(lines, content), now)

    def _begins(self, attempt: AttemptRecord) -> None:
        self._attempt = attempt
        self._record.attempts.append(attempt)
        self.router.metrics.attempts += 1

    def _open_leg(self, effect: attempts.OpenLeg) -> None:
        """One leg of a pair whose legs leave in turn."""
        attempt, now = effect.attempt, monotonic()
        if effect.side == PREFILL:
            self._begin_turn(attempt, now)
        turn = self._turn
        assert turn is not None
        worker = self._worker(effect.side)
        worker.took(self.samples)  # from here on it is let go of, whatever becomes of the leg
        rid, content = turn.prefill_leg() if effect.side == PREFILL else turn.decode_leg(now)
        lines = self._incoming.passed_on() + self.router.timeout_line(self.deadline - now)
        data = with_length(b"x-request-id: %b\r\n%b" % (rid.encode(), lines), content)
        leg = self._send(worker, attempt, worker.head(self.path) + data, now)
        if effect.side == PREFILL:
            self._prefill_leg = leg
        else:
            self._decode_leg = leg

    def _begin_turn(self, attempt: int, now: float) -> None:
        body, pair = self._body, self._pair
        assert body is not None
        assert pair.prefill is not None
        self._prefill_leg = self._decode_leg = None
        self._ranks = pair.prefill.ranks
        ranks = self._ranks.take(1, together=True) if self._ranks is not None else ()
        rids = params.mint_rids(self.request_id, self.sample, attempt)
        self._turn = turn = InTurn(self.router, body, self.path, rids, ranks[0] if ranks else None)
        names = pair.prefill.url, pair.decode.url
        record = AttemptRecord(attempt, *names, (), rids, now, ranks, self.sample, pair.mode, PARAMS, turn.record)
        self._begins(record)

    def _send(self, worker: Worker, attempt: int, data: bytes, now: float) -> Leg | Dial:
        if not worker.idle:
            return Dial(worker, self, attempt, data)
        leg = worker.idle.pop()
        leg.send(self, attempt, data, now)
        return leg

    def _release(self, effect: attempts.Release) -> None:
        pair, record = self._pair, self._attempt
        assert record is not None
        if effect.side == PREFILL:
            assert pair.prefill is not None
            pair.prefill.let_go(self.samples)
            if self._ranks is not None:
                self._ranks.let_go(record.ranks)
            record.prefill_ended = monotonic()
        else:
            pair.decode.let_go(self.samples)
            record.decode_ended = monotonic()

    def _end_leg(self, effect: attempts.EndLeg) -> None:
        leg = self._prefill_leg if effect.side == PREFILL else self._decode_leg
        if leg is not None and leg.end():  # None: a fault of ours kept it from leaving
            record = self._attempt
            assert record is not None
            ended = EndedLeg(self.path, record.rids, record.rooms)
            if self._turn is not None:
                ended = EndedLeg(self.path, (self._turn.rid(effect.side),), (), may_hold=effect.side == PREFILL)
            self.router.guard.abort(leg.worker, ended, effect.cause, self._incoming.line(b"authorization"))

    def _release_hold(self, effect: attempts.ReleaseHold) -> None:
        turn = self._turn
        assert turn is not None
        turn.release(self._worker(PREFILL), effect.cause, self._incoming.line(b"authorization"))

    def _forward(self, effect: attempts.Forward) -> None:
        raise NotImplementedError

    def _reply(self, effect: attempts.Reply) -> None:
        raise NotImplementedError

    def _break(self, effect: attempts.Break) -> None:
        raise NotImplementedError

    def _finish(self, effect: attempts.Finish) -> None:
        raise NotImplementedError

    def _done(self, _: attempts.Done) -> None:
        self._record.done = monotonic()
        late = self._machine.late
        if late:
            self._record.late += late
            self.router.metrics.late += late
        self.router.draining.discard(self)

    def _drains(self, now: float) -> None:
        """The verdict is known, and prefill's leg goes on for a while."""
        self.deadline = min(self.deadline, now + self.router.config.drain_s)
        self.router.draining.add(self)


Driver.carry = {
    attempts.Open: Driver._open,
    attempts.OpenLeg: Driver._open_leg,
    attempts.Release: Driver._release,
    attempts.ReleaseHold: Driver._release_hold,
    attempts.EndLeg: Driver._end_leg,
    attempts.Choose: Driver._again,
    attempts.Done: Driver._done,
}
