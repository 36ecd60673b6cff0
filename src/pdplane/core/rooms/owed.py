"""What decode still owes for rooms that are over here: a terminal status always crosses to the other side (rule 1).

A room can be over while a prefill rank has not said so itself: a closed fence needs nobody's word, and a session may be
down when the end comes. Such rooms are remembered by link, as long as their tombstones, and aborted again when the
session is back; whoever speaks of one later is told what became of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..frames import Abort, Drained, Failed, Frame, Ready, Received, Success
from ..ids import GrantNo, Instance, Link, Room
from ..node import Node
from .book import Tombstone

FromPrefill = Ready | Success | Failed | Drained


class Desk(Protocol):
    instance: Instance

    @property
    def node(self) -> Node: ...

    def tombstone(self, room: Room) -> Tombstone | None: ...

    def send(self, link: Link, frame: Frame) -> bool: ...


class Owed:
    """Rooms over here which a link has not confirmed."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._node = desk.node
        self._rooms: dict[Link, dict[Room, None]] = {}

    def note(self, room: Room, links: Iterable[Link]) -> None:
        """This room has failed here, and these links have not said themselves that it is over there."""
        for link in links:
            self._rooms.setdefault(link, {})[room] = None
            self._node.timers.set(("owed", link), self._node.now + self._node.limits.tombstone_s)

    def expire(self, link: Link) -> None:
        self._rooms.pop(link, None)

    def latecomer(self, link: Link, frame: FromPrefill) -> None:
        """A frame for a room that is over. Prefill that still holds a row, or KV, is told what became of it."""
        owed = self._rooms.get(link, {})
        if not isinstance(frame, (Failed, Ready)) and frame.room in owed:
            del owed[frame.room]
        else:
            self._node.count("late", type(frame).__name__.lower())
        if isinstance(frame, (Success, Ready)):
            self._tell(link, frame.room, frame.grant)

    def resync(self, link: Link) -> None:
        """The session is up again."""
        for room in list(self._rooms.get(link, ())):
            stone = self._desk.tombstone(room)
            if stone is not None and stone.cause is not None:
                self._tell(link, room, stone.grant)

    def _tell(self, link: Link, room: Room, grant: GrantNo) -> None:
        stone = self._desk.tombstone(room)
        if stone is None:
            return
        us, there = self._desk.instance, link.there
        if stone.cause is None:
            self._desk.send(link, Received(room=room, grant=grant, src=us, dst=there.instance, rank=there.rank))
        else:
            cause = stone.cause
            self._desk.send(
                link, Abort(room=room, grant=grant, src=us, dst=there.instance, rank=there.rank, cause=cause)
            )
