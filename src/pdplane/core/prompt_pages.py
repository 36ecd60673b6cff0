"""The pages of prompts in one pool: what a prompt shares with earlier ones, what it needs of its own, and what is kept
of it. Either side of a hand-off has one.

A prompt's pages are a shared head, held in the cache and only read, and own pages behind it. How much of it may be
shared is the caller's to say: where the last token is computed here, for its logits, a page that ends with it is not;
where it comes computed, all full pages may be, and there may be no own page at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from .ids import PageId
from .layout import pages_for
from .node import Limits
from .pages import Ledger, Owner, Page
from .prefix import PrefixCache


class Prompt(msgspec.Struct, frozen=True):
    """What pages a prompt asks for. page_keys: one per full page, each over all tokens up to that page's end; () where
    nothing of it is shared or kept. most_shared: how many pages of its head may be shared at most."""

    tokens: int
    page_keys: tuple[bytes, ...] = ()
    most_shared: int = 0


class Taken(NamedTuple):
    """All pages of a prompt, in order; the first `shared` are the cache's."""

    pages: tuple[PageId, ...]
    shared: int

    @property
    def own(self) -> int:
        return len(self.pages) - self.shared


class PromptPages:
    """One ledger's prefix cache, and all taking of pages, so that what nobody reads gives way for whoever needs a page.
    With `limits.prefix_cache` off, or for prompts without keys, it is the ledger alone."""

    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self._ledger, self._limits = ledger, limits
        self._cache = PrefixCache(ledger)
        self._returned = 0  # times that a prompt has given its pages back

    @property
    def available(self) -> int:
        """Pages that can be taken now: free ones, and cached ones that nobody reads."""
        return self._cache.available

    @property
    def stamp(self) -> tuple[int, int]:
        """What did not fit does not fit while this is the same."""
        return self._cache.available, self._returned

    def need(self, prompt: Prompt) -> int:
        """All its pages, shared or not."""
        return pages_for(prompt.tokens, self._limits.page_size)

    def hits(self, prompt: Prompt) -> int:
        """How many of its pages would be shared now."""
        return len(self._hits(prompt))

    def fits(self, prompt: Prompt, spare: int = 0) -> bool:
        """Could it have its own pages now, all of them, and `spare` more be left?"""
        need = self.need(prompt) + spare
        if need <= self._ledger.free_count:
            return True  # without a look into the cache, which takes its time for a long prompt
        hits = self._hits(prompt)
        self._cache.hold(hits)  # what it shares cannot be evicted for it
        fits = need - len(hits) <= self._cache.available
        self._cache.release(hits)
        return fits

    def take(self, prompt: Prompt, state: Page, owner: Owner) -> Taken:
        """Its shared pages, held from now on, and its own, in `state`. The caller has asked `fits`."""
        hits = self._hits(prompt)
        self._cache.hold(hits)
        own = self._cache.take(self.need(prompt) - len(hits), state, owner)
        return Taken(hits + own, len(hits))

    def take_more(self, count: int, state: Page, owner: Owner) -> tuple[PageId, ...]:
        """`count` pages of its own, for growth. The caller has asked `available`."""
        return self._cache.take(count, state, owner)

    def keep(self, prompt: Prompt, pages: Sequence[PageId], shared: int, owner: Owner, state: Page) -> None:
        """`owner` is done with `pages`, those of the prompt and any behind them, of which the first `shared` are the
        cache's already: the prompt's full own ones, all in `state`, are cached, the others are free. What it shared is
        held until `release`, which comes after this.

        Only what is known to hold the whole prompt comes here: nothing of an aborted one is ever shared (O3)."""
        keys = prompt.page_keys if self._limits.prefix_cache else ()
        own, full = tuple(pages[shared:]), max(0, len(keys) - shared)
        assert len(keys) <= max(len(pages), shared), f"{len(pages)} pages for {len(keys)} keys"
        if keys:
            self._cache.keep(keys, own[:full], owner, state)
        self._ledger.free(own[full:], owner)
        self._returned += 1

    def release(self, shared: Sequence[PageId]) -> None:
        """The pages that one prompt shared are not read by it any more."""
        self._returned += 1
        self._cache.release(shared)

    def freed_by(self, runs: Iterable[Sequence[PageId]]) -> int:
        """How many pages nobody would read any more if these shared runs were released."""
        return self._cache.unread_without(_readers(runs))

    def audit(self, runs: Iterable[Sequence[PageId]]) -> list[str]:
        """Faults against `runs`: the shared pages of each prompt that holds some."""
        return self._cache.audit(_readers(runs))

    def audit_all(self, runs: Iterable[Sequence[PageId]]) -> list[str]:
        """The same with every cached page walked."""
        return self._cache.audit_all(_readers(runs))

    def _hits(self, prompt: Prompt) -> tuple[PageId, ...]:
        return self._cache.match(prompt.page_keys[: prompt.most_shared]) if self._limits.prefix_cache else ()


def _readers(runs: Iterable[Sequence[PageId]]) -> Counter[PageId]:
    """How many prompts read each shared page."""
    return Counter(page for run in runs for page in run)
