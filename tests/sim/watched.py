"""Processes of which only the names matter, for tests of the checkers."""

from __future__ import annotations

import msgspec

from pdplane.core.ids import Instance, PageId, Rid, Room
from pdplane.core.node import Limits
from pdplane.core.rooms.decode import DecodeNode
from pdplane.core.rooms.prefill import PrefillNode
from pdplane.core.session import Identity
from pdplane.sim.content import Work
from pdplane.sim.drawn import Plan
from pdplane.sim.plan import plan
from pdplane.sim.process import STAMP


class Worker:
    def __init__(self, side: str) -> None:
        self.side = side
        self.instance = Instance(f"{side[0]}0#1")
        self.alive = True
        me, limits = Identity(self.instance, STAMP), Limits(pages=8)
        self.node = PrefillNode(me, limits) if side == "prefill" else DecodeNode(me, limits, fenced=frozenset())


def pages(*numbers: int) -> tuple[PageId, ...]:
    return tuple(PageId(number) for number in numbers)


def work(name: str, serial: int = 1) -> Work:
    return Work(Rid(name), Room(5), serial, 4, 2, 2)


def calm_plan() -> Plan:
    """Without faults, and with engines that are swift."""
    return msgspec.structs.replace(plan(0, pattern="calm"), prefill_step=1.0)
