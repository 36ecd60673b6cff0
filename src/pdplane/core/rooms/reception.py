"""Prefill's answers to frames that no live room takes: another decode's room, a room that is over, a grant that is not
well formed. Each is answered at once with what decode needs to end its side: why, and that nothing is written.
"""

from __future__ import annotations

from typing import Protocol

from ..errors import Cause
from ..frames import Abort, Announce, Drained, Failed, Frame, Grant, Received
from ..ids import GrantNo, Instance, Link, Rank, Room, Shape
from ..node import Node
from ..session import Identity
from ..slices import pairs
from .book import Tombstone

FromDecode = Announce | Grant | Abort | Received


class Desk(Protocol):
    instance: Instance

    @property
    def node(self) -> Node: ...

    def send(self, link: Link, frame: Frame) -> bool: ...


class Reception:
    def __init__(self, desk: Desk, me: Identity) -> None:
        self._desk = desk
        self._node = desk.node
        self._me = me
        self._links: dict[Link, frozenset[tuple[Rank, Rank]]] = {}  # all links to whom that session is with

    def met(self, link: Link, theirs: Shape) -> None:
        """The session of this link is up, with a decode of this shape."""
        me, stamp, dp = self._me, self._me.stamp, link.there.rank.dp
        self._links[link] = frozenset(pairs(stamp.groups, stamp.page_size, me.shape, theirs, (me.dp, dp)))

    def parted(self, peer: Instance) -> None:
        for link in [link for link in self._links if link.there.instance == peer]:
            del self._links[link]

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
        """A grant names exactly the links that both shapes ask for: half a prompt must never pass for a whole one."""
        named = frame.links or ((link.here, link.there.rank),)
        expected = self._links.get(link, frozenset())
        if (link.here, link.there.rank) in named and len(named) == len(expected) and expected.issuperset(named):
            return None
        told, due = (", ".join(f"{source} to {target}" for source, target in sorted(of)) for of in (named, expected))
        text = f"grant {frame.grant} names the links {told}; between these two they are {due or 'none'}"
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
