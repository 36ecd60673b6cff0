"""May these pages be taken now? Only where everybody who holds pages could still be served to the end, in some order.

All-or-nothing admission plus growth deadlocks when two requests each wait for the other's pages (I13). Each holder
declares the most it can ever need; a take is safe where, holders finishing one after the other, each one's remaining
need fits in what is free by then. That is the banker's rule for one resource: such an order exists exactly when the
order by remaining need works.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .pages import Ledger, Owner


class Claim(msgspec.Struct):
    """What one request holds and the most it may come to hold, in pages."""

    held: int
    most: int

    @property
    def remaining(self) -> int:
        return self.most - self.held


def safe(free: int, claims: Iterable[Claim]) -> bool:
    """True where all claims can be met in some order, given `free` pages now. Draining and quarantined pages are not
    free: nobody can say when they return."""
    for claim in sorted(claims, key=lambda c: c.remaining):
        if claim.remaining > free:
            return False
        free += claim.held
    return True


class Reserve:
    """The claims on one pool."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._claims: dict[Owner, Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def may_admit(self, pages: int, most: int) -> bool:
        """May a newcomer take `pages` now and grow to `most`?"""
        free = self._ledger.free_count
        return pages <= free and safe(free - pages, [*self._claims.values(), Claim(pages, most)])

    def admit(self, owner: Owner, pages: int, most: int) -> None:
        assert owner not in self._claims
        assert pages <= most
        self._claims[owner] = Claim(pages, most)

    def may_grow(self, owner: Owner) -> bool:
        """May this holder take one page more?"""
        free = self._ledger.free_count
        if free == 0:
            return False
        mine = self._claims[owner]
        others = [claim for who, claim in self._claims.items() if who != owner]
        return mine.remaining > 0 and safe(free - 1, [*others, Claim(mine.held + 1, mine.most)])

    def grown(self, owner: Owner) -> None:
        self._claims[owner].held += 1

    def drop(self, owner: Owner) -> None:
        """The request will not grow any more; what it still holds comes back when it comes back."""
        self._claims.pop(owner, None)
