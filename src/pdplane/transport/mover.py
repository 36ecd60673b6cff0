"""Prefill's end of every transport that runs on a thread of its own: one link for each peer, and what is asked of them.

The kinds differ in their links alone (tcp_sender.py, shm_link.py). A move is complete when every frame's ack has come,
so that completion means visible in decode's pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, MoveNo, Seat
from pdplane.core.slices import Slice

from . import checksum as checksums
from .batches import Batch
from .contract import Capabilities, Pair, Pairs, WroteCallback
from .io_thread import IoThread
from .page_numbers import packed_inside
from .pool import PagePool
from .slicing import check_source

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class Wiring:
    """What every link of one mover shares."""

    def __init__(
        self,
        seat: Seat,
        pool: PagePool,
        io: IoThread,
        complete: Callable[[MoveNo, str], None],
        connect_timeout_s: float,
        checksum: bool,
    ) -> None:
        self.seat = seat
        self.pool = pool
        self.io = io
        self.complete = complete
        self.connect_timeout_s = connect_timeout_s
        self.checksum = checksum


class PeerLink(Protocol):
    """On the mover's thread. Dials when the first batch comes."""

    endpoint: DataEndpoint
    slice: Slice

    def __init__(self, wiring: Wiring, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None: ...

    def post(self, batch: Batch) -> None: ...

    def cancel(self, grant: GrantNo) -> None: ...

    def fail(self, error: str) -> None:
        """Close; everything outstanding completes with `error`, once. No source page is read after this."""


class PageMover:
    """contract.Mover, of any kind. Callbacks come on its thread. `offer`: what it can send by."""

    capabilities: Capabilities
    kind: ClassVar[str]
    link: ClassVar[type[PeerLink]]

    def __init__(
        self,
        seat: Seat,
        pool: PagePool,
        on_wrote: WroteCallback,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        checksum: bool = False,
    ) -> None:
        """`checksum`: every frame carries one of its pages, and what decode's pool does not hold is CORRUPT. NoChecksum
        where the extra is not installed."""
        if checksum:
            checksums.require()
        self.offer = self.offered(pool)
        self.seat = seat
        self.pool = pool
        self._on_wrote = on_wrote
        self._links: dict[Seat, PeerLink] = {}
        self._closed = False
        self._io = IoThread(f"pdplane-{self.kind}-mover-{seat}")
        self._wiring = Wiring(seat, pool, self._io, self._complete, connect_timeout_s, checksum)
        self._io.start()

    @classmethod
    def offered(cls, pool: PagePool) -> DataEndpoint:
        """OSError where this kind cannot send from such a pool."""
        return DataEndpoint(cls.kind)

    def connect(self, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        """ValueError for a slice of other pages than this pool's."""
        check_source(slice_, peer, self.pool.page_bytes)
        self._io.post(lambda: self._connect(peer, endpoint, slice_))

    def move(self, number: MoveNo, grant: GrantNo, peer: Seat, pairs: Sequence[Pair]) -> None:
        """IndexError for a source page outside the pool, before anything is posted."""
        if self._closed:
            raise RuntimeError(f"move {number} posted to a closed mover")
        batch = Batch(number, grant, Pairs.of(pairs))
        packed_inside(batch.pairs.src, self.pool.pages)
        self._io.post(lambda: self._post(peer, batch))

    def cancel(self, grant: GrantNo, peer: Seat) -> None:
        self._io.post(lambda: self._cancel(grant, peer))

    def teardown(self, peer: Instance) -> None:
        self._io.post(lambda: self._teardown(peer, "torn down"))

    def close(self) -> None:
        """Every outstanding move completes with an error before this returns. Idempotent."""
        self._closed = True
        self._io.post(self._close_all)
        self._io.stop()

    # --- on the thread ---

    def _complete(self, number: MoveNo, error: str) -> None:
        try:
            self._on_wrote(number, error)
        except Exception:
            log.exception("completion callback of move %s", number)

    def _connect(self, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        link = self._links.get(peer)
        if link is not None and (link.endpoint, link.slice) == (endpoint, slice_):
            return
        self._drop(peer, f"peer {peer} has another endpoint now")
        self._links[peer] = self.link(self._wiring, peer, endpoint, slice_)

    def _post(self, peer: Seat, batch: Batch) -> None:
        link = self._links.get(peer)
        if not batch.pairs:
            self._complete(batch.number, "")
        elif link is None:
            self._complete(batch.number, f"peer {peer} is not connected")
        else:
            link.post(batch)

    def _cancel(self, grant: GrantNo, peer: Seat) -> None:
        if peer in self._links:
            self._links[peer].cancel(grant)

    def _drop(self, peer: Seat, error: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.fail(error)

    def _teardown(self, peer: Instance, error: str) -> None:
        for seat in [seat for seat in self._links if seat.instance == peer]:
            self._drop(seat, error)

    def _close_all(self) -> None:
        for seat in list(self._links):
            self._drop(seat, "the mover was closed")
