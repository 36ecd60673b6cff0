"""Decode's end of a control session: dials, greets, and notices when the instance it met is gone."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from .effects import CloseConn, Dial, Effect, SendFrame, SessionRefused
from .errors import Cause, unavailable
from .events import ControlEndpoint
from .frames import Beat, DataEndpoint, Frame, Hello, Reject, Welcome
from .ids import ConnId, Instance, Link, Rank, Seat
from .layout import OLDEST_PROTOCOL, PROTOCOL_VERSION, misfit
from .session import NO_CONN, Gone, Identity, Notice, SessionTimes, TurnedAway, Up, no_slice, no_transport
from .slices import slice_between


class DState(StrEnum):
    IDLE = "idle"
    DIALLING = "dialling"
    GREETING = "greeting"
    UP = "up"
    WAITING = "waiting"  # for the next redial


class Dialler:
    """Decode's end of the session of one of our ranks with one prefill endpoint.

    `bound` is the seat our rooms there were paired with; while it is set and the session is not up, `lost_at` runs
    towards the grace.
    """

    def __init__(
        self,
        endpoint: ControlEndpoint,
        here: Rank,
        me: Identity,
        times: SessionTimes,
        out: list[Effect],
        beat: Callable[[], Beat],
    ) -> None:
        self.endpoint = endpoint
        self.here = here
        self.state = DState.IDLE
        self.conn = NO_CONN
        self.bound: Seat | None = None
        self.was: Link | None = None  # bound here last, and gone
        self.up_as: Up | None = None  # what the session agreed on, the last time it came up
        self.lost_at: float | None = None
        self._me, self._times, self._out, self._beat = me, times, out, beat
        self._heard_at = self._beat_at = self._greet_at = self._redial_at = 0.0
        self._backoff_s = 0.0

    @property
    def up(self) -> bool:
        return self.state is DState.UP

    @property
    def link(self) -> Link | None:
        return Link(self.here, self.bound) if self.bound else None

    def want(self, now: float) -> None:
        """Somebody needs this session."""
        if self.state is DState.IDLE:
            self._redial(now)

    def dialled(self, conn: ConnId, now: float) -> list[Notice]:
        if self.state is not DState.DIALLING:
            self._out.append(CloseConn(conn))
            return []
        self.conn, self.state, self._greet_at = conn, DState.GREETING, now
        self._out.append(SendFrame(conn, self._hello()))
        return []

    def _hello(self) -> Hello:
        me = self._me
        offered = me.data[self.here.tp]
        tcp = next((data for data in offered if data.kind == "tcp"), DataEndpoint("tcp"))
        return Hello(
            src=me.instance,
            dst=self.bound.instance if self.bound else Instance(""),
            rank=self.here,
            stamp=me.stamp,
            protocol_min=OLDEST_PROTOCOL,
            protocol_max=PROTOCOL_VERSION,
            data_host=tcp.host,
            data_port=tcp.port,
            data_token=tcp.token,
            secret=me.secret,
            shape=me.shape,
            data=offered,
        )

    def dial_failed(self, error: str, now: float) -> list[Notice]:
        return self._fell(f"prefill at {self.endpoint} cannot be reached: {error}", now)

    def lost(self, now: float) -> list[Notice]:
        self.conn = NO_CONN
        return self._fell(f"prefill at {self.endpoint} closed the control session", now)

    def frame(self, frame: Frame, now: float) -> list[Notice]:
        """HELLO's answers and REJECTs; room frames and beats only mark the peer as heard."""
        self._heard_at = now
        if isinstance(frame, Beat):
            self._backoff_s = 0.0  # only a session that lasts makes the next dial a quick one
        if isinstance(frame, Welcome) and self.state is DState.GREETING:
            return self._welcomed(frame, now)
        if isinstance(frame, Reject):
            return self._rejected(frame, now)
        return []

    def tick(self, now: float) -> list[Notice]:
        notices: list[Notice] = []
        if self.bound and self.lost_at is not None and now >= self.lost_at + self._times.grace_s:
            notices.append(self._unbind())
        if self.state is DState.UP:
            if now >= self._heard_at + self._times.silent_s:
                self._close()
                notices += self._fell(f"prefill at {self.endpoint} fell silent", now)
            elif now >= self._beat_at + self._times.beat_s:
                self._beat_at = now
                self._out.append(SendFrame(self.conn, self._beat()))
        elif self.state is DState.GREETING and now >= self._greet_at + self._times.silent_s:
            self._close()
            notices += self._fell(f"prefill at {self.endpoint} does not answer", now)
        elif self.state is DState.WAITING and now >= self._redial_at:
            self._dial()
        return notices

    def next_due(self) -> float | None:
        due = []
        if self.bound and self.lost_at is not None:
            due.append(self.lost_at + self._times.grace_s)
        if self.state is DState.UP:
            due += [self._heard_at + self._times.silent_s, self._beat_at + self._times.beat_s]
        elif self.state is DState.GREETING:
            due.append(self._greet_at + self._times.silent_s)
        elif self.state is DState.WAITING:
            due.append(self._redial_at)
        return min(due, default=None)

    def _welcomed(self, welcome: Welcome, now: float) -> list[Notice]:
        notices: list[Notice] = []
        if welcome.dst != self._me.instance:
            cause = unavailable("wrong_instance", f"a welcome for {welcome.dst} came", side="prefill")
            return self._refuse(cause, welcome.src)
        seat = Seat(welcome.src, welcome.rank)
        if self.bound and self.bound != seat:
            notices.append(self._unbind())
        agreed = self._agree(welcome, seat)
        if isinstance(agreed, Cause):
            return [*notices, *self._refuse(agreed, welcome.src)]
        self.bound, self.lost_at, self.state, self.up_as = seat, None, DState.UP, agreed
        self._beat_at = now
        return [*notices, agreed]

    def _agree(self, welcome: Welcome, seat: Seat) -> Up | Cause:
        me = self._me
        if unfit := misfit(welcome.stamp, welcome.shape, me.stamp, me.shape, welcome.protocol):
            return unfit
        endpoint = next((data for data in me.data[self.here.tp] if data.kind == welcome.data_kind), None)
        if endpoint is None:
            return no_transport([DataEndpoint(welcome.data_kind)], me.data[self.here.tp])
        sides = (welcome.rank.tp, welcome.shape.tp), (self.here.tp, me.shape.tp)
        part = slice_between(me.stamp.groups, me.stamp.page_size, *sides)
        if part is None:
            return no_slice(welcome.rank, welcome.shape, self.here, me.shape)
        return Up(Link(self.here, seat), endpoint, part, welcome.shape, welcome.protocol)

    def give_way(self) -> None:
        """The same seat is met by another dialler now: its instance is not gone, and nobody is told."""
        self._close()
        self.bound, self.lost_at, self.state = None, None, DState.IDLE

    def give_up(self) -> None:
        """The instance bound here is gone by another of its links: no grace of its own. A dial that is out is answered
        yet, and whoever is there is asked who it is."""
        self._close()
        if self.bound:
            self._unbind()
        if self.state is not DState.DIALLING:
            self.state = DState.IDLE

    def _rejected(self, reject: Reject, now: float) -> list[Notice]:
        """The listener is another instance than HELLO named, or will not have us."""
        notices: list[Notice] = []
        successor = self.bound is not None and reject.src != self.bound.instance
        if successor:
            notices.append(self._unbind())
        if reject.cause.code == "wrong_instance":
            self._close()
            self._redial(now)
            return notices
        return [*notices, *self._refuse(reject.cause, reject.src)]

    def _refuse(self, cause: Cause, peer: Instance) -> list[Notice]:
        self._out.append(SessionRefused(peer, cause))
        self._close()
        self.state = DState.IDLE
        notices: list[Notice] = [self._unbind()] if self.bound else []
        return [*notices, TurnedAway(cause)]

    def _fell(self, why: str, now: float) -> list[Notice]:
        """Not up any more, or not yet. A bound instance gets its grace; who waits for a first session, the cause."""
        self.conn = NO_CONN
        if self.bound:
            if self.lost_at is None:
                self.lost_at = now
            self._redial(now)
            return []
        self.state = DState.IDLE
        self._next_backoff()
        self._redial_at = now + self._backoff_s
        return [TurnedAway(unavailable("prefill_unreachable", why, side="prefill"))]

    def _redial(self, now: float) -> None:
        self.state = DState.WAITING
        if self.lost_at is not None:
            self._redial_at = now + self._backoff_s
            self._next_backoff()
        if now >= self._redial_at:
            self._dial()

    def _dial(self) -> None:
        self.state = DState.DIALLING
        self._out.append(Dial(self.endpoint, self.here))

    def _next_backoff(self) -> None:
        self._backoff_s = min(max(self._backoff_s * 2, self._times.redial_min_s), self._times.redial_max_s)

    def _close(self) -> None:
        if self.conn != NO_CONN:
            self._out.append(CloseConn(self.conn))
            self.conn = NO_CONN

    def _unbind(self) -> Gone:
        assert self.bound is not None
        gone = Gone(self.bound.instance)
        self.was, self.bound, self.lost_at = self.link, None, None
        if self.state is DState.WAITING:
            self.state = DState.IDLE
        return gone
