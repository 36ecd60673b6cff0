"""The ledger of one pool: every page has one state and one owner, and the sum over states is the capacity.

Pages leave a request only through `free`, and only the machines that hold a proof call it (rule 3). A transition
names the state it comes from; a page that is not there is a fault of ours, and asserts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NewType

from .ids import PageId

Owner = NewType("Owner", str)
"""Who a page belongs to: ``grant <no>`` at decode, the rid elsewhere."""

NOBODY = Owner("")


class Page(IntEnum):
    """Where a page is in its life. Decode: granted, filled, active. Prefill: computing, sending. Both: the rest."""

    FREE = 0
    GRANTED = 1
    FILLED = 2
    ACTIVE = 3
    COMPUTING = 4
    SENDING = 5
    DRAINING = 6
    QUARANTINED = 7


class Ledger:
    """Who owns which page. Free pages are handed out oldest first, so that a stale write has the longest way."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._state = [Page.FREE] * capacity
        self._owner = [NOBODY] * capacity
        self._free: dict[PageId, None] = dict.fromkeys(PageId(i) for i in range(capacity))
        self.counts: dict[Page, int] = dict.fromkeys(Page, 0)
        self.counts[Page.FREE] = capacity

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self, count: int, state: Page, owner: Owner) -> tuple[PageId, ...]:
        """`count` free pages, now in `state`. The caller has checked that they are there (all or none)."""
        assert 0 < count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        taken = []
        free = iter(self._free)
        for _ in range(count):
            taken.append(next(free))
        for page in taken:
            del self._free[page]
            self._state[page] = state
            self._owner[page] = owner
        self.counts[Page.FREE] -= count
        self.counts[state] += count
        return tuple(taken)

    def shift(self, pages: Sequence[PageId], owner: Owner, come_from: Page, to: Page) -> None:
        """Pages of `owner` move from one state to another."""
        assert to is not Page.FREE
        for page in pages:
            self._check(page, owner, come_from)
            self._state[page] = to
        self.counts[come_from] -= len(pages)
        self.counts[to] += len(pages)

    def free(self, pages: Iterable[PageId], owner: Owner) -> None:
        """Pages of `owner`, whatever their state, are free. Only with a proof in hand (PROTOCOL: what frees a page)."""
        for page in pages:
            state = self._state[page]
            assert state is not Page.FREE, self._say(page, owner)
            assert self._owner[page] == owner, self._say(page, owner)
            self.counts[state] -= 1
            self.counts[Page.FREE] += 1
            self._state[page] = Page.FREE
            self._owner[page] = NOBODY
            self._free[page] = None

    def state_of(self, page: PageId) -> Page:
        return self._state[page]

    def owner_of(self, page: PageId) -> Owner:
        return self._owner[page]

    def holders(self) -> dict[Owner, dict[str, int]]:
        """Pages by owner and state, for whoever asks who holds what."""
        held: dict[Owner, dict[str, int]] = {}
        for state, owner in zip(self._state, self._owner, strict=True):
            if state is not Page.FREE:
                of = held.setdefault(owner, {})
                of[state.name.lower()] = of.get(state.name.lower(), 0) + 1
        return held

    def audit(self) -> list[str]:
        """Every fault found, each naming its holder; empty is the only good answer."""
        faults = []
        recount = dict.fromkeys(Page, 0)
        for page, (state, owner) in enumerate(zip(self._state, self._owner, strict=True)):
            recount[state] += 1
            if (state is Page.FREE) != (owner == NOBODY):
                faults.append(f"page {page} is {state.name.lower()} and owned by {owner or 'nobody'}")
            if (state is Page.FREE) != (PageId(page) in self._free):
                faults.append(f"page {page} is {state.name.lower()} and disagrees with the free list")
        faults += [
            f"{state.name.lower()} pages: counted {self.counts[state]}, found {found}"
            for state, found in recount.items()
            if found != self.counts[state]
        ]
        if sum(self.counts.values()) != self.capacity:
            faults.append(f"{sum(self.counts.values())} pages accounted for, capacity is {self.capacity}")
        return faults

    def _check(self, page: PageId, owner: Owner, state: Page) -> None:
        assert (self._state[page], self._owner[page]) == (state, owner), self._say(page, owner)

    def _say(self, page: PageId, owner: Owner) -> str:
        return f"page {page} is {self._state[page].name.lower()} of {self._owner[page]!r}, not {owner!r}'s to move"
