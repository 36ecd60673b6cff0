"""Prefill's end of all its control sessions: who may come in, and which of them are still there."""

from __future__ import annotations

import hmac
from collections.abc import Callable

import msgspec

from .effects import CloseConn, Effect, SendFrame, SessionRefused
from .errors import Cause
from .frames import Beat, DataEndpoint, Frame, Hello, Reject, Welcome
from .ids import ConnId, Instance, Link, Rank, Seat
from .layout import OLDEST_PROTOCOL, PROTOCOL_VERSION, misfit
from .session import NO_CONN, Gone, Identity, Notice, SessionTimes, Up, no_slice, no_transport
from .slices import slice_between

STRANGER = Instance("")


class Guest(msgspec.Struct):
    """One connection that a rank of ours has accepted; `hello` None until it has greeted."""

    conn: ConnId
    here: Rank
    since: float
    heard_at: float
    beat_at: float
    hello: Hello | None = None

    @property
    def link(self) -> Link | None:
        return Link(self.here, Seat(self.hello.src, self.hello.rank)) if self.hello else None


class Acceptor:
    """Prefill's end of all its sessions: one guest connection per link, the newest wins."""

    def __init__(self, me: Identity, times: SessionTimes, out: list[Effect], beat: Callable[[Instance], Beat]) -> None:
        self._me, self._times, self._out, self._beat = me, times, out, beat
        self._guests: dict[ConnId, Guest] = {}
        self._conn_of: dict[Link, ConnId] = {}
        self._lost_at: dict[Link, float] = {}

    def conn_of(self, link: Link) -> ConnId:
        """The connection of a link that is up now; NO_CONN otherwise."""
        return self._conn_of.get(link, NO_CONN)

    def link_of(self, conn: ConnId) -> Link | None:
        """Whose session this is, once it has greeted."""
        guest = self._guests.get(conn)
        return guest.link if guest else None

    @property
    def sessions(self) -> int:
        return len(self._conn_of)

    def accepted(self, conn: ConnId, here: Rank, now: float) -> None:
        self._guests[conn] = Guest(conn, here, now, now, now)

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
        link = guest.link if guest else None
        if link and self._conn_of.get(link) == conn:
            del self._conn_of[link]
            self._lost_at[link] = now

    def tick(self, now: float) -> list[Notice]:
        for guest in list(self._guests.values()):
            if now >= guest.heard_at + self._times.silent_s:
                self._out.append(CloseConn(guest.conn))
                self.lost(guest.conn, now)
            elif guest.hello and now >= guest.beat_at + self._times.beat_s:
                guest.beat_at = now
                self._out.append(SendFrame(guest.conn, self._beat(guest.hello.src)))
        over = dict.fromkeys(
            link.there.instance for link, at in self._lost_at.items() if now >= at + self._times.grace_s
        )
        for instance in over:
            self._forget(instance)
        return [Gone(instance) for instance in over]

    def next_due(self) -> float | None:
        due = [at + self._times.grace_s for at in self._lost_at.values()]
        for guest in self._guests.values():
            due.append(guest.heard_at + self._times.silent_s)
            if guest.hello:
                due.append(guest.beat_at + self._times.beat_s)
        return min(due, default=None)

    def _forget(self, instance: Instance) -> None:
        """One of its links is gone for good, and so are the others: it must greet on all of them anew."""
        for guest in [guest for guest in self._guests.values() if guest.hello and guest.hello.src == instance]:
            self._out.append(CloseConn(guest.conn))
            del self._guests[guest.conn]
        for links in (self._conn_of, self._lost_at):
            for link in [link for link in links if link.there.instance == instance]:
                del links[link]

    def _greeted(self, guest: Guest, hello: Hello, now: float) -> list[Notice]:
        agreed = self._unfit(guest, hello) or self._agree(guest, hello)
        if isinstance(agreed, Cause):
            self._turn_away(guest, agreed, now, hello.src)
            return []
        link = agreed.link
        older = self._conn_of.get(link, NO_CONN)
        if older not in (NO_CONN, guest.conn):
            self._out.append(CloseConn(older))
            self._guests.pop(older, None)
        guest.hello, guest.beat_at = hello, now
        self._conn_of[link] = guest.conn
        self._lost_at.pop(link, None)
        me = self._me
        welcome = Welcome(
            src=me.instance,
            dst=hello.src,
            rank=guest.here,
            stamp=me.stamp,
            protocol=min(hello.protocol_max, PROTOCOL_VERSION),
            shape=me.shape,
            data_kind=agreed.endpoint.kind,
        )
        self._out.append(SendFrame(guest.conn, welcome))
        return [agreed]

    def _unfit(self, guest: Guest, hello: Hello) -> Cause | None:
        if not hmac.compare_digest(hello.secret.encode(), self._me.secret.encode()):
            text = "the shared secret of prefill and decode differs; start both with the same --secret"
            return Cause("unauthorized", text, 503, retryable=True, side="decode")  # not the client's key: no 401
        if hello.dst not in ("", self._me.instance):
            return self._wrong_instance(hello.dst)
        if hello.protocol_max < OLDEST_PROTOCOL or hello.protocol_min > PROTOCOL_VERSION:
            ours, theirs = f"{OLDEST_PROTOCOL} to {PROTOCOL_VERSION}", f"{hello.protocol_min} to {hello.protocol_max}"
            return Cause(
                "incompatible", f"protocol differs: prefill speaks {ours}, decode speaks {theirs}", 503, retryable=True
            )
        if guest.hello and (guest.hello.src, guest.hello.rank) != (hello.src, hello.rank):
            return Cause("rebound", f"this session is {guest.hello.src}'s, rank {guest.hello.rank}", 400)
        spoken = min(hello.protocol_max, PROTOCOL_VERSION)
        return misfit(self._me.stamp, self._me.shape, hello.stamp, hello.shape, spoken)

    def _agree(self, guest: Guest, hello: Hello) -> Up | Cause:
        """By which transport, and which part of each page. Ours is the order of preference."""
        me = self._me
        offered = hello.data or (DataEndpoint("tcp", "", hello.data_host, hello.data_port, hello.data_token),)
        mine = me.data[guest.here.tp]
        common = [
            theirs for ours in mine for theirs in offered if (ours.kind, ours.where) == (theirs.kind, theirs.where)
        ]
        if not common:
            return no_transport(mine, offered)
        sides = (guest.here.tp, me.shape.tp), (hello.rank.tp, hello.shape.tp)
        part = slice_between(me.stamp.groups, me.stamp.page_size, *sides)
        if part is None:
            return no_slice(guest.here, me.shape, hello.rank, hello.shape)
        spoken = min(hello.protocol_max, PROTOCOL_VERSION)
        return Up(Link(guest.here, Seat(hello.src, hello.rank)), common[0], part, hello.shape, spoken)

    def _wrong_instance(self, meant: Instance) -> Cause:
        return Cause("wrong_instance", f"{meant} is not here; this is {self._me.instance}", 503, retryable=True)

    def _turn_away(self, guest: Guest, cause: Cause, now: float, peer: Instance = STRANGER) -> None:
        self._out.append(SessionRefused(peer, cause))
        self._out.append(SendFrame(guest.conn, Reject(src=self._me.instance, cause=cause)))
        self._out.append(CloseConn(guest.conn))
        self.lost(guest.conn, now)
