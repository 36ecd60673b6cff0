"""The control session of a rank pair: who is at the other end, is it there, is it still the same.

Decode dials (`Dialler`, one per prefill endpoint); prefill listens (`Acceptor`, all its guests). HELLO names both
instances, so that a successor process on the same address is never taken for the one that was granted (I18). A
session lost has a grace in which the same instance may come back; then that instance is gone, and it alone.

Both return notices, which the node turns into events of rooms, and put frames and dials into the node's outbox.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from enum import StrEnum

import msgspec

from .effects import CloseConn, Dial, Effect, SendFrame
from .errors import Cause, unavailable
from .events import ControlEndpoint
from .frames import Beat, Frame, Hello, Reject, Welcome
from .ids import ConnId, Instance, Rank, Seat
from .layout import PROTOCOL_VERSION, Stamp, mismatch

NO_CONN = ConnId(0)


class SessionTimes(msgspec.Struct, frozen=True):
    """Seconds. A frozen or dead peer is gone after silent_s + grace_s, plus at most one beat."""

    beat_s: float = 2.0
    silent_s: float = 5.0
    grace_s: float = 2.0
    redial_min_s: float = 0.05
    redial_max_s: float = 0.5


class Identity(msgspec.Struct, frozen=True):
    """Who this end is: what its HELLO or WELCOME says."""

    instance: Instance
    rank: Rank
    stamp: Stamp
    data_host: str = ""
    data_port: int = 0
    data_token: str = ""
    secret: str = ""


class Up(msgspec.Struct, frozen=True):
    """The session with this seat is up (again): resync its rooms."""

    seat: Seat
    conn: ConnId


class Refused(msgspec.Struct, frozen=True):
    """No session with this endpoint now; rooms that wait for their first one fail with the cause."""

    cause: Cause


class Gone(msgspec.Struct, frozen=True):
    """This instance is down for good as far as its rooms are concerned."""

    instance: Instance


Notice = Up | Refused | Gone


class DState(StrEnum):
    IDLE = "idle"
    DIALLING = "dialling"
    GREETING = "greeting"
    UP = "up"
    WAITING = "waiting"  # for the next redial


class Dialler:
    """Decode's end of the session with one prefill endpoint.

    `bound` is the instance our rooms there were paired with; while it is set and the session is not up, `lost_at`
    runs towards the grace.
    """

    def __init__(
        self,
        endpoint: ControlEndpoint,
        me: Identity,
        times: SessionTimes,
        out: list[Effect],
        beat: Callable[[], Beat],
    ) -> None:
        self.endpoint = endpoint
        self.state = DState.IDLE
        self.conn = NO_CONN
        self.bound: Seat | None = None
        self.was: Seat | None = None  # bound here last, and gone
        self.lost_at: float | None = None
        self._me, self._times, self._out, self._beat = me, times, out, beat
        self._heard_at = self._beat_at = self._greet_at = self._redial_at = 0.0
        self._backoff_s = 0.0

    @property
    def up(self) -> bool:
        return self.state is DState.UP

    def want(self, now: float) -> None:
        """Somebody needs this session."""
        if self.state is DState.IDLE:
            self._redial(now)

    def dialled(self, conn: ConnId, now: float) -> list[Notice]:
        if self.state is not DState.DIALLING:
            self._out.append(CloseConn(conn))
            return []
        self.conn, self.state, self._greet_at = conn, DState.GREETING, now
        me = self._me
        hello = Hello(
            src=me.instance,
            dst=self.bound.instance if self.bound else Instance(""),
            rank=me.rank,
            stamp=me.stamp,
            protocol_min=1,
            protocol_max=PROTOCOL_VERSION,
            data_host=me.data_host,
            data_port=me.data_port,
            data_token=me.data_token,
            secret=me.secret,
        )
        self._out.append(SendFrame(conn, hello))
        return []

    def dial_failed(self, error: str, now: float) -> list[Notice]:
        return self._fell(f"prefill at {self.endpoint} cannot be reached: {error}", now)

    def lost(self, now: float) -> list[Notice]:
        self.conn = NO_CONN
        return self._fell(f"prefill at {self.endpoint} closed the control session", now)

    def frame(self, frame: Frame, now: float) -> list[Notice]:
        """HELLO's answers and REJECTs; room frames and beats only mark the peer as heard."""
        self._heard_at = now
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
            return self._refuse(unavailable("wrong_instance", f"a welcome for {welcome.dst} came", side="prefill"))
        seat = Seat(welcome.src, welcome.rank)
        if self.bound and self.bound != seat:
            notices.append(self._unbind())
        if unfit := mismatch(welcome.stamp, self._me.stamp):
            return [*notices, *self._refuse(unfit)]
        self.bound, self.lost_at, self.state = seat, None, DState.UP
        self._beat_at, self._backoff_s = now, 0.0
        return [*notices, Up(seat, self.conn)]

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
        return [*notices, *self._refuse(reject.cause)]

    def _refuse(self, cause: Cause) -> list[Notice]:
        self._close()
        self.state = DState.IDLE
        notices: list[Notice] = [self._unbind()] if self.bound else []
        return [*notices, Refused(cause)]

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
        return [Refused(unavailable("prefill_unreachable", why, side="prefill"))]

    def _redial(self, now: float) -> None:
        self.state = DState.WAITING
        if self.lost_at is not None:
            self._redial_at = now + self._backoff_s
            self._next_backoff()
        if now >= self._redial_at:
            self._dial()

    def _dial(self) -> None:
        self.state = DState.DIALLING
        self._out.append(Dial(self.endpoint))

    def _next_backoff(self) -> None:
        self._backoff_s = min(max(self._backoff_s * 2, self._times.redial_min_s), self._times.redial_max_s)

    def _close(self) -> None:
        if self.conn != NO_CONN:
            self._out.append(CloseConn(self.conn))
            self.conn = NO_CONN

    def _unbind(self) -> Gone:
        assert self.bound is not None
        gone = Gone(self.bound.instance)
        self.was, self.bound, self.lost_at = self.bound, None, None
        if self.state is DState.WAITING:
            self.state = DState.IDLE
        return gone


class Guest(msgspec.Struct):
    """One connection that prefill has accepted; `hello` None until it has greeted."""

    conn: ConnId
    since: float
    heard_at: float
    beat_at: float
    hello: Hello | None = None


class Acceptor:
    """Prefill's end of all its sessions: one guest connection per decode instance, the newest wins."""

    def __init__(self, me: Identity, times: SessionTimes, out: list[Effect], beat: Callable[[Instance], Beat]) -> None:
        self._me, self._times, self._out, self._beat = me, times, out, beat
        self._guests: dict[ConnId, Guest] = {}
        self._conn_of: dict[Instance, ConnId] = {}
        self._lost_at: dict[Instance, float] = {}

    def conn_of(self, peer: Instance) -> ConnId:
        """The connection of a peer that is up now; NO_CONN otherwise."""
        return self._conn_of.get(peer, NO_CONN)

    def peer_of(self, conn: ConnId) -> Instance | None:
        guest = self._guests.get(conn)
        return guest.hello.src if guest and guest.hello else None

    @property
    def sessions(self) -> int:
        return len(self._conn_of)

    def hello_of(self, peer: Instance) -> Hello | None:
        guest = self._guests.get(self.conn_of(peer))
        return guest.hello if guest else None

    def accepted(self, conn: ConnId, now: float) -> None:
        self._guests[conn] = Guest(conn, now, now, now)

    def frame(self, conn: ConnId, frame: Frame, now: float) -> list[Notice]:
        guest = self._guests.get(conn)
        if guest is None:
            return []
        guest.heard_at = now
        if isinstance(frame, Hello):
            return self._greeted(guest, frame, now)
        if guest.hello is None:
            self._turn_away(guest, Cause("not_greeted", "the first frame of a session must be a hello", 400), now)
        return []

    def reject(self, conn: ConnId, meant: Instance, now: float) -> None:
        """This connection speaks to another instance than us."""
        if guest := self._guests.get(conn):
            self._turn_away(guest, self._wrong_instance(meant), now)

    def lost(self, conn: ConnId, now: float) -> None:
        guest = self._guests.pop(conn, None)
        if guest and guest.hello and self._conn_of.get(guest.hello.src) == conn:
            del self._conn_of[guest.hello.src]
            self._lost_at[guest.hello.src] = now

    def tick(self, now: float) -> list[Notice]:
        for guest in list(self._guests.values()):
            if now >= guest.heard_at + self._times.silent_s:
                self._out.append(CloseConn(guest.conn))
                self.lost(guest.conn, now)
            elif guest.hello and now >= guest.beat_at + self._times.beat_s:
                guest.beat_at = now
                self._out.append(SendFrame(guest.conn, self._beat(guest.hello.src)))
        over = [peer for peer, at in self._lost_at.items() if now >= at + self._times.grace_s]
        for peer in over:
            del self._lost_at[peer]
        return [Gone(peer) for peer in over]

    def next_due(self) -> float | None:
        due = [at + self._times.grace_s for at in self._lost_at.values()]
        for guest in self._guests.values():
            due.append(guest.heard_at + self._times.silent_s)
            if guest.hello:
                due.append(guest.beat_at + self._times.beat_s)
        return min(due, default=None)

    def _greeted(self, guest: Guest, hello: Hello, now: float) -> list[Notice]:
        if unfit := self._unfit(hello):
            self._turn_away(guest, unfit, now)
            return []
        if guest.hello and guest.hello.src != hello.src:
            self._turn_away(guest, Cause("rebound", f"this session is {guest.hello.src}'s", 400), now)
            return []
        older = self._conn_of.get(hello.src, NO_CONN)
        if older not in (NO_CONN, guest.conn):
            self._out.append(CloseConn(older))
            self._guests.pop(older, None)
        guest.hello, guest.beat_at = hello, now
        self._conn_of[hello.src] = guest.conn
        self._lost_at.pop(hello.src, None)
        me = self._me
        protocol = min(hello.protocol_max, PROTOCOL_VERSION)
        welcome = Welcome(src=me.instance, dst=hello.src, rank=me.rank, stamp=me.stamp, protocol=protocol)
        self._out.append(SendFrame(guest.conn, welcome))
        return [Up(Seat(hello.src, hello.rank), guest.conn)]

    def _unfit(self, hello: Hello) -> Cause | None:
        if hello.dst not in ("", self._me.instance):
            return self._wrong_instance(hello.dst)
        if not hmac.compare_digest(hello.secret.encode(), self._me.secret.encode()):
            return Cause("unauthorized", "the session's shared secret is not ours; give both sides the same", 401)
        if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
            ours, theirs = PROTOCOL_VERSION, f"{hello.protocol_min} to {hello.protocol_max}"
            return Cause("incompatible", f"protocol differs: prefill speaks {ours}, decode speaks {theirs}", 503)
        return mismatch(self._me.stamp, hello.stamp)

    def _wrong_instance(self, meant: Instance) -> Cause:
        return Cause("wrong_instance", f"{meant} is not here; this is {self._me.instance}", 503, retryable=True)

    def _turn_away(self, guest: Guest, cause: Cause, now: float) -> None:
        self._out.append(SendFrame(guest.conn, Reject(src=self._me.instance, cause=cause)))
        self._out.append(CloseConn(guest.conn))
        self.lost(guest.conn, now)
