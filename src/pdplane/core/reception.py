"""Prefill's answers to frames that no live room takes: another decode's room, a room that is over, a grant that is not
well formed. Each is answered at once with what decode needs to end its side: why, and that nothing is written.
"""

from __future__ import annotations

from typing import Protocol

from .errors import Cause
from .frames import Abort, Announce, Drained, Failed, Frame, Grant, Received
from .ids import GrantNo, Instance, Link, Rank, Room
from .node import Node
from .rooms import Tombstone

FromDecode = Announce | Grant | Abort | Received


class Desk(Protocol):
    instance: Instance
    ranks: tuple[Rank, ...]

    @property
    def node(self) -> Node: ...

    def send(self, link: Link, frame: Frame) -> bool: ...


class Reception:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._node = desk.node

    def refuse(self, link: Link, frame: FromDecode, cause: Cause) -> None:
        """FAILED, and DRAINED: nothing was or will be written under what the frame names."""
        dst, rank = link.there.instance, link.here
        failed = Failed(room=frame.room, grant=frame.grant, src=self._desk.instance, dst=dst, rank=rank, cause=cause)
        self._desk.send(link, failed)
        self._drained(link, frame.room, frame.grant)

    def not_theirs(self, link: Link, frame: FromDecode) -> None:
        """Another decode has this room: the second is told, and nothing was ever written for it."""
        self._node.count("duplicate_room")
        if isinstance(frame, (Announce, Grant)):
            self.refuse(link, frame, duplicate(frame.room, "another decode has asked for it"))
        elif isinstance(frame, Abort):
            self._drained(link, frame.room, frame.grant)

    def over(self, link: Link, frame: FromDecode, stone: Tombstone) -> None:
        """The room is over here: whoever asks is told so, with the proof that nothing will be written."""
        self._node.count("late", type(frame).__name__.lower())
        if isinstance(frame, Grant) and stone.cause is None and frame.grant == stone.grant:
            self.refuse(link, frame, row_gone(frame.room))
        elif isinstance(frame, (Announce, Grant)):
            self.refuse(link, frame, stone.cause or duplicate(frame.room, "it is over"))
        elif isinstance(frame, Abort):
            self._drained(link, frame.room, frame.grant)

    def ill_formed(self, link: Link, frame: Grant) -> Cause | None:
        """A grant's links must be ours, and this one among them: half a prompt must never pass for a whole one."""
        ours = {rank for rank, _ in frame.links}
        if not frame.links or ((link.here, link.there.rank) in frame.links and ours <= set(self._desk.ranks)):
            return None
        named = ", ".join(f"{source} to {target}" for source, target in frame.links)
        text = f"grant {frame.grant} came over {link.here} to {link.there.rank} and names the links {named}"
        return Cause("bad_grant", text, 502, side="decode")

    def _drained(self, link: Link, room: Room, grant: GrantNo) -> None:
        dst, rank = link.there.instance, link.here
        self._desk.send(link, Drained(room=room, grant=grant, src=self._desk.instance, dst=dst, rank=rank))


def row_gone(room: Room) -> Cause:
    """Theirs, sent, and forgotten: SUCCESS was lost on the way, and nobody asked for it in time."""
    text = f"prefill sent room {room}, was not told that it arrived, and does not keep its row any more"
    return Cause("row_gone", text, 503, retryable=True, side="prefill")


def duplicate(room: Room, why: str) -> Cause:
    return Cause("duplicate_room", f"room {room} is taken: {why}", 409, side="prefill")
