"""May these pages be taken now? Only where everybody who holds pages could still be served to the end, in some order.

All-or-nothing admission plus growth deadlocks when two requests each wait for the other's pages (I13). Each holder
declares the most it can ever need; a take is safe where, holders finishing one after the other, each one's remaining
need fits in what is free by then. That is the banker's rule for one resource: such an order exists exactly when the
order by remaining need works.

Places in the batch are the second resource. A request that waits for one cannot finish before those that hold them,
so what it holds must not be counted on by any of them: in every order, those that run come first.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .pages import Ledger, Owner


class Claim(msgspec.Struct):
    """What one request holds and the most it may come to hold, in pages; whether it has its place in the batch."""

    held: int
    most: int
    running: bool = False

    @property
    def remaining(self) -> int:
        return self.most - self.held


def safe(free: int, claims: Iterable[Claim]) -> bool:
    """True where all claims can be met in some order, those that run before those that wait, given `free` pages now.
    Draining and quarantined pages are not free: nobody can say when they return."""
    for claim in sorted(claims, key=lambda c: (not c.running, c.remaining)):
        if claim.remaining > free:
            return False
        free += claim.held
    return True


class Reserve:
    """The claims on one pool."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._claims: dict[Owner, Claim] = {}
        self._changes = 0

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def stamp(self) -> tuple[int, int]:
        """What was refused stays refused while this is the same."""
        return self._ledger.free_count, self._changes

    def may_admit(self, pages: int, most: int, *, running: bool = False) -> bool:
        """May a newcomer take `pages` now and grow to `most`? `running`: it gets its place in the batch at once."""
        free = self._ledger.free_count
        return pages <= free and safe(free - pages, [*self._claims.values(), Claim(pages, most, running)])

    def admit(self, owner: Owner, pages: int, most: int) -> None:
        assert owner not in self._claims
        assert pages <= most
        self._changes += 1
        self._claims[owner] = Claim(pages, most)

    def may_run(self, owner: Owner) -> bool:
        """May this holder take a place in the batch? There is always one that waits which may, or may once its transfer
        is done: the first in the safe order."""
        mine = self._claims[owner]
        others = [claim for who, claim in self._claims.items() if who != owner]
        return safe(self._ledger.free_count, [*others, Claim(mine.held, mine.most, running=True)])

    def run(self, owner: Owner) -> None:
        self._changes += 1
        self._claims[owner].running = True

    def may_grow(self, owner: Owner) -> bool:
        """May this holder take one page more?"""
        free = self._ledger.free_count
        if free == 0:
            return False
        mine = self._claims[owner]
        others = [claim for who, claim in self._claims.items() if who != owner]
        return mine.remaining > 0 and safe(free - 1, [*others, Claim(mine.held + 1, mine.most, mine.running)])

    def grown(self, owner: Owner) -> None:
        self._changes += 1
        self._claims[owner].held += 1

    def drop(self, owner: Owner) -> None:
        """The request will not grow any more; what it still holds comes back when it comes back."""
        if self._claims.pop(owner, None):
            self._changes += 1
