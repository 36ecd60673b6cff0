"""What the shells of both sides share in the rooms dialect: which rooms they know, and the grants of each."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pdplane.core.ids import Room
from pdplane.core.pages import grant_owner
from pdplane.core.rooms.decode import DecodeNode
from pdplane.core.rooms.prefill import PrefillNode
from pdplane.observe.grants import GrantBook, describe
from pdplane.observe.records import LegRecord

from .paired import PairedShell
from .shell import Parts

N = TypeVar("N", PrefillNode, DecodeNode, covariant=True)


class RoomsShell(PairedShell[N], Generic[N]):
    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.grants: GrantBook[Room] = GrantBook()

    def has(self, room: Room) -> bool:
        return room in self.node.rooms.live

    def knows(self, room: Room) -> bool:
        return room in self.node.rooms.live or self.node.rooms.tombstone(room, self._loop.time()) is not None

    def grants_of(self, record: LegRecord) -> list[dict[str, Any]]:
        held = self.node.ledger.held_by
        return [
            {**describe(grant), "held_pages": held(grant_owner(grant.grant))} for grant in self.grants.of(record.room)
        ]
