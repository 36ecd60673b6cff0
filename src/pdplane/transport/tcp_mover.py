"""Prefill's end over TCP: a queue and a connection for each peer (tcp_sender.py writes them).

A move is cut into frames of at most 64 pages. It is complete when every frame's ACK has come, so that completion
means visible in decode's pool, not handed to a socket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, MoveNo, Seat
from pdplane.core.slices import Slice

from . import checksum as checksums
from .contract import Capabilities, Pair, WroteCallback
from .io_thread import IoThread
from .landing_table import Verdict
from .pool import PagePool
from .slicing import check_source
from .tcp_sender import Batch, Sender

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class TcpMover:
    """contract.Mover. Callbacks come on its thread."""

    capabilities = Capabilities(push=True, pull=False, fence=True, one_sided=False)

    def __init__(
        self,
        seat: Seat,
        pool: PagePool,
        on_wrote: WroteCallback,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        checksum: bool = False,
    ) -> None:
        """`checksum`: every frame carries one of its pages, and what decode's pool does not hold is CORRUPT. A peer of
        data protocol 1 cannot read such frames. NoChecksum where the extra is not installed."""
        if checksum:
            checksums.require()
        self.seat = seat
        self.pool = pool
        self.connect_timeout_s = connect_timeout_s
        self.checksum = checksum
        self._on_wrote = on_wrote
        self._senders: dict[Seat, Sender] = {}
        self._closed = False
        self._io = IoThread(f"pdplane-mover-{seat}")
        self._io.start()

    def connect(self, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        """ValueError for a slice of other pages than this pool's."""
        check_source(slice_, peer, self.pool.page_bytes)
        self._io.post(lambda: self._connect(peer, endpoint, slice_))

    def move(self, number: MoveNo, grant: GrantNo, peer: Seat, pairs: Sequence[Pair]) -> None:
        """IndexError for a source page outside the pool, before anything is posted."""
        if self._closed:
            raise RuntimeError(f"move {number} posted to a closed mover")
        for pair in pairs:
            self.pool.page(pair.src)
        batch = Batch(number, grant, tuple(pairs))
        self._io.post(lambda: self._post(peer, batch))

    def cancel(self, grant: GrantNo, peer: Seat) -> None:
        self._io.post(lambda: self._with_sender(peer, lambda sender: sender.cancel(grant)))

    def teardown(self, peer: Instance) -> None:
        self._io.post(lambda: self._teardown(peer, "torn down"))

    def close(self) -> None:
        """Every outstanding move completes with an error before this returns. Idempotent."""
        self._closed = True
        self._io.post(self._close_all)
        self._io.stop()

    # --- on the thread ---

    def complete(self, batch: Batch, error: str) -> None:
        try:
            self._on_wrote(batch.number, error)
        except Exception:
            log.exception("completion callback of move %s", batch.number)

    def _connect(self, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        sender = self._senders.get(peer)
        if sender is not None and sender.leads_to(endpoint, slice_):
            return
        self._drop(peer, f"peer {peer} has another endpoint now")
        self._senders[peer] = Sender(self, self._io, peer, endpoint, slice_)

    def _post(self, peer: Seat, batch: Batch) -> None:
        sender = self._senders.get(peer)
        if not batch.pairs:
            self.complete(batch, "")
        elif not batch.addressable():
            self.complete(batch, f"discarded: {Verdict.NOT_GRANTED}")
        elif sender is None:
            self.complete(batch, f"peer {peer} is not connected")
        else:
            sender.post(batch)

    def _with_sender(self, peer: Seat, call: Callable[[Sender], None]) -> None:
        if peer in self._senders:
            call(self._senders[peer])

    def _drop(self, peer: Seat, error: str) -> None:
        sender = self._senders.pop(peer, None)
        if sender is not None:
            sender.fail(error)

    def _teardown(self, peer: Instance, error: str) -> None:
        for seat in [seat for seat in self._senders if seat.instance == peer]:
            self._drop(seat, error)

    def _close_all(self) -> None:
        for seat in list(self._senders):
            self._drop(seat, "the mover was closed")
