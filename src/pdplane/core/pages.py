"""The ledger of one pool: every page has one state and one owner, and the sum over states is the capacity.

Pages leave a request only through `free` and `hand_over`, and only the machines that hold a proof call them (rule 3). A
transition names the state it comes from; a page that is not there is a fault of ours, and asserts. A transition that
asserts has changed nothing.

What a transition costs goes by the pages it moves, never by the pool. So does what others ask all day: `counts` and
`holders` are kept, not gathered. The audit is what checks that they were kept right, and the one place that walks
pages: all of a small pool at once, a large one a slice at a time, since it runs on the control thread (rule 6).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from enum import IntEnum
from itertools import islice
from typing import NewType

from .ids import GrantNo, PageId

Owner = NewType("Owner", str)
"""Who a page belongs to: ``grant <no>`` at decode, ``cache`` for the prefix cache, the rid elsewhere."""

NOBODY = Owner("")
CACHE = Owner("cache")


def grant_owner(grant: GrantNo) -> Owner:
    """Under which name decode's ledger knows the pages of a grant."""
    return Owner(f"grant {grant}")


def grant_of(owner: Owner) -> GrantNo | None:
    """The grant whose pages these are; None where they are no grant's."""
    kind, _, number = owner.partition(" ")
    return GrantNo(int(number)) if kind == "grant" else None


SLICE = 2048  # pages walked in one audit, and the pool up to which an audit is complete


class Page(IntEnum):
    """Where a page is in its life. Decode: granted, filled, active, spilling. Prefill: computing, held (computed, waits
    for a grant), sending, cached (its references are the prefix cache's). Both: the rest."""

    FREE = 0
    GRANTED = 1
    FILLED = 2
    ACTIVE = 3
    COMPUTING = 4
    SENDING = 5
    DRAINING = 6
    QUARANTINED = 7
    HELD = 8
    CACHED = 9
    SPILLING = 10


_STATES = tuple(Page)
_NAMES = tuple(state.name.lower() for state in Page)


class Ledger:
    """Who owns which page. Free pages are handed out oldest first, so that a stale write has the longest way."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._state = bytearray(capacity)
        self._owner = [NOBODY] * capacity
        self._free: OrderedDict[PageId, None] = OrderedDict.fromkeys(PageId(i) for i in range(capacity))
        self._held: dict[Owner, dict[Page, int]] = {}
        self.counts: dict[Page, int] = dict.fromkeys(Page, 0)
        self.counts[Page.FREE] = capacity
        self._walk = self._steps()
        self._found: dict[str, list[str]] = {}  # by step of the walk, until it is done again

    @property
    def free_count(self) -> int:
        return len(self._free)

    # --- transitions ----------------------------------------------------------------------------------------------

    def take(self, count: int, state: Page, owner: Owner) -> tuple[PageId, ...]:
        """`count` free pages, now in `state`. The caller has checked that they are there (all or none)."""
        assert 0 < count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        assert state is not Page.FREE
        assert owner != NOBODY
        taken = tuple(islice(self._free, count))
        for page in taken:
            del self._free[page]
            self._state[page] = state
            self._owner[page] = owner
        self._recount(NOBODY, Page.FREE, -count)
        self._recount(owner, state, count)
        return taken

    def shift(self, pages: Collection[PageId], owner: Owner, come_from: Page, to: Page) -> None:
        """Pages of `owner` move from one state to another."""
        assert to is not Page.FREE
        self._check(pages, owner, come_from)
        for page in pages:
            self._state[page] = to
        self._recount(owner, come_from, -len(pages))
        self._recount(owner, to, len(pages))

    def hand_over(self, pages: Collection[PageId], owner: Owner, come_from: Page, heir: Owner, to: Page) -> None:
        """Pages of `owner` become `heir`'s, in state `to`."""
        assert heir != NOBODY
        self.shift(pages, owner, come_from, to)
        for page in pages:
            self._owner[page] = heir
        self._tally(owner, to, -len(pages))
        self._tally(heir, to, len(pages))

    def free(self, pages: Iterable[PageId], owner: Owner) -> None:
        """Pages of `owner`, whatever their state, are free. Only with a proof in hand (PROTOCOL: what frees a page)."""
        pages = tuple(pages)
        self._check(pages, owner)
        come_from = [0] * len(Page)
        for page in pages:
            come_from[self._state[page]] += 1
            self._state[page] = Page.FREE
            self._owner[page] = NOBODY
            self._free[page] = None
        for state, count in zip(_STATES, come_from, strict=True):
            self._recount(owner, state, -count)
        self._recount(NOBODY, Page.FREE, len(pages))

    def _check(self, pages: Collection[PageId], owner: Owner, state: Page | None = None) -> None:
        """All of them are `owner`'s, in `state` where one is named, and none is there twice."""
        assert len(set(pages)) == len(pages), f"a page is named twice in {pages}"
        for page in pages:
            assert self._owner[page] == owner != NOBODY, self._say(page, owner)
            assert state is None or self._state[page] == state, self._say(page, owner)

    def _say(self, page: PageId, owner: Owner) -> str:
        return f"page {page} is {self.state_of(page).name.lower()} of {self._owner[page]!r}, not {owner!r}'s to move"

    def _recount(self, owner: Owner, state: Page, change: int) -> None:
        self.counts[state] += change
        if owner != NOBODY:
            self._tally(owner, state, change)

    def _tally(self, owner: Owner, state: Page, change: int) -> None:
        """Owners and states with no pages are not kept: rids come and go without end."""
        if not change:
            return
        held = self._held.setdefault(owner, {})
        held[state] = held.get(state, 0) + change
        if not held[state]:
            del held[state]
            if not held:
                del self._held[owner]

    # --- questions ------------------------------------------------------------------------------------------------

    def state_of(self, page: PageId) -> Page:
        return _STATES[self._state[page]]

    def owner_of(self, page: PageId) -> Owner:
        return self._owner[page]

    def held_by(self, owner: Owner) -> dict[str, int]:
        """This owner's pages by state."""
        return {_NAMES[state]: count for state, count in self._held.get(owner, {}).items()}

    def holders(self) -> dict[Owner, dict[str, int]]:
        """Pages by owner and state, for whoever asks who holds what."""
        return {owner: self.held_by(owner) for owner in self._held}

    # --- audit ----------------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """Every fault known, each naming its holder; empty is the only good answer.

        Sums are checked each time. The pages of a pool over SLICE are walked a step at a time, where the last audit
        left; what a step found stays known until that step is done again.
        """
        if self.capacity <= SLICE:
            return self.audit_all()
        name, faults = next(self._walk)
        self._found.pop(name, None)
        if faults:
            self._found[name] = faults
        return [fault for found in self._found.values() for fault in found] + self._sums()

    def audit_all(self) -> list[str]:
        """The same with every page walked now: for tests, the simulator and small pools."""
        found = [self._walked(0, self.capacity), *(self._recounted(state) for state in Page), self._tallied()]
        return [fault for faults in found for fault in faults] + self._sums()

    def _steps(self) -> Iterator[tuple[str, list[str]]]:
        """The walk: for ever, one bounded step after another."""
        while True:
            for state in Page:
                yield f"counts {state.name}", self._recounted(state)
            for start in range(0, self.capacity, SLICE):
                yield f"pages {start}", self._walked(start, min(start + SLICE, self.capacity))
            yield "owners", self._tallied()

    def _sums(self) -> list[str]:
        faults = []
        if sum(self.counts.values()) != self.capacity:
            faults.append(f"{sum(self.counts.values())} pages accounted for, capacity is {self.capacity}")
        if len(self._free) != self.counts[Page.FREE]:
            faults.append(f"{self.counts[Page.FREE]} pages counted free, {len(self._free)} on the free list")
        return faults

    def _recounted(self, state: Page) -> list[str]:
        found = self._state.count(state)
        if found == self.counts[state]:
            return []
        return [f"{state.name.lower()} pages: counted {self.counts[state]}, found {found}"]

    def _walked(self, start: int, stop: int) -> list[str]:
        """What each page says of itself, against the free list and the owners."""
        odd = []
        free, held = self._free, self._held
        for page, state, owner in zip(
            range(start, stop), self._state[start:stop], self._owner[start:stop], strict=True
        ):
            if state:
                if page in free or owner == NOBODY or state not in held.get(owner, ()):
                    odd.append(PageId(page))
            elif owner != NOBODY or page not in free:
                odd.append(PageId(page))
        return [fault for page in odd for fault in self._odd(page)]

    def _odd(self, page: PageId) -> Iterator[str]:
        state, owner = self.state_of(page), self._owner[page]
        if (state is Page.FREE) != (owner == NOBODY):
            yield f"page {page} is {state.name.lower()} and owned by {owner or 'nobody'}"
        elif state is not Page.FREE and state not in self._held.get(owner, ()):
            yield f"page {page} is {state.name.lower()} of {owner}, which is not known to hold such pages"
        if (state is Page.FREE) != (page in self._free):
            yield f"page {page} is {state.name.lower()} and disagrees with the free list"

    def _tallied(self) -> list[str]:
        """What owners hold, summed, is what the states count."""
        sums = dict.fromkeys(Page, 0)
        for held in self._held.values():
            for state, count in held.items():
                sums[state] += count
        return [
            f"{state.name.lower()} pages: counted {self.counts[state]}, owners hold {held}"
            for state, held in sums.items()
            if state is not Page.FREE and held != self.counts[state]
        ]
