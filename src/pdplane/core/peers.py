"""What happens to decode's sessions, told to its rooms: a route, a session that is up, an instance that is gone.

The sessions themselves are the diallers' (dialler.py), who serves whom is the membership's; here their notices become
events of rooms, and a peer that owes a proof is asked for it as long as it may come back.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from .dialler import Dialler
from .effects import CloseConn, Lane
from .errors import Cause
from .events import ConnLost, DialFailed, Dialled, RankKnown, RouteFailed, RouteKnown
from .frames import Frame
from .ids import ConnId, Instance, Link
from .membership import Membership
from .node import Node
from .session import Gone, Notice, TurnedAway, Up

Event = RouteKnown | RankKnown | RouteFailed | Dialled | DialFailed | ConnLost


K = TypeVar("K", bound=int)
J = TypeVar("J", bound=int, contravariant=True)


class Desk(Protocol[J]):
    """The node's rooms."""

    @property
    def node(self) -> Node: ...

    def route_ok(self, room: J, lanes: tuple[Lane, ...]) -> None: ...

    def route_bad(self, room: J, cause: Cause) -> None: ...

    def session_up(self, link: Link) -> None: ...

    def instance_gone(self, instance: Instance) -> None: ...

    def unproven(self) -> set[Link]:
        """Links whose proof rooms that are over still wait for."""
        ...


class Peers(Generic[K]):
    def __init__(self, desk: Desk[K], members: Membership[K]) -> None:
        self._desk = desk
        self._node = desk.node
        self._members = members

    def seek(self, address: str, room: K, dp_rank: int | None) -> None:
        """Lanes for a new room: at once, or when its sessions are up."""
        found = self._members.seek(address, room, dp_rank, self._node.now)
        if found is not None:
            self._met(room, found)

    def event(self, event: Event) -> None:
        now, members = self._node.now, self._members
        match event:
            case RouteKnown():
                for room, cause in members.known(event, now):
                    self._desk.route_bad(room, cause)
            case RankKnown(room=room):
                if bad := members.rank_known(event, now):
                    self._desk.route_bad(room, bad)
            case RouteFailed(address, cause):
                self._bad(members.failed(address), cause)
            case Dialled() | DialFailed():
                self._dial_ended(event)
            case ConnLost(conn):
                if dialler := members.by_conn(conn):
                    self._notices(dialler, dialler.lost(now))

    def frame(self, conn: ConnId, frame: Frame) -> Link | None:
        """Whose frame this is, where a session is up on that connection."""
        dialler = self._members.by_conn(conn)
        if dialler is None:
            self._node.count("late", "frame")
            return None
        self._notices(dialler, dialler.frame(frame, self._node.now))
        return dialler.link if dialler.up else None

    def tick(self) -> None:
        """Clocks of the sessions, and rooms whose sessions are all up."""
        for dialler, notice in self._members.tick(self._node.now):
            self._notices(dialler, [notice])
        for room, met in self._members.ready():
            self._met(room, met)

    def _met(self, room: K, met: tuple[Lane, ...] | Cause) -> None:
        if isinstance(met, Cause):
            self._desk.route_bad(room, met)
        else:
            self._desk.route_ok(room, met)

    def _bad(self, rooms: list[K], cause: Cause) -> None:
        for room in rooms:
            self._desk.route_bad(room, cause)

    def _dial_ended(self, event: Dialled | DialFailed) -> None:
        dialler = self._members.diallers.get((event.endpoint, event.here))
        if dialler is None:  # given up meanwhile
            self._node.count("late", "dial")
            if isinstance(event, Dialled):
                self._node.out.append(CloseConn(event.conn))
        elif isinstance(event, Dialled):
            self._notices(dialler, dialler.dialled(event.conn, self._node.now))
        else:
            self._notices(dialler, dialler.dial_failed(event.error, self._node.now))

    def _notices(self, dialler: Dialler, notices: list[Notice]) -> None:
        for notice in notices:
            match notice:
                case Up(link):
                    self._members.met(dialler)
                    self._desk.session_up(link)
                case Gone(instance):
                    self._members.gone(instance)
                    self._desk.instance_gone(instance)
                    self._members.want_waiting(self._node.now)
                    self._chase(dialler)
                case TurnedAway(cause):
                    self._bad(self._members.refused(dialler), cause)
                    self._chase(dialler)

    def _chase(self, dialler: Dialler) -> None:
        """A peer that froze may come back: while its proof is missing, keep asking. A successor ends the search."""
        missing = self._desk.unproven()
        peer = dialler.was.there.instance if dialler.was else None
        for other in self._members.diallers.values():
            if other.was in missing and other.was.there.instance == peer:
                other.want(self._node.now)
