"""Control sessions between the simulated processes: FIFO, delayed, breakable, and held back where a link is cut.

A connection behaves as TCP does: order is kept, a cut link holds frames until it heals, a broken connection loses
what is under way, and each end learns of the break in its own time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from pdplane.core.events import Accepted, ConnLost, ControlEndpoint, DialFailed, Dialled, Event, FrameIn
from pdplane.core.frames import Frame
from pdplane.core.ids import ConnId, Rank

DIAL_TIMEOUT_S = 1.0
NOTICE_S = (0.0, 0.02, 0.3, 6.0)  # how long an end may take to notice a break, at most; one is drawn


class End(Protocol):
    """A process as the network sees it."""

    name: str
    dp: int
    first_port: int  # of its tensor parallel rank 0; the others follow
    alive: bool
    conns: dict[ConnId, Connection]

    def post(self, event: Event) -> None: ...

    def mint_conn(self) -> ConnId: ...


class Clock(Protocol):
    """The world as the network sees it."""

    now: float

    def at(self, when: float, do: Callable[[], None]) -> None: ...

    def uniform(self, low: float, high: float) -> float: ...

    def choice(self, options: tuple[float, ...]) -> float: ...

    def process(self, name: str) -> End: ...


class Connection:
    """One control connection; `ends[0]` dialled for its rank `here`. `tp`: the rank of `ends[1]` that listened."""

    def __init__(self, ends: tuple[End, End], here: Rank, tp: int) -> None:
        self.ends = ends
        self.here, self.tp = here, tp
        self.ids = tuple(end.mint_conn() for end in ends)
        self.arrives = [0.0, 0.0]  # the latest arrival so far, towards each end
        self.held: tuple[deque[Frame | None], deque[Frame | None]] = (deque(), deque())
        self.broken = False
        for end, number in zip(ends, self.ids, strict=True):
            end.conns[number] = self

    def side_of(self, end: End) -> int:
        return 0 if self.ends[0] is end else 1


class Network:
    """Links by (from, to) name. `base_s`: the range of an undisturbed delay."""

    def __init__(self, clock: Clock, base_s: tuple[float, float] = (0.0003, 0.004)) -> None:
        self._clock = clock
        self._base_s = base_s
        self._cuts: dict[tuple[str, str], int] = {}
        self._extra_s: dict[tuple[str, str], float] = {}
        self._rank_extra_s: dict[tuple[str, int], float] = {}
        self._losing: list[tuple[set[str], str, bool]] = []
        self._connections: list[Connection] = []

    # --- what nodes ask for -----------------------------------------------------------------------------------------

    def dial(self, dialler: End, endpoint: ControlEndpoint, here: Rank) -> None:
        """For the dialler's rank `here`. Nobody listens at a port of an earlier life."""
        self._later(dialler.name, endpoint.host, lambda: self._reached(dialler, endpoint, here))

    def send(self, sender: End, number: ConnId, frame: Frame | None) -> None:
        """None is the end of the stream."""
        connection = sender.conns.get(number)
        if connection is None or connection.broken:
            return
        if frame is not None and self._lost(connection, type(frame).__name__.lower()):
            return
        to = 1 - connection.side_of(sender)
        due = self._clock.now + self._delay_s(sender.name, connection.ends[to].name)
        due += self._rank_extra_s.get((connection.ends[1].name, connection.tp), 0.0)
        connection.arrives[to] = due = max(due, connection.arrives[to])
        self._clock.at(due, lambda: self._arrived(connection, to, frame))

    def close(self, closer: End, number: ConnId) -> None:
        """Flush and close: what was sent before still arrives."""
        self.send(closer, number, None)
        closer.conns.pop(number, None)

    # --- faults -----------------------------------------------------------------------------------------------------

    def cut(self, src: str, dst: str) -> None:
        self._cuts[src, dst] = self._cuts.get((src, dst), 0) + 1

    def heal(self, src: str, dst: str) -> None:
        self._cuts[src, dst] -= 1
        if self.is_cut(src, dst):
            return
        for connection in list(self._connections):
            for to in (0, 1):
                if (connection.ends[1 - to].name, connection.ends[to].name) == (src, dst):
                    self._flush(connection, to)

    def is_cut(self, src: str, dst: str) -> bool:
        return self._cuts.get((src, dst), 0) > 0

    def slow(self, src: str, dst: str, extra_s: float) -> None:
        self._extra_s[src, dst] = extra_s

    def slow_rank(self, listener: str, tp: int, extra_s: float) -> None:
        self._rank_extra_s[listener, tp] = extra_s

    def break_between(self, one: str, other: str, tp: int | None = None) -> None:
        """`tp`: only the sessions of that rank of the one that listens."""
        for connection in list(self._connections):
            if {end.name for end in connection.ends} == {one, other} and tp in (None, connection.tp):
                self._break(connection)

    def lose_next(self, one: str, other: str, kind: str, *, whole: bool = False) -> None:
        """The next frame of this kind between them goes down with its session; `whole`: with all of theirs."""
        self._losing.append(({one, other}, kind, whole))

    def process_died(self, end: End) -> None:
        for connection in list(end.conns.values()):
            self._break(connection)
        end.conns.clear()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _reached(self, dialler: End, endpoint: ControlEndpoint, here: Rank) -> None:
        listener = self._clock.process(endpoint.host)
        if not dialler.alive:
            return
        if self.is_cut(dialler.name, listener.name) or self.is_cut(listener.name, dialler.name):
            late = DialFailed(endpoint, here, "timed out")
            self._clock.at(self._clock.now + DIAL_TIMEOUT_S, lambda: dialler.post(late))
        elif not listener.alive or endpoint.port < listener.first_port:
            refused = DialFailed(endpoint, here, "refused")
            self._later(listener.name, dialler.name, lambda: dialler.post(refused))
        else:
            connection = Connection((dialler, listener), here, endpoint.port - listener.first_port)
            self._connections.append(connection)
            listener.post(Accepted(connection.ids[1], Rank(dp=listener.dp, tp=connection.tp)))
            due = self._clock.now + self._delay_s(listener.name, dialler.name)
            connection.arrives[0] = due
            self._clock.at(due, lambda: self._dialled(connection, Dialled(endpoint, here, connection.ids[0])))

    def _dialled(self, connection: Connection, dialled: Dialled) -> None:
        """It may be broken before the dialler had it."""
        connection.ends[0].post(dialled)
        if connection.broken:
            self._notice(connection, 0, 0.0)

    def _arrived(self, connection: Connection, to: int, frame: Frame | None) -> None:
        if connection.broken:
            return
        sender, receiver = connection.ends[1 - to], connection.ends[to]
        if connection.held[to] or self.is_cut(sender.name, receiver.name):
            connection.held[to].append(frame)
        else:
            self._hand_over(connection, to, frame)

    def _hand_over(self, connection: Connection, to: int, frame: Frame | None) -> None:
        receiver, number = connection.ends[to], connection.ids[to]
        if number not in receiver.conns:
            return
        if frame is not None:
            receiver.post(FrameIn(number, frame))
        else:
            del receiver.conns[number]
            self._forget(connection)
            receiver.post(ConnLost(number))

    def _flush(self, connection: Connection, to: int) -> None:
        while connection.held[to] and not connection.broken:
            self._hand_over(connection, to, connection.held[to].popleft())

    def _break(self, connection: Connection) -> None:
        if connection.broken:
            return
        connection.broken = True
        self._forget(connection)
        for side in (0, 1):
            self._notice(connection, side, self._clock.uniform(0.0, self._clock.choice(NOTICE_S)))

    def _lost(self, connection: Connection, kind: str) -> bool:
        names = {end.name for end in connection.ends}
        found = next((lost for lost in self._losing if lost[:2] == (names, kind)), None)
        if found is None:
            return False
        self._losing.remove(found)
        if found[2]:
            self.break_between(connection.ends[0].name, connection.ends[1].name)
        self._break(connection)
        return True

    def _notice(self, connection: Connection, side: int, after_s: float) -> None:
        end, number = connection.ends[side], connection.ids[side]

        def noticed() -> None:
            if end.conns.pop(number, None) is not None:
                end.post(ConnLost(number))

        self._clock.at(max(self._clock.now + after_s, connection.arrives[side]), noticed)

    def _forget(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def _later(self, src: str, dst: str, do: Callable[[], None]) -> None:
        self._clock.at(self._clock.now + self._delay_s(src, dst), do)

    def _delay_s(self, src: str, dst: str) -> float:
        return self._clock.uniform(*self._base_s) + self._extra_s.get((src, dst), 0.0)
