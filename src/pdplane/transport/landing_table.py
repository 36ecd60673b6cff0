"""Which page may be written by whom, now: the check that every receiver-placed byte passes (the fence).

A grant is armed for each of its peers; each brings its own slice of the same pages. A frame of pages is claimed once
(grant, peer, pages), then every single read into these pages is done between `enter` and `leave`. Revoke sets the flag
under the same lock: whoever entered before is counted in `landing`, whoever comes after is turned away. So "revoked and
landing == 0" proves that nothing can land under the grant, from no peer, and needs nothing of them (O4). Thread-safe:
the control thread arms and revokes, the transport's thread lands.

A grant may have a hundred thousand pages and more, and the control thread waits for nothing: `arm` only packs them, the
transport's thread sorts them, outside the lock, and nothing that is done under the lock goes over them all.

Callbacks run outside the lock. A LandedCallback may come after the `revoke` that it raced with; bytes may not.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pdplane.core.ids import GrantNo, Instance, PageId, Seat
from pdplane.core.slices import Slice

from .contract import LandedCallback, QuietCallback
from .page_numbers import PageNumbers, packed, packed_inside


class Verdict(enum.IntEnum):
    """What became of a frame of pages. The numbers are the ack's on the wire: never reuse one."""

    LANDED = 0
    REVOKED = 1
    UNKNOWN_GRANT = 2
    WRONG_PEER = 3
    NOT_GRANTED = 4
    REPEATED = 5
    CUT = 6
    MISFIT = 7  # its length is not that of the slice
    CORRUPT = 8  # the pool does not hold what the checksum says

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class _Entry:
    """One armed grant. `landing`: reads into its pages that are under way, of all its peers."""

    __slots__ = ("grant", "landing", "revoked", "shares")

    def __init__(self, grant: GrantNo) -> None:
        self.grant = grant
        self.shares: dict[Seat, _Share] = {}
        self.landing = 0
        self.revoked = False


Places: TypeAlias = npt.NDArray[np.intp]
"""Where pages are in the sorted pages of a share."""


class _Share:
    """What one peer brings of a grant. A page is `taken` from when a frame that brings it has begun; it is given back
    where that frame does not land."""

    __slots__ = ("_is_sorted", "_pages", "_taken", "cut", "entry", "landing", "peer", "slice")

    def __init__(self, entry: _Entry, peer: Seat, pages: PageNumbers, slice_: Slice) -> None:
        self.entry = entry
        self.peer = peer
        self.slice = slice_
        self.landing = 0
        self.cut = False
        self._pages = pages
        self._is_sorted = False
        self._taken = np.zeros(len(pages), np.bool_)

    def sort(self) -> None:
        """Before the first `take`. Runs without the interpreter lock."""
        if not self._is_sorted:
            self._pages = np.sort(self._pages)
            self._is_sorted = True

    def take(self, pages: Sequence[PageId], size_bytes: int | None) -> Places | Verdict:
        """All of these pages, or why not."""
        if self.cut:
            return Verdict.CUT
        places = self._places(pages)
        if places is None:
            return Verdict.NOT_GRANTED
        if len(set(pages)) != len(pages) or self._taken[places].any():
            return Verdict.REPEATED
        if size_bytes is not None and size_bytes != len(pages) * self.slice.size_bytes:
            return Verdict.MISFIT
        self._taken[places] = True
        return places

    def give_back(self, places: Places) -> None:
        self._taken[places] = False

    def _places(self, pages: Sequence[PageId]) -> Places | None:
        """None where one of the pages is not granted."""
        try:
            wanted = packed(pages)
        except OverflowError:
            return None
        if not len(self._pages):
            return None if len(wanted) else np.zeros(0, np.intp)
        places = np.minimum(self._pages.searchsorted(wanted), len(self._pages) - 1)
        return places if (self._pages[places] == wanted).all() else None


class Claim:
    """The right of one frame to write its slice of its pages, for as long as `enter` says so."""

    __slots__ = ("_places", "_share", "pages")

    def __init__(self, share: _Share, pages: Sequence[PageId], places: Places) -> None:
        self._share = share
        self._places = places
        self.pages = pages

    @property
    def grant(self) -> GrantNo:
        return self._share.entry.grant

    @property
    def peer(self) -> Seat:
        return self._share.peer

    @property
    def slice(self) -> Slice:
        return self._share.slice


class LandingTable:
    """The armed grants of one pool. `discarded` counts refused frames by verdict."""

    def __init__(self, pages: int, page_bytes: int, on_landed: LandedCallback, on_quiet: QuietCallback) -> None:
        self._pool_pages = pages
        self._page_bytes = page_bytes
        self._on_landed = on_landed
        self._on_quiet = on_quiet
        self._lock = threading.Lock()
        self._entries: dict[GrantNo, _Entry] = {}
        self.discarded: Counter[Verdict] = Counter()

    # --- the control thread's half (see contract.Landing) ---

    def arm(self, grant: GrantNo, peer: Seat, pages: Collection[PageId], slice_: Slice) -> None:
        """IndexError for a page outside the pool, ValueError for a slice of other pages than this pool's, and for a
        grant armed twice for one peer. A peer that is armed after the revoke lands nothing."""
        granted = packed_inside(pages, self._pool_pages)
        if slice_.dst_page != self._page_bytes:
            raise ValueError(
                f"grant {grant}: a slice of pages of {slice_.dst_page} bytes, this pool has pages of {self._page_bytes}"
            )
        with self._lock:
            entry = self._entries.setdefault(grant, _Entry(grant))
            if peer in entry.shares:
                raise ValueError(f"grant {grant} is armed already for {peer}: grant numbers are never reused")
            entry.shares[peer] = _Share(entry, peer, granted, slice_)

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
                entry.shares = {}

    def knows(self, grant: GrantNo) -> bool:
        """Armed and not disarmed yet, revoked or not."""
        with self._lock:
            return grant in self._entries

    def cut(self, peer: Instance) -> bool:
        """Nothing more lands under the grants that ranks of `peer` hold now; grants armed later are not touched.
        True: nor is anything of theirs landing now; otherwise `revoke` tells when it is over."""
        with self._lock:
            shares = [share for entry in self._entries.values() for share in entry.shares.values()]
            cut = [share for share in shares if share.peer.instance == peer]
            for share in cut:
                share.cut = True
            return not any(share.landing for share in cut)

    # --- the transport's half ---

    def claim(
        self, grant: GrantNo, peer: Seat, pages: Sequence[PageId], size_bytes: int | None = None
    ) -> Claim | Verdict:
        """A frame begins: all of its pages are claimed, or it goes to scratch whole, with the reason. `size_bytes`,
        where the frame has a length of its own, must be that of the peer's slice of so many pages."""
        with self._lock:
            entry = self._entries.get(grant)
            share = entry.shares.get(peer) if entry else None
        if share is not None:
            share.sort()
        with self._lock:
            claimed = self._claimed(grant, peer, pages, size_bytes)
            if isinstance(claimed, Verdict):
                self.discarded[claimed] += 1
            return claimed

    def _claimed(self, grant: GrantNo, peer: Seat, pages: Sequence[PageId], size_bytes: int | None) -> Claim | Verdict:
        entry = self._entries.get(grant)
        if entry is None:
            return Verdict.UNKNOWN_GRANT
        if entry.revoked:
            return Verdict.REVOKED
        share = entry.shares.get(peer)
        if share is None:
            return Verdict.WRONG_PEER
        places = share.take(pages, size_bytes)
        return places if isinstance(places, Verdict) else Claim(share, pages, places)

    def enter(self, claim: Claim) -> bool:
        """May the next read go into the pages? True must be paired with `leave` or `finish`, soon."""
        with self._lock:
            share = claim._share
            if share.entry.revoked or share.cut:
                return False
            share.landing += 1
            share.entry.landing += 1
            return True

    def leave(self, claim: Claim) -> None:
        with self._lock:
            quiet = self._left(claim._share)
        if quiet:
            self._on_quiet(claim.grant)

    def finish(self, claim: Claim, verdict: Verdict = Verdict.LANDED) -> Verdict:
        """Instead of `leave` after the last byte: the pages have landed, unless the grant ended meanwhile. `verdict`:
        what the transport itself found; pages that it did not find landed may be sent again."""
        share = claim._share
        with self._lock:
            verdict = self._ended(share, verdict)
            if verdict is not Verdict.LANDED:
                share.give_back(claim._places)
            quiet = self._left(share)
        try:
            if verdict is Verdict.LANDED and claim.pages:
                self._on_landed(claim.grant, share.peer, claim.pages)
        finally:
            if quiet:
                self._on_quiet(claim.grant)
        return verdict

    def abandon(self, claim: Claim) -> Verdict:
        """The frame ends without its pages, outside `enter`: they may be sent again if the grant still stands."""
        with self._lock:
            claim._share.give_back(claim._places)
            return self._ended(claim._share, Verdict.LANDED)

    def _ended(self, share: _Share, verdict: Verdict) -> Verdict:
        verdict = Verdict.REVOKED if share.entry.revoked else Verdict.CUT if share.cut else verdict
        if verdict is not Verdict.LANDED:
            self.discarded[verdict] += 1
        return verdict

    def _left(self, share: _Share) -> bool:
        """True where this was the last reader of a revoked grant, whose owner was told "later"."""
        share.landing -= 1
        share.entry.landing -= 1
        assert share.landing >= 0
        return share.entry.revoked and share.entry.landing == 0
