"""The prefix cache of one pool: full pages of earlier prompts, by what they hold, kept while there is room.

A page enters only from a prefill that succeeded, or at decode from a hand-off that was complete. Its bytes are then
complete, and nothing still writes them: a page of an aborted one may be half written, and would be wrong text for
everybody who shares it later.

A page's key stands for all tokens up to its end and not for its own alone: the KV of a token depends on every token
before it. So keys are chained, and equal keys mean equal prefixes. A cached page's parent is the page before it, and is
cached as long as the page is: without it nobody could reach the page, since a prefix is matched from its start. Hence
the cache is a forest, and eviction takes leaves before their parents.

Whoever shares pages holds a prefix of them, from the start: a parent has at least as many references as any child. So
what lies below an unreferenced page is unreferenced too, and whatever nobody holds can be evicted. The least recently
used goes first; a use of a page is one of all its parents, and moves them behind it in the order. Therefore the first
of the order never has a child, and to evict takes no search.

The ledger knows cached pages as the cache's own: one owner each, however many share them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from .ids import PageId
from .pages import CACHE, Ledger, Owner, Page


class Cached(msgspec.Struct):
    """One page of the forest. `refs`: how many requests read it now; `children`: how many cached pages follow it."""

    page: PageId
    key: bytes
    parent: PageId | None
    refs: int = 0
    children: int = 0


class PrefixCache:
    """Opaque keys, one for each full page of a prompt, in order; equal keys mean that all up to there is equal."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._by_key: dict[bytes, Cached] = {}
        self._by_page: dict[PageId, Cached] = {}
        self._idle: OrderedDict[PageId, None] = OrderedDict()  # unreferenced, least recently used first

    def __len__(self) -> int:
        """Cached pages."""
        return len(self._by_page)

    @property
    def evictable(self) -> int:
        return len(self._idle)

    @property
    def available(self) -> int:
        """How many pages `take` can give."""
        return self._ledger.free_count + len(self._idle)

    def match(self, keys: Sequence[bytes]) -> tuple[PageId, ...]:
        """The pages of the longest run of `keys`, from the first on, that is cached; they count as used now.

        They stay only while held: hold them before anything is taken."""
        run = []
        for key in keys:
            if (cached := self._by_key.get(key)) is None:
                break
            run.append(cached.page)
        for page in reversed(run):
            if page in self._idle:
                self._idle.move_to_end(page)
        return tuple(run)

    def hold(self, pages: Sequence[PageId]) -> None:
        """One more reference to each page of a run that `match` gave, or of its beginning."""
        parent = None
        for page in pages:
            cached = self._by_page[page]
            assert cached.parent == parent, f"page {page} follows {cached.parent}, not {parent}: a prefix is held whole"
            cached.refs += 1
            self._idle.pop(page, None)
            parent = page

    def release(self, pages: Sequence[PageId]) -> None:
        """What was held, as it was held."""
        forgotten = []
        for page in reversed(pages):
            cached = self._by_page[page]
            assert cached.refs > 0, f"page {page} is not held"
            cached.refs -= 1
            if cached.refs:
                continue
            self._idle[page] = None
            if self._by_key.get(cached.key) is not cached:
                forgotten.append(page)
        self._drop(forgotten)

    def take(self, count: int, state: Page, owner: Owner) -> tuple[PageId, ...]:
        """`count` pages, now in `state`; evicts no more than are missing. The caller has asked `available`."""
        assert count <= self.available, f"{count} pages wanted, {self.available} free or evictable"
        if not count:  # everything is shared
            return ()
        self._drop(tuple(islice(self._idle, max(0, count - self._ledger.free_count))))
        return self._ledger.take(count, state, owner)

    def keep(self, keys: Sequence[bytes], pages: Sequence[PageId], owner: Owner, state: Page) -> int:
        """A prompt's KV is complete and nothing reads or writes its own pages any more: they are cached.

        `keys` are those of all full pages of the prompt; `pages` the full ones of `owner`, in `state`, which are the
        last of these: pages[i] has keys[len(keys) - len(pages) + i]. What comes before was shared with the cache, and
        is held. A page whose key is cached goes free (another request was first), and so do all, where the cache has
        been cleared and what came before is not known any more. Returns how many are cached now, with no references.
        """
        first = len(keys) - len(pages)
        assert first >= 0, f"{len(pages)} pages for {len(keys)} keys"
        known = self.match(keys)
        new = pages[len(known) - first :] if len(known) >= first else ()
        self._ledger.free(pages[: len(pages) - len(new)], owner)
        if new:
            self._ledger.hand_over(new, owner, state, CACHE, Page.CACHED)
            self._grow(known, keys[len(known) :], new)
        return len(new)

    def unread_without(self, readers: Mapping[PageId, int]) -> int:
        """How many cached pages would have no references if each of these had so many fewer."""
        return sum(self._refs(page) == count for page, count in readers.items())

    def clear(self) -> int:
        """Forget every prefix. What nobody holds goes free now, the rest when released; returns how many went now."""
        idle = tuple(self._idle)
        self._drop(idle)
        self._by_key.clear()
        return len(idle)

    def audit(self, holders: Mapping[PageId, int]) -> list[str]:
        """Faults against `holders`: how many requests say that they hold a page. Costs what these are."""
        faults = [
            f"page {page}: {count} requests hold it, the prefix cache counts {self._refs(page)}"
            for page, count in holders.items()
            if self._refs(page) != count
        ]
        held = len(self._by_page) - len(self._idle)
        if held != len(holders):
            faults.append(f"the prefix cache counts {held} pages as held, requests hold {len(holders)}")
        if len(self._by_page) != self._ledger.counts[Page.CACHED]:
            counted = self._ledger.counts[Page.CACHED]
            faults.append(f"the prefix cache has {len(self._by_page)} pages, the ledger counts {counted} cached")
        return faults

    def audit_all(self, holders: Mapping[PageId, int]) -> list[str]:
        """The same with every cached page walked, for tests and the simulator."""
        faults = self.audit(holders)
        place = {page: number for number, page in enumerate(self._idle)}
        children = dict.fromkeys(self._by_page, 0)
        for page, cached in self._by_page.items():
            who = (self._ledger.state_of(page), self._ledger.owner_of(page))
            if who != (Page.CACHED, CACHE):
                faults.append(f"page {page} is in the prefix cache and {who[0].name.lower()} of {who[1]!r}")
            if (cached.refs == 0) != (page in place):
                faults.append(f"page {page} has {cached.refs} references and disagrees with the order of eviction")
            if cached.parent is None:
                continue
            if cached.parent not in children:
                faults.append(f"page {page} follows page {cached.parent}, which is not cached any more")
                continue
            children[cached.parent] += 1
            if cached.refs > self._refs(cached.parent) or place.get(page, -1) > place.get(cached.parent, len(place)):
                faults.append(f"page {page} outlives page {cached.parent}, which it follows")
        return faults + [
            f"page {page} has {count} cached pages that follow it, counted {self._by_page[page].children}"
            for page, count in children.items()
            if count != self._by_page[page].children
        ]

    def _refs(self, page: PageId) -> int:
        cached = self._by_page.get(page)
        return cached.refs if cached else 0

    def _grow(self, known: Sequence[PageId], keys: Sequence[bytes], pages: Sequence[PageId]) -> None:
        """A run of new pages below the known ones."""
        parent = known[-1] if known else None
        for key, page in zip(keys, pages, strict=True):
            self._by_key[key] = self._by_page[page] = Cached(page, key, parent)
            if parent is not None:
                self._by_page[parent].children += 1
            parent = page
        for page in reversed(pages):
            self._idle[page] = None
        for page in reversed(known):  # behind what follows them
            if page in self._idle:
                self._idle.move_to_end(page)

    def _drop(self, pages: Sequence[PageId]) -> None:
        """Unreferenced pages go free, each after those that follow it."""
        for page in pages:
            cached = self._by_page.pop(page)
            assert cached.refs == cached.children == 0, f"page {page} is evicted before what follows it"
            del self._idle[page]
            if self._by_key.get(cached.key) is cached:
                del self._by_key[cached.key]
            if cached.parent is not None:
                self._by_page[cached.parent].children -= 1
        self._ledger.free(pages, CACHE)
