"""Identities. A room is not an int, an instance is not a string: what names what is checked by the type checker.

Rule 2: every frame names room, grant number, sender instance, target instance and rank. The types here are
those five, and the errors that a bad one raises at an edge.
"""

from __future__ import annotations

from typing import NewType

import msgspec

Rid = NewType("Rid", str)
"""One attempt of one sample: ``<request>.<sample>.<attempt>``; never reused."""

Room = NewType("Room", int)
"""The pairing key of one attempt, 1 .. 2**63-1. 0 means "unwritten" elsewhere in the field, so it is never legal."""

GrantNo = NewType("GrantNo", int)
"""One grant of pages by one decode instance: monotone, never reused; 0 means "nothing granted yet"."""

Instance = NewType("Instance", str)
"""One life of one process. A restart on the same address is another instance."""

HoldNo = NewType("HoldNo", int)
"""One hold of computed KV by one prefill instance (the params dialect): monotone, never reused."""

PageId = NewType("PageId", int)
"""Index of a page in one pool."""

MoveNo = NewType("MoveNo", int)
"""One batch of page writes posted by a prefill; monotone within an instance."""

ConnId = NewType("ConnId", int)
"""One control connection, minted by the shell; 0 means "none"."""

MAX_ROOM = 2**63 - 1
NO_GRANT = GrantNo(0)


class BadRoom(ValueError):
    """The room cannot name a hand-off; the message says why. HTTP 400."""


class Rank(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Coordinate of one scheduler process within its instance group."""

    dp: int = 0
    cp: int = 0
    tp: int = 0
    pp: int = 0

    def __str__(self) -> str:
        return f"dp{self.dp}cp{self.cp}tp{self.tp}pp{self.pp}"


class Shape(msgspec.Struct, frozen=True, order=True, array_like=True):
    """How many ranks an instance group has along each axis; every size at least 1."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        return f"dp {self.dp}, cp {self.cp}, tp {self.tp}, pp {self.pp}"


class Seat(msgspec.Struct, frozen=True, order=True):
    """A rank of one instance: one pool of pages, one end of sessions."""

    instance: Instance
    rank: Rank

    def __str__(self) -> str:
        return f"{self.instance}/{self.rank}"


class Link(msgspec.Struct, frozen=True, order=True):
    """A rank of ours and a rank of a peer between which pages move: the unit that is told, granted, and that owes
    proofs. Each has a control session of its own."""

    here: Rank
    there: Seat

    def __str__(self) -> str:
        return f"{self.there} to {self.here}"


def dp_of(room: Room, ranks: int) -> int:
    """The data parallel rank that serves a room where its number decides: SGLang's follow_bootstrap_room."""
    return room % ranks


def room_named(text: str) -> Room | None:
    """The room whose number `text` is; None where it is no such number (of however many digits)."""
    if len(text) > len(str(MAX_ROOM)) or not (text.isascii() and text.isdecimal()):
        return None
    return Room(int(text)) if 1 <= int(text) <= MAX_ROOM else None


def parse_room(value: object) -> Room:
    """The room in `value`, or BadRoom. A bool is not a room, nor is a float or a numeric string."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRoom(f"bootstrap_room must be an integer, got {value!r}")
    if value < 1 or value > MAX_ROOM:
        raise BadRoom(f"bootstrap_room must be between 1 and {MAX_ROOM}, got {value}")
    return Room(value)
