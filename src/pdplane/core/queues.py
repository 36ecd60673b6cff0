"""A queue by priority, then arrival, in which a head that does not fit may be overtaken a bounded number of times.

Without overtaking one large request idles the pool; without the bound it starves.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class _Entry(msgspec.Struct, Generic[T]):
    rank: tuple[int, int]  # (-priority, arrival)
    item: T
    overtaken: int = 0

    def __lt__(self, other: _Entry[T]) -> bool:
        return self.rank < other.rank


LOOKED_AT = 64  # entries from the head: a long queue costs no more per look than a short one


class AdmissionQueue(Generic[T]):
    """Higher priority first. At most `max_overtakes` later entries are let past one that does not fit."""

    def __init__(self, max_overtakes: int = 8) -> None:
        self._entries: list[_Entry[T]] = []
        self._members: set[int] = set()  # ids of the items: a machine is itself, whatever it equals
        self._arrivals = 0
        self._changes = 0
        self._stuck: tuple[object, int] | None = None
        self._max_overtakes = max_overtakes

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries)

    def __contains__(self, item: T) -> bool:
        return id(item) in self._members

    def push(self, item: T, priority: int = 0) -> None:
        self._arrivals += 1
        self._changes += 1
        self._members.add(id(item))
        insort(self._entries, _Entry((-priority, self._arrivals), item))

    def remove(self, item: T) -> None:
        """Takes `item` out; no error where it is not in."""
        if item not in self:
            return
        self._changes += 1
        self._members.discard(id(item))
        self._entries = [entry for entry in self._entries if entry.item is not item]

    def pop_fitting(self, fits: Callable[[T], bool], stamp: object = None) -> T | None:
        """The first entry among the next few that fits, unless it would overtake one that was overtaken often enough.

        `stamp` stands for all that `fits` looks at: nobody is asked again while it and the queue are the same.
        """
        if stamp is not None and self._stuck == (stamp, self._changes):
            return None
        place = self._first_fitting(fits)
        if place is None:
            self._stuck = (stamp, self._changes)
            return None
        for passed in self._entries[:place]:
            passed.overtaken += 1
        item = self._entries.pop(place).item
        self._changes += 1
        self._members.discard(id(item))
        return item

    def _first_fitting(self, fits: Callable[[T], bool]) -> int | None:
        for place, entry in enumerate(self._entries[:LOOKED_AT]):
            if fits(entry.item):
                return place
            if entry.overtaken >= self._max_overtakes:
                return None
        return None
