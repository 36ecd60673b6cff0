"""May a prompt be let into the pool now? Optimistic: how long answers get is not known, so only a part of what requests
may come to need is kept free, and where that was too little somebody is laid aside (core/retract.py).

A *claim* is a request that holds pages and will go on: granted, filled, or running. A newcomer is let in where its
pages fit beside what is kept free for growth: of every claim, its own too, the smaller of `limits.reserve_tokens` and
all that it may still need; of one that runs never less than the page that one step can take. So at every admission

    granted + filled + active + the largest growth of one step of what runs <= capacity.

A request that finds no claim at all is let in wherever its pages fit: there is nobody whom its growth could harm.
Pages that several share count once in this, and cached ones that nobody reads not at all.
"""

from __future__ import annotations

import msgspec

from .layout import pages_for
from .node import Limits
from .pages import Owner
from .prompt_pages import Prompt, PromptPages


class Claim(msgspec.Struct):
    """What one request holds, shared pages too, and the most it may come to hold, in pages; whether it is in the batch,
    or waits for its place there."""

    held: int
    most: int
    running: bool = False
    complete: bool = False

    def kept(self, reserve: int) -> int:
        """Pages to be kept free for its growth."""
        return min(self.most - self.held, max(reserve, 1 if self.running else 0))


class Reserve:
    """The claims on one pool."""

    def __init__(self, pages: PromptPages, limits: Limits) -> None:
        self._pages = pages
        self._each = pages_for(limits.reserve_tokens, limits.page_size)
        self._claims: dict[Owner, Claim] = {}
        self._kept = 0
        self._changes = 0

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def kept(self) -> int:
        """Pages kept free for the growth of all claims; running ones may take them."""
        return self._kept

    @property
    def stamp(self) -> tuple[int, int, int]:
        """What was refused stays refused while this is the same."""
        return (*self._pages.stamp, self._changes)

    @property
    def coming(self) -> bool:
        """Does anybody hold pages who has not come to the batch yet?"""
        return any(not claim.running for claim in self._claims.values())

    @property
    def complete(self) -> bool:
        """Does anybody wait for a place in the batch, and for nothing else?"""
        return any(claim.complete for claim in self._claims.values())

    def may_admit(self, prompt: Prompt, most: int, *, running: bool = False) -> bool:
        """May this newcomer take its pages now, of `most` at the end? `running`: it gets its place in the batch at
        once."""
        return self._pages.fits(prompt, self._beside(self._pages.need(prompt), most, running))

    def may_return(self, pages: int, most: int) -> bool:
        """May one that was laid aside take `pages` of its own, and its place?"""
        return pages + self._beside(pages, most, True) <= self._pages.available

    def _beside(self, pages: int, most: int, running: bool) -> int:
        """What must be left when a newcomer has taken its pages."""
        return self._kept + Claim(pages, most, running).kept(self._each) if self._claims else 0

    def admit(self, owner: Owner, pages: int, most: int, *, running: bool = False) -> None:
        assert owner not in self._claims
        assert pages <= most
        self._put(owner, Claim(pages, most, running))

    def completed(self, owner: Owner) -> None:
        """Nothing holds it up any more but the want of a place."""
        claim = self._take(owner)
        self._put(owner, Claim(claim.held, claim.most, complete=True))

    def run(self, owner: Owner) -> None:
        claim = self._take(owner)
        self._put(owner, Claim(claim.held, claim.most, running=True))

    def grown(self, owner: Owner) -> None:
        claim = self._take(owner)
        assert claim.held < claim.most
        self._put(owner, Claim(claim.held + 1, claim.most, claim.running))

    def drop(self, owner: Owner) -> None:
        """The request will not grow any more; what it still holds comes back when it comes back."""
        if owner in self._claims:
            self._take(owner)

    def _put(self, owner: Owner, claim: Claim) -> None:
        self._claims[owner] = claim
        self._kept += claim.kept(self._each)
        self._changes += 1

    def _take(self, owner: Owner) -> Claim:
        claim = self._claims.pop(owner)
        self._kept -= claim.kept(self._each)
        self._changes += 1
        return claim
