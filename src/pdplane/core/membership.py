"""Who serves which prefill: registries, their rank endpoints, and the session with each of them.

What a registry said is trusted only while the sessions it led to are up; whoever comes when one is not asks anew.
That is how a restart on the same address, or on another one behind the same registry, is noticed (I18).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .effects import Effect, LookUp
from .events import ControlEndpoint, RouteKnown
from .frames import Beat
from .ids import ConnId, Rank, Room, Seat
from .session import Dialler, DState, Identity, Notice, SessionTimes


class Group(msgspec.Struct):
    """One prefill instance group as its registry describes it; `waiting` rooms need its first sessions."""

    address: str
    endpoints: dict[Rank, ControlEndpoint] = {}
    looking: bool = False
    waiting: dict[Room, None] = {}


class Membership:
    """Groups by registry address, diallers by endpoint."""

    def __init__(
        self,
        me: Identity,
        times: SessionTimes,
        out: list[Effect],
        beat: Callable[[], Beat],
    ) -> None:
        self.groups: dict[str, Group] = {}
        self.diallers: dict[ControlEndpoint, Dialler] = {}
        self._me, self._times, self._out, self._beat = me, times, out, beat
        self._of_conn: dict[ConnId, Dialler] = {}  # learnt on the way, checked at use
        self._of_seat: dict[Seat, Dialler] = {}

    def seek(self, address: str, room: Room) -> tuple[Seat, ...]:
        """The seats at `address` where all their sessions are up; otherwise none, and `room` waits for them."""
        group = self.groups.setdefault(address, Group(address))
        if seats := self._seats(group):
            return seats
        group.waiting[room] = None
        if not group.looking:
            group.looking = True
            self._out.append(LookUp(address))
        return ()

    def known(self, route: RouteKnown, now: float) -> None:
        group = self.groups.get(route.address)
        if group is None or not group.looking:
            return
        group.looking = False
        group.endpoints = dict(route.ranks)
        self._forget_idle()
        for endpoint in group.endpoints.values():
            if endpoint not in self.diallers:
                self.diallers[endpoint] = Dialler(endpoint, self._me, self._times, self._out, self._beat)
            self.diallers[endpoint].want(now)

    def failed(self, address: str) -> list[Room]:
        """The rooms whose route there is none."""
        group = self.groups.pop(address, None)  # clients name addresses without end
        return [] if group is None else self._take_waiting(group)

    def ready(self) -> list[tuple[Room, tuple[Seat, ...]]]:
        """Rooms whose sessions have all come up, taken out of waiting."""
        found = []
        for group in self.groups.values():
            if group.waiting and not group.looking and (seats := self._seats(group)):
                found += [(room, seats) for room in self._take_waiting(group)]
        return found

    def refused(self, endpoint: ControlEndpoint) -> list[Room]:
        """Rooms that waited for a session with this endpoint, which will not be."""
        rooms = []
        for group in self.groups.values():
            if endpoint in group.endpoints.values() and not group.looking:
                rooms += self._take_waiting(group)
        return rooms

    def forget(self, room: Room) -> None:
        for group in self.groups.values():
            group.waiting.pop(room, None)

    def want_waiting(self, now: float) -> None:
        """Rooms that still wait keep their diallers dialling."""
        for group in self.groups.values():
            if group.waiting and not group.looking:
                for endpoint in group.endpoints.values():
                    self.diallers[endpoint].want(now)

    def conn(self, seat: Seat) -> ConnId | None:
        """The connection to exactly this instance, if its session is up. Never the successor's."""
        dialler = self._of_seat.get(seat)
        if dialler is None or dialler.bound != seat or not dialler.up:
            ups = (dialler for dialler in self.diallers.values() if dialler.up)
            self._of_seat = {dialler.bound: dialler for dialler in ups if dialler.bound}
            dialler = self._of_seat.get(seat)
        return dialler.conn if dialler else None

    def by_conn(self, conn: ConnId) -> Dialler | None:
        dialler = self._of_conn.get(conn)
        if dialler is None or dialler.conn != conn:
            self._of_conn = {dialler.conn: dialler for dialler in self.diallers.values() if dialler.conn}
            dialler = self._of_conn.get(conn)
        return dialler

    def tick(self, now: float) -> list[tuple[Dialler, Notice]]:
        return [(dialler, notice) for dialler in self.diallers.values() for notice in dialler.tick(now)]

    def next_due(self) -> float | None:
        due = [at for dialler in self.diallers.values() if (at := dialler.next_due()) is not None]
        return min(due, default=None)

    def sessions(self) -> int:
        return sum(dialler.up for dialler in self.diallers.values())

    def _forget_idle(self) -> None:
        """Endpoints that no registry names any more, once nobody is bound there: a prefill may come back on new ports
        without end."""
        named = {endpoint for group in self.groups.values() for endpoint in group.endpoints.values()}
        for endpoint, dialler in list(self.diallers.items()):
            if endpoint not in named and dialler.state is DState.IDLE:
                del self.diallers[endpoint]

    def _seats(self, group: Group) -> tuple[Seat, ...]:
        diallers = [self.diallers[endpoint] for endpoint in group.endpoints.values()]
        if diallers and all(dialler.up for dialler in diallers):
            return tuple(dialler.bound for dialler in diallers if dialler.bound)
        return ()

    @staticmethod
    def _take_waiting(group: Group) -> list[Room]:
        rooms = list(group.waiting)
        group.waiting.clear()
        return rooms
