"""Prefills that could not be reached lately: whoever comes with a handle of one is told so at once.

A dial that is out is shared by all who wait for it; the next one is made when its back-off is over and somebody comes.
By instance, so that a successor at the same address, who has answered just now, is not taken for the dead one.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from .errors import Cause
from .ids import Instance

SHORTEST_S = 0.5
LONGEST_S = 4.0
MOST = 1024


class Miss(msgspec.Struct, frozen=True):
    cause: Cause
    wait_s: float
    until: float


class Missed:
    """Bounded: handles name instances without end."""

    def __init__(self) -> None:
        self._misses: OrderedDict[Instance, Miss] = OrderedDict()

    def __len__(self) -> int:
        return len(self._misses)

    def note(self, instance: Instance, cause: Cause, now: float) -> None:
        """A dial has failed; all who waited for it may say so."""
        before = self._misses.get(instance)
        if before and now < before.until:
            return
        wait_s = min(LONGEST_S, 2 * before.wait_s) if before else SHORTEST_S
        self._misses[instance] = Miss(cause, wait_s, now + wait_s)
        self._misses.move_to_end(instance)
        while len(self._misses) > MOST:
            self._misses.popitem(last=False)

    def cause(self, instance: Instance, now: float) -> Cause | None:
        """Why it is not tried now; None where it may be."""
        miss = self._misses.get(instance)
        return miss.cause if miss and now < miss.until else None

    def met(self, instance: Instance) -> None:
        self._misses.pop(instance, None)
