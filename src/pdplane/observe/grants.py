"""Which grants a room had, over which links and transports: what `explain` shows, and an operator's release names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from pdplane.core.ids import GrantNo, Instance, Link, Room


class LinkRecord(msgspec.Struct, frozen=True):
    """One link of a grant: our rank, the peer's seat, the kind of transport, and bytes of each page."""

    here: str
    there: str
    transport: str = ""
    page_bytes: int = 0


class GrantRecord(msgspec.Struct):
    """`instance`: the decode that granted; grant numbers are its own."""

    grant: GrantNo
    instance: Instance
    pages: int
    links: dict[Link, LinkRecord] = {}


class GrantBook:
    """The grants of the last `size` rooms, oldest out first."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._rooms: OrderedDict[Room, dict[tuple[Instance, GrantNo], GrantRecord]] = OrderedDict()

    def granted(self, room: Room, instance: Instance, grant: GrantNo, pages: int) -> GrantRecord:
        """Noted once, however often it is told."""
        of_room = self._rooms.setdefault(room, {})
        while len(self._rooms) > self._size:
            self._rooms.popitem(last=False)
        return of_room.setdefault((instance, grant), GrantRecord(grant, instance, pages))

    def of_room(self, room: Room | None) -> Iterable[GrantRecord]:
        return self._rooms.get(room, {}).values() if room is not None else ()


def describe(record: GrantRecord) -> dict[str, Any]:
    return {
        "grant": record.grant,
        "instance": record.instance,
        "pages": record.pages,
        "links": [msgspec.to_builtins(link) for link in record.links.values()],
    }
