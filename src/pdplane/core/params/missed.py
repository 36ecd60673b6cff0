"""Prefills that could not be reached lately: whoever comes with a handle of one is told so at once.

A dial that is out is shared by all who wait for it; the next one is made when its back-off is over and somebody comes.
By instance and address: a successor at the same address, who has answered just now, is not taken for the dead one, and
a handle that names a wrong address for a live prefill (clients can write anything) fails nobody else.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from ..errors import Cause
from ..ids import Instance

SHORTEST_S = 0.5
LONGEST_S = 4.0
MOST = 1024

Place = tuple[Instance, str]
"""A prefill, and the address at which a handle says it is."""


class Miss(msgspec.Struct, frozen=True):
    cause: Cause
    wait_s: float
    until: float


class Missed:
    """Bounded: handles name places without end."""

    def __init__(self) -> None:
        self._misses: OrderedDict[Place, Miss] = OrderedDict()

    def __len__(self) -> int:
        return len(self._misses)

    def note(self, place: Place, cause: Cause, now: float) -> None:
        """A dial has failed; all who waited for it may say so."""
        before = self._misses.get(place)
        if before and now < before.until:
            return
        wait_s = min(LONGEST_S, 2 * before.wait_s) if before else SHORTEST_S
        self._misses[place] = Miss(cause, wait_s, now + wait_s)
        self._misses.move_to_end(place)
        while len(self._misses) > MOST:
            self._misses.popitem(last=False)

    def cause(self, place: Place, now: float) -> Cause | None:
        """Why it is not tried now; None where it may be."""
        miss = self._misses.get(place)
        return miss.cause if miss and now < miss.until else None

    def met(self, instance: Instance) -> None:
        for place in [place for place in self._misses if place[0] == instance]:
            del self._misses[place]
