"""Which page may be written by whom, now: the check that every receiver-placed byte passes (the fence).

A frame of pages is claimed once (grant, peer, pages), then every single read into these pages is done between
`enter` and `leave`. Revoke sets the flag under the same lock: whoever entered before is counted in `landing`, whoever
comes after is turned away. So "revoked and landing == 0" proves that nothing can land under the grant, and needs
nothing of the peer (O4). Thread-safe: the control thread arms and revokes, the transport's thread lands.

Callbacks run outside the lock. A LandedCallback may come after the `revoke` that it raced with; bytes may not.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from pdplane.core.ids import GrantNo, Instance, PageId

from .contract import LandedCallback, QuietCallback


class Verdict(enum.IntEnum):
    """What became of a frame of pages. The numbers are the ack's on the wire: never reuse one."""

    LANDED = 0
    REVOKED = 1
    UNKNOWN_GRANT = 2
    WRONG_PEER = 3
    NOT_GRANTED = 4
    REPEATED = 5
    CUT = 6

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class _Entry:
    """One armed grant. `claimed` pages are being written by a frame that has begun; `landed` ones are complete."""

    __slots__ = ("claimed", "cut", "grant", "landed", "landing", "pages", "peer", "revoked")

    def __init__(self, grant: GrantNo, peer: Instance, pages: frozenset[PageId]) -> None:
        self.grant = grant
        self.peer = peer
        self.pages = pages
        self.claimed: set[PageId] = set()
        self.landed: set[PageId] = set()
        self.landing = 0
        self.revoked = False
        self.cut = False

    def refusal(self, peer: Instance, pages: Sequence[PageId]) -> Verdict | None:
        if self.revoked:
            return Verdict.REVOKED
        if peer != self.peer:
            return Verdict.WRONG_PEER
        if self.cut:
            return Verdict.CUT
        if not self.pages.issuperset(pages):
            return Verdict.NOT_GRANTED
        if len(set(pages)) != len(pages) or not self.landed.isdisjoint(pages) or not self.claimed.isdisjoint(pages):
            return Verdict.REPEATED
        return None


class Claim:
    """The right of one frame to write its pages, for as long as `enter` says so."""

    __slots__ = ("_entry", "pages")

    def __init__(self, entry: _Entry, pages: Sequence[PageId]) -> None:
        self._entry = entry
        self.pages = pages


class LandingTable:
    """The armed grants of one pool. `discarded` counts refused frames by verdict."""

    def __init__(self, pages: int, on_landed: LandedCallback, on_quiet: QuietCallback) -> None:
        self._pool_pages = pages
        self._on_landed = on_landed
        self._on_quiet = on_quiet
        self._lock = threading.Lock()
        self._entries: dict[GrantNo, _Entry] = {}
        self.discarded: Counter[Verdict] = Counter()

    # --- the control thread's half (see contract.Landing) ---

    def arm(self, grant: GrantNo, peer: Instance, pages: Iterable[PageId]) -> None:
        """IndexError for a page outside the pool, ValueError for a grant number used twice."""
        granted = frozenset(pages)
        for page in granted:
            if not 0 <= page < self._pool_pages:
                raise IndexError(f"grant {grant}: page {page} is outside the pool of {self._pool_pages} pages")
        with self._lock:
            if grant in self._entries:
                raise ValueError(f"grant {grant} is armed already: grant numbers are never reused")
            self._entries[grant] = _Entry(grant, peer, granted)

    def revoke(self, grant: GrantNo) -> bool:
        with self._lock:
            entry = self._entries.get(grant)
            if entry is None:
                return True
            entry.revoked = True
            return entry.landing == 0

    def disarm(self, grant: GrantNo) -> None:
        with self._lock:
            entry = self._entries.pop(grant, None)
            if entry is not None:
                entry.revoked = True

    def knows(self, grant: GrantNo) -> bool:
        """Armed and not disarmed yet, revoked or not."""
        with self._lock:
            return grant in self._entries

    def cut(self, peer: Instance) -> None:
        """Nothing more lands under the grants that `peer` holds now; grants armed later are not touched."""
        with self._lock:
            for entry in self._entries.values():
                if entry.peer == peer:
                    entry.cut = True

    # --- the transport's half ---

    def claim(self, grant: GrantNo, peer: Instance, pages: Sequence[PageId]) -> Claim | Verdict:
        """A frame begins: all of its pages are claimed, or it goes to scratch whole, with the reason."""
        with self._lock:
            entry = self._entries.get(grant)
            refusal = Verdict.UNKNOWN_GRANT if entry is None else entry.refusal(peer, pages)
            if entry is None or refusal is not None:
                self.discarded[refusal or Verdict.UNKNOWN_GRANT] += 1
                return refusal or Verdict.UNKNOWN_GRANT
            entry.claimed.update(pages)
            return Claim(entry, pages)

    def enter(self, claim: Claim) -> bool:
        """May the next read go into the pages? True must be paired with `leave` or `finish`, soon."""
        with self._lock:
            entry = claim._entry
            if entry.revoked or entry.cut:
                return False
            entry.landing += 1
            return True

    def leave(self, claim: Claim) -> None:
        with self._lock:
            quiet = self._left(claim._entry)
        if quiet:
            self._on_quiet(claim._entry.grant)

    def finish(self, claim: Claim) -> Verdict:
        """Instead of `leave` after the last byte: the pages have landed, unless the grant ended meanwhile."""
        entry = claim._entry
        with self._lock:
            verdict = self._ended(entry)
            entry.claimed.difference_update(claim.pages)
            if verdict is Verdict.LANDED:
                entry.landed.update(claim.pages)
            quiet = self._left(entry)
        try:
            if verdict is Verdict.LANDED and claim.pages:
                self._on_landed(entry.grant, claim.pages)
        finally:
            if quiet:
                self._on_quiet(entry.grant)
        return verdict

    def abandon(self, claim: Claim) -> Verdict:
        """The frame ends without its pages, outside `enter`: they may be sent again if the grant still stands."""
        with self._lock:
            claim._entry.claimed.difference_update(claim.pages)
            return self._ended(claim._entry)

    def _ended(self, entry: _Entry) -> Verdict:
        verdict = Verdict.REVOKED if entry.revoked else Verdict.CUT if entry.cut else Verdict.LANDED
        if verdict is not Verdict.LANDED:
            self.discarded[verdict] += 1
        return verdict

    def _left(self, entry: _Entry) -> bool:
        """True where this was the last reader of a revoked grant, whose owner was told "later"."""
        entry.landing -= 1
        assert entry.landing >= 0
        return entry.revoked and entry.landing == 0
