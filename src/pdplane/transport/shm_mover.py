"""Prefill's end of the shared-memory transports, and the link of kind shm: it hands decode a read-only view of its
pool, then only names pages. Decode copies them.

After a teardown decode may still be copying the frame that it has begun: what it reads then lands, at most, under a
grant that no SUCCESS will ever commit.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from typing import ClassVar

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, MoveNo, Seat
from pdplane.core.slices import Slice

from . import checksum as checksums
from . import memfd
from . import shm_frames as frames
from .contract import PAGES_PER_FRAME, Capabilities, Pair, WroteCallback
from .host_identity import shared_host
from .io_thread import IoThread
from .landing_table import Verdict
from .pool import PagePool
from .shm_link import LocalLink, Wiring
from .shm_queue import Batch, Frame
from .shm_sockets import close_all, send_packet
from .slicing import check_source

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FRAME_BYTES = 4 << 20
"""A frame is copied in one go, and a revoke may have to wait for it."""


class ShmLink(LocalLink):
    """Of kind shm."""

    def _greet(self, sock: socket.socket, bind: bytes) -> bool:
        fd = memfd.reopened(self._wiring.pool.fd, os.O_RDONLY)
        try:
            send_packet(sock, bind, [fd])
        finally:
            close_all([fd])
        return True

    def _frame(self, seq: int, grant: GrantNo, pairs: Frame) -> frames.Pages:
        src, dst = tuple(pair.src for pair in pairs), tuple(pair.dst for pair in pairs)
        return frames.Pages(seq, grant, src, dst, self._checksum(pairs))


class ShmMover:
    """contract.Mover. Callbacks come on its thread. `offer`: what it can send by."""

    capabilities = Capabilities(push=True, pull=False, fence=True, one_sided=False)
    kind: ClassVar[str] = "shm"
    link: ClassVar[type[LocalLink]] = ShmLink

    def __init__(
        self,
        seat: Seat,
        pool: PagePool,
        on_wrote: WroteCallback,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        checksum: bool = False,
    ) -> None:
        """OSError where pools cannot be shared on this host; NoChecksum where the checksum's package is missing."""
        if checksum:
            checksums.require()
        self.offer = DataEndpoint(self.kind, shared_host(self.kind, pool))
        self.seat = seat
        self.pool = pool
        self._on_wrote = on_wrote
        self._links: dict[Seat, LocalLink] = {}
        self._closed = False
        self._io = IoThread(f"pdplane-{self.kind}-mover-{seat}")
        self._wiring = Wiring(seat, pool, self._io, self._complete, connect_timeout_s, checksum)
        self._io.start()

    def connect(self, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        """ValueError for a slice of other pages than this pool's."""
        check_source(slice_, peer, self.pool.page_bytes)
        self._io.post(lambda: self._connect(peer, endpoint, slice_))

    def move(self, number: MoveNo, grant: GrantNo, peer: Seat, pairs: Sequence[Pair]) -> None:
        """IndexError for a source page outside the pool, before anything is posted."""
        if self._closed:
            raise RuntimeError(f"move {number} posted to a closed mover")
        posted, pages = tuple(pairs), self.pool.pages
        for outside in (pair.src for pair in posted if not 0 <= pair.src < pages):
            self.pool.page(outside)
        self._io.post(lambda: self._post(number, grant, peer, posted))

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
        link = self._links.pop(peer, None)
        if link is not None and (link.endpoint, link.slice) == (endpoint, slice_):
            self._links[peer] = link
            return
        if link is not None:
            link.fail(f"peer {peer} has another endpoint now")
        self._links[peer] = self.link(self._wiring, peer, endpoint, slice_)

    def _post(self, number: MoveNo, grant: GrantNo, peer: Seat, pairs: Frame) -> None:
        link = self._links.get(peer)
        if not pairs:
            self._complete(number, "")
        elif not all(0 <= pair.dst < 2**32 for pair in pairs):
            self._complete(number, f"discarded: {Verdict.NOT_GRANTED}")
        elif link is None:
            self._complete(number, f"peer {peer} is not connected")
        else:
            link.post(Batch(number, grant, pairs, pages_per_frame(link.slice)))

    def _cancel(self, grant: GrantNo, peer: Seat) -> None:
        if peer in self._links:
            self._links[peer].cancel(grant)

    def _teardown(self, peer: Instance, error: str) -> None:
        for seat in [seat for seat in self._links if seat.instance == peer]:
            self._links.pop(seat).fail(error)

    def _close_all(self) -> None:
        for seat in list(self._links):
            self._links.pop(seat).fail("the mover was closed")


def pages_per_frame(slice_: Slice) -> int:
    return min(PAGES_PER_FRAME, max(1, FRAME_BYTES // slice_.size_bytes))
