"""Prefill's pages for prompts: what one shares with earlier ones, what it needs of its own, and what is kept of it.

A prompt's pages are a shared prefix, held in the cache and only read, and own pages behind it. Its last token is always
computed, for its logits, so a page that ends with it is not shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .events import LegArrived
from .ids import PageId
from .layout import pages_for
from .node import Limits
from .pages import Ledger, Owner, Page
from .prefix import PrefixCache
from .sender import Sender


class Taken(NamedTuple):
    """All pages of a prompt, in order; the first `shared` are the cache's."""

    pages: tuple[PageId, ...]
    shared: int

    @property
    def own(self) -> int:
        return len(self.pages) - self.shared


class PromptPages:
    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self._ledger, self._limits = ledger, limits
        self._cache = PrefixCache(ledger)
        self._returned = 0  # times that a prompt has given its pages back

    @property
    def stamp(self) -> tuple[int, int]:
        """What did not fit does not fit while this is the same."""
        return self._cache.available, self._returned

    def own_need(self, leg: LegArrived) -> int:
        """Pages that are not shared."""
        return self._need(leg) - len(self._hits(leg))

    def fits(self, leg: LegArrived) -> bool:
        need = self._need(leg)
        if need <= self._ledger.free_count:
            return True  # without a look into the cache, which takes its time for a long prompt
        hits = self._hits(leg)
        self._cache.hold(hits)  # what it shares cannot be evicted for it
        fits = need - len(hits) <= self._cache.available
        self._cache.release(hits)
        return fits

    def take(self, leg: LegArrived) -> Taken:
        """The caller has asked `fits`."""
        hits = self._hits(leg)
        self._cache.hold(hits)
        own = self._cache.take(self._need(leg) - len(hits), Page.COMPUTING, Owner(leg.rid))
        return Taken(hits + own, len(hits))

    def keep(self, sender: Sender, state: Page) -> None:
        """Only a prompt that was computed whole comes here: nothing of an aborted one is ever shared (O3)."""
        assert sender.leg is not None
        owner, own = Owner(sender.leg.rid), sender.own
        keys = sender.leg.page_keys if self._limits.prefix_cache else ()
        full = max(0, len(keys) - sender.shared)
        if keys:
            self._cache.keep(keys, own[:full], owner, state)
        self._ledger.free(own[full:], owner)

    def release(self, sender: Sender) -> None:
        """It reads the shared pages no more."""
        self._returned += 1
        self._cache.release(sender.pages[: sender.shared])

    def audit(self, senders: Iterable[Sender]) -> list[str]:
        return self._cache.audit(_readers(senders))

    def audit_all(self, senders: Iterable[Sender]) -> list[str]:
        return self._cache.audit_all(_readers(senders))

    def _need(self, leg: LegArrived) -> int:
        return pages_for(leg.prompt.tokens, self._limits.page_size)

    def _hits(self, leg: LegArrived) -> tuple[PageId, ...]:
        most = (leg.prompt.tokens - 1) // self._limits.page_size
        return self._cache.match(leg.page_keys[:most]) if self._limits.prefix_cache else ()


def _readers(senders: Iterable[Sender]) -> Counter[PageId]:
    """How many rooms read each shared page."""
    return Counter(page for sender in senders for page in sender.pages[: sender.shared])
