"""The simulated control network keeps order, holds frames over a cut, loses them over a break."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

from pdplane.core.errors import client_left
from pdplane.core.events import Accepted, ConnLost, ControlEndpoint, DialFailed, Dialled, Event, FrameIn
from pdplane.core.frames import Beat, Reject
from pdplane.core.ids import ConnId, Instance, Rank
from pdplane.sim.network import Connection, Network

HERE = Rank(tp=1)


class Ear:
    """A process that writes down what happens to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dp = 0
        self.first_port = 1
        self.alive = True
        self.conns: dict[ConnId, Connection] = {}
        self.heard: list[Event] = []

    def post(self, event: Event) -> None:
        self.heard.append(event)

    def mint_conn(self) -> ConnId:
        return ConnId(len(self.conns) + len(self.heard) + 10)

    @property
    def frames(self) -> list[str]:
        return [event.frame.src for event in self.heard if isinstance(event, FrameIn) and isinstance(event.frame, Beat)]

    @property
    def errors(self) -> list[str]:
        return [event.error for event in self.heard if isinstance(event, DialFailed)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.d, self.p = Ear("d0"), Ear("p0")
        self.network = Network(self)
        self._rng = Random(1)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def at(self, when: float, do: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._due, (max(when, self.now), self._serial, do))

    def uniform(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)

    def choice(self, options: tuple[float, ...]) -> float:
        return self._rng.choice(options)

    def process(self, name: str) -> Ear:
        return {"d0": self.d, "p0": self.p}[name]

    def run(self) -> None:
        while self._due:
            self.now, _, do = heapq.heappop(self._due)
            do()

    def dialled(self, port: int = 1) -> ConnId:
        """The dialler's number of a fresh connection."""
        self.network.dial(self.d, ControlEndpoint("p0", port), HERE)
        self.run()
        assert isinstance(self.d.heard[-1], Dialled)
        return self.d.heard[-1].conn

    def say(self, conn: ConnId, *words: str) -> None:
        for word in words:
            self.network.send(self.d, conn, Beat(src=Instance(word)))


def test_frames_keep_their_order() -> None:
    clock = Clock()
    words = [str(i) for i in range(50)]
    clock.say(clock.dialled(), *words)
    clock.run()
    assert clock.p.frames == words


def test_a_port_is_a_rank_and_each_end_knows_its_own() -> None:
    clock = Clock()
    conn = clock.dialled(port=3)
    accepted, dialled = clock.p.heard[0], clock.d.heard[0]
    assert isinstance(accepted, Accepted)
    assert accepted.here == Rank(tp=2)
    assert dialled == Dialled(ControlEndpoint("p0", 3), HERE, conn)


def test_a_cut_holds_frames_until_it_heals_and_what_follows_stays_behind() -> None:
    clock = Clock()
    conn = clock.dialled()
    clock.network.cut("d0", "p0")
    clock.say(conn, "a", "b")
    clock.run()
    assert clock.p.frames == []
    clock.network.heal("d0", "p0")
    clock.say(conn, "c")
    clock.run()
    assert clock.p.frames == ["a", "b", "c"]


def test_a_break_loses_what_is_under_way_and_both_ends_notice() -> None:
    clock = Clock()
    conn = clock.dialled()
    clock.say(conn, "lost")
    clock.network.break_between("p0", "d0")
    clock.run()
    assert clock.p.frames == []
    assert isinstance(clock.p.heard[-1], ConnLost)
    assert clock.d.heard[-1] == ConnLost(conn)


def test_one_ranks_sessions_break_alone() -> None:
    clock = Clock()
    first, second = clock.dialled(port=1), clock.dialled(port=2)
    clock.network.break_between("p0", "d0", tp=1)
    clock.say(first, "a")
    clock.say(second, "b")
    clock.run()
    assert clock.p.frames == ["a"]
    assert clock.d.heard[-1] == ConnLost(second)


def test_a_session_can_be_lost_with_the_very_frame_that_it_carries() -> None:
    clock = Clock()
    first, second = clock.dialled(port=1), clock.dialled(port=2)
    clock.network.lose_next("p0", "d0", "reject")
    clock.say(first, "before")
    clock.network.send(clock.d, first, Reject(src=Instance("d0"), cause=client_left("decode")))
    clock.say(first, "after")
    clock.say(second, "beside")
    clock.run()
    assert clock.p.frames == ["beside"]
    assert [event.conn for event in clock.d.heard if isinstance(event, ConnLost)] == [first]


def test_a_frame_can_take_all_sessions_with_it_and_does_so_once() -> None:
    clock = Clock()
    first, second = clock.dialled(port=1), clock.dialled(port=2)
    clock.network.lose_next("p0", "d0", "reject", whole=True)
    clock.network.send(clock.d, first, Reject(src=Instance("d0"), cause=client_left("decode")))
    clock.run()
    assert {event.conn for event in clock.d.heard if isinstance(event, ConnLost)} == {first, second}
    clock.network.send(clock.d, clock.dialled(), Reject(src=Instance("d0"), cause=client_left("decode")))
    clock.run()
    assert isinstance(clock.p.heard[-1], FrameIn)


def test_a_close_lets_what_was_said_before_arrive_and_tells_the_other_end_alone() -> None:
    clock = Clock()
    conn = clock.dialled()
    clock.say(conn, "last words")
    clock.network.close(clock.d, conn)
    clock.run()
    assert clock.p.frames == ["last words"]
    assert isinstance(clock.p.heard[-1], ConnLost)
    assert not any(isinstance(event, ConnLost) for event in clock.d.heard)


def test_nobody_answers_for_a_dead_process_or_over_a_cut() -> None:
    clock = Clock()
    clock.p.alive = False
    clock.network.dial(clock.d, ControlEndpoint("p0", 1), HERE)
    clock.run()
    clock.p.alive = True
    clock.network.cut("p0", "d0")
    clock.network.dial(clock.d, ControlEndpoint("p0", 1), HERE)
    clock.run()
    assert clock.d.errors == ["refused", "timed out"]


def test_nobody_listens_at_the_ports_of_an_earlier_life() -> None:
    clock = Clock()
    clock.p.first_port = 33
    clock.network.dial(clock.d, ControlEndpoint("p0", 17), HERE)
    clock.run()
    assert clock.d.errors == ["refused"]
