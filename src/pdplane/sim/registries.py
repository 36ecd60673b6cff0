"""The registries of a run: what is behind an address, and which rank has taken a room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from pdplane.core.errors import Cause, unavailable
from pdplane.core.events import ControlEndpoint, Event, RankKnown, RouteFailed, RouteKnown
from pdplane.core.ids import Rank, Room
from pdplane.core.slices import heads_of

from .content import HEADS
from .drawn import Plan

GROUP = "group"
ANSWER_S = (0.0005, 0.01)


class Process(Protocol):
    name: str
    first_port: int

    @property
    def running(self) -> bool: ...

    def post(self, event: Event) -> None: ...


class World(Protocol):
    now: float
    plan: Plan

    def at(self, when: float, do: Callable[[], None]) -> None: ...

    def uniform(self, low: float, high: float) -> float: ...

    def process(self, name: str) -> Process: ...


class Registries:
    """The registry at "p0:..." is that prefill's; one group's is at "group:...", there while all its ranks are."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rank_of: dict[Room, int] = {}  # what prefills have written
        self._down: Counter[str] = Counter()
        self._missing: Counter[tuple[str, int]] = Counter()
        self._extra_s: dict[str, float] = {}

    def taken(self, room: Room, rank: int) -> None:
        """A prefill writes that it has this room."""
        self._rank_of[room] = rank

    def look_up(self, who: Process, address: str) -> None:
        plan = self._world.plan

        def answered() -> None:
            names = self._behind(address)
            if any(self._down[name] or not self._world.process(name).running for name in names):
                who.post(RouteFailed(address, _unreachable(address)))
            else:
                ranks = tuple(rank for name in names for rank in self._ranks(name))
                who.post(RouteKnown(address, ranks, plan.shape_of("prefill"), plan.follow_room))

        self._later(address, answered)

    def look_up_rank(self, who: Process, address: str, room: Room) -> None:
        def answered() -> None:
            if any(self._down[name] for name in self._behind(address)):
                who.post(RouteFailed(address, _unreachable(address)))
            else:
                who.post(RankKnown(address, room, self._rank_of.get(room)))

        self._later(address, answered)

    # --- faults -----------------------------------------------------------------------------------------------------

    def go_down(self, name: str, until: float) -> None:
        self._down[name] += 1
        self._world.at(until, lambda: self._down.subtract([name]))

    def slow(self, name: str, extra_s: float) -> None:
        self._extra_s[name] = extra_s

    def miss(self, name: str, tp: int, until: float) -> None:
        """This rank is not known here until then."""
        self._missing[name, tp] += 1
        self._world.at(until, lambda: self._missing.subtract([(name, tp)]))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _ranks(self, name: str) -> list[tuple[Rank, ControlEndpoint]]:
        """Those that hold heads; a rank without any has no sessions."""
        plan, first = self._world.plan, self._world.process(name).first_port
        size = plan.shape_of("prefill").tp
        known = [tp for tp in range(size) if heads_of(HEADS, tp, size) and not self._missing[name, tp]]
        return [(Rank(dp=plan.dp_of(name), tp=tp), ControlEndpoint(name, first + tp)) for tp in known]

    def _behind(self, address: str) -> tuple[str, ...]:
        name = address.partition(":")[0]
        return self._world.plan.prefills if name == GROUP else (name,)

    def _later(self, address: str, answered: Callable[[], None]) -> None:
        extra_s = max(self._extra_s.get(name, 0.0) for name in self._behind(address))
        self._world.at(self._world.now + self._world.uniform(*ANSWER_S) + extra_s, answered)


def _unreachable(address: str) -> Cause:
    return unavailable("registry_unreachable", f"registry {address} does not answer", side="decode")
