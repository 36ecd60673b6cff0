"""KV that is computed and waits for a grant: under a term, and within a cap.

Held KV waits for decode, and decode's pages wait for nobody here: pages are taken in one order, prefill's, then
decode's. The cap keeps a part of the pool for prompts that are granted already. The holder counts the term; safety
rests on no clock: a grant that comes after the term meets a room that is over.
"""

from __future__ import annotations

from ..ids import Room


class Holds:
    """`cap`: most pages of prompts that were started without a grant. One prompt over it may run where it is alone."""

    def __init__(self, cap: int, term_s: float) -> None:
        self._cap, self._term_s = cap, term_s
        self._pages: dict[Room, int] = {}
        self._ends: dict[Room, float] = {}

    @property
    def pages(self) -> int:
        return sum(self._pages.values())

    def has_room(self, pages: int) -> bool:
        return not self._pages or self.pages + pages <= self._cap

    def start(self, room: Room, pages: int) -> None:
        """A prompt is computed ahead of its grant."""
        self._pages[room] = pages

    def granted(self, room: Room) -> None:
        """It does not wait any more."""
        self._pages.pop(room, None)

    def hold(self, room: Room, now: float) -> float:
        """It is computed: the end of its term, which starts the first time that this is said."""
        return self._ends.setdefault(room, now + self._term_s)

    def left_s(self, room: Room, now: float) -> float:
        return max(0.0, self._ends.get(room, now + self._term_s) - now)

    def forget(self, room: Room) -> None:
        self._pages.pop(room, None)
        self._ends.pop(room, None)
