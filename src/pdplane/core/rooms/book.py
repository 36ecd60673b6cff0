"""Live rooms and tombstones. A room is one attempt's address, never a slot: finished or cancelled, it leaves a
tombstone that answers latecomers at once and refuses the number's second use (I22: only the newcomer is refused).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from ..errors import Cause
from ..ids import GrantNo, Rid, Room

M = TypeVar("M")

MAX_TOMBSTONES = 65_536


class Tombstone(msgspec.Struct, frozen=True):
    """`cause` None: it ended well. `rid` is None where no leg was ever seen. `grant` as last known."""

    cause: Cause | None
    rid: Rid | None
    expires: float
    grant: GrantNo


class Rooms(Generic[M]):
    """Machines by room, tombstones in order of death. Tombstones expire by age and, over the bound, oldest first."""

    def __init__(self, keep_s: float, most: int = MAX_TOMBSTONES) -> None:
        self.live: dict[Room, M] = {}
        self._dead: OrderedDict[Room, Tombstone] = OrderedDict()
        self._keep_s = keep_s
        self._most = most

    def get(self, room: Room) -> M | None:
        return self.live.get(room)

    def tombstone(self, room: Room, now: float) -> Tombstone | None:
        self._expire(now)
        return self._dead.get(room)

    def bury(self, room: Room, cause: Cause | None, rid: Rid | None, grant: GrantNo, now: float) -> None:
        """The room is over: out of the live ones, into the tombstones."""
        self.live.pop(room, None)
        self._dead[room] = Tombstone(cause, rid, now + self._keep_s, grant)
        self._dead.move_to_end(room)
        if len(self._dead) > self._most:
            self._dead.popitem(last=False)

    @property
    def tombstones(self) -> int:
        return len(self._dead)

    def _expire(self, now: float) -> None:
        while self._dead and next(iter(self._dead.values())).expires <= now:
            self._dead.popitem(last=False)
