"""Decode's end of shm_push: prefills write into its pool themselves. It hands each its pool and a table of words
(page_lock.py), counts the pages that they say they have placed, and takes a grant back by word and lock.

The lock is a proof, but one that a frozen writer can withhold: hence `fence: no`, and on_quiet perhaps never.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

from pdplane.core.ids import GrantNo, Instance, PageId, Seat
from pdplane.core.slices import Slice

from . import shm_frames as frames
from .checksum import Verifier
from .contract import LandedCallback, QuietCallback
from .landing_table import Claim, Verdict
from .page_lock import GrantWords
from .pool import PagePool
from .shm_connection import Connection, Take
from .shm_landing import LocalLanding
from .shm_push_mover import PUSH
from .shm_sockets import close_all
from .tcp_frames import BadData

SPARE_SLOTS = 64
"""Beyond one for each page: for grants that are forgotten while a peer still holds their lock."""
FIRST_POLL_S, LAST_POLL_S = 0.0005, 0.1


class ShmPushLanding(LocalLanding):
    """contract.Landing."""

    capabilities = PUSH
    kind: ClassVar[str] = "shm_push"

    def __init__(
        self,
        seat: Seat,
        pool: PagePool,
        on_landed: LandedCallback,
        on_quiet: QuietCallback,
        *,
        verifier: Verifier | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._words: dict[Seat, GrantWords] = {}
        self._torn: set[Seat] = set()  # cut off while it might still write: its words stay until it cannot
        self._writers: dict[GrantNo, set[Seat]] = {}  # who may still be writing
        self._awaited: set[GrantNo] = set()  # revoked, and on_quiet owed
        self._tell_quiet = on_quiet
        # The table's own on_quiet is nothing: it sees no writer, the lock does.
        super().__init__(seat, pool, on_landed, lambda grant: None, verifier=verifier)

    def arm(self, grant: GrantNo, peer: Seat, pages: Sequence[PageId], slice_: Slice) -> None:
        super().arm(grant, peer, pages, slice_)
        with self._lock:
            if pages and self._words_of(peer).publish(grant):
                self._writers.setdefault(grant, set()).add(peer)

    def revoke(self, grant: GrantNo) -> bool:
        super().revoke(grant)
        with self._lock:
            self._withdraw(grant)
            if self._is_quiet(grant):
                return True
            known = grant in self._awaited
            self._awaited.add(grant)
        if not known:
            self._io.post(lambda: self._poll(grant, FIRST_POLL_S))
        return False

    def disarm(self, grant: GrantNo) -> None:
        super().disarm(grant)
        with self._lock:
            self._withdraw(grant)
            self._is_quiet(grant)
            self._writers.pop(grant, None)
            self._awaited.discard(grant)
            self._close_torn()

    def teardown(self, peer: Instance) -> bool:
        """True only where this instance holds no grant: else it may be stopped inside a write."""
        super().teardown(peer)
        with self._lock:
            self._torn.update(seat for seat in self._words if seat.instance == peer)
            self._close_torn()
            return not any(seat.instance == peer for seat in self._torn)

    def close(self) -> None:
        super().close()
        with self._lock:
            for words in self._words.values():
                words.close()
            self._words.clear()

    # --- under the lock ---

    def _words_of(self, seat: Seat) -> GrantWords:
        self._torn.discard(seat)
        if seat not in self._words:
            self._words[seat] = GrantWords(self.pool.pages + SPARE_SLOTS)
        return self._words[seat]

    def _withdraw(self, grant: GrantNo) -> None:
        for seat in self._writers.get(grant, ()):
            if words := self._words.get(seat):
                words.withdraw(grant)

    def _is_quiet(self, grant: GrantNo) -> bool:
        """The proof, from every peer of the grant. Without words a peer has been cut off, and can write nothing."""
        known = [(seat, self._words.get(seat)) for seat in self._writers.get(grant, ())]
        writing = {seat for seat, words in known if words and not words.is_quiet(grant)}
        if writing:
            self._writers[grant] = writing
            return False
        self._writers.pop(grant, None)
        self._awaited.discard(grant)
        return True

    def _close_torn(self) -> None:
        for seat in [seat for seat in self._torn if not self._words[seat].may_write()]:
            self._words.pop(seat).close()
            self._torn.discard(seat)

    # --- on the thread ---

    def _poll(self, grant: GrantNo, delay_s: float) -> None:
        with self._lock:
            if grant not in self._awaited:
                return
            quiet = self._is_quiet(grant)
            self._close_torn()
        if quiet:
            self._tell_quiet(grant)
        else:
            self._io.after(delay_s, lambda: self._poll(grant, min(2 * delay_s, LAST_POLL_S)))

    def admit(self, bind: frames.Bind, fds: Sequence[int], connection: Connection) -> Take:
        with self._lock:
            words = self._words_of(bind.src)
            reader = words.new_reader()
        try:
            bound = frames.Bound(self.pool.pages, self.pool.page_bytes, words.slots)
            connection.send(frames.encode(bound), [self.pool.fd, reader])
        finally:
            close_all([reader])
        return _Counting(self, bind).take


class _Counting:
    """One prefill that writes here."""

    def __init__(self, landing: ShmPushLanding, bind: frames.Bind) -> None:
        self._landing = landing
        self._peer = bind.src

    def take(self, frame: frames.Pages | frames.Placed) -> Verdict:
        if not isinstance(frame, frames.Placed):
            raise BadData(f"{self._peer} sent a frame that is no report of kind shm_push")
        table = self._landing.table
        claim = table.claim(frame.grant, self._peer, frame.dst)
        if not isinstance(claim, Claim):
            return claim
        if not frame.written:
            table.abandon(claim)
            return Verdict.UNKNOWN_GRANT
        if not table.enter(claim):
            return table.abandon(claim)
        verdict = Verdict.CORRUPT
        try:
            verdict = self._landing.verifier.verdict(claim, frame.checksum)
        finally:
            verdict = table.finish(claim, verdict)
        return verdict
