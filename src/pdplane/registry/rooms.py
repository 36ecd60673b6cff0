"""Which dp rank took which room: written by prefill, asked by decode. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterable

from pdplane.core.ids import BadRoom, Room, parse_room

from .refused import RouteRefused

ROOM_TTL_S = 120.0
MAX_ROOMS = 1_000_000


class RoomTable:
    """room -> dp rank, each entry for one to two `ttl_s`, as long as there is space: two generations, of which the
    older is dropped whole when the younger is `ttl_s` old, or full."""

    def __init__(self, now: float, *, ttl_s: float = ROOM_TTL_S, capacity: int = MAX_ROOMS) -> None:
        self._ttl_s = ttl_s
        self._per_generation = max(1, capacity // 2)
        self._born = now
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def put(self, room: Room, dp_rank: int, now: float) -> None:
        self.expire(now)
        if len(self._young) >= self._per_generation and room not in self._young:
            self._turn(now)
        self._old.pop(room, None)
        self._young[room] = dp_rank

    def find(self, rooms: Iterable[int], now: float) -> dict[str, int]:
        """By decimal room; unknown and expired rooms are left out."""
        self.expire(now)
        found = {}
        for room in rooms:
            dp_rank = self._young.get(room, self._old.get(room))
            if dp_rank is not None:
                found[str(room)] = dp_rank
        return found

    def expire(self, now: float) -> None:
        while now - self._born >= self._ttl_s and (self._young or self._old):
            self._turn(self._born + self._ttl_s)
        if not self._young and not self._old:
            self._born = max(self._born, now)

    def _turn(self, now: float) -> None:
        self._old, self._young = self._young, {}
        self._born = now


def room_of(value: int) -> Room:
    """Raises RouteRefused (400) for what is no room."""
    try:
        return parse_room(value)
    except BadRoom as error:
        raise RouteRefused(400, str(error)) from None
