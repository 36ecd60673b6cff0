"""Decode's end of every transport that prefills dial: the landing table, and the connections that are let in."""

from __future__ import annotations

import abc
import contextlib
import logging
import socket
from collections.abc import Sequence
from typing import ClassVar, Protocol

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, PageId, Seat
from pdplane.core.slices import Slice

from .checksum import Verifier
from .contract import Capabilities, LandedCallback, QuietCallback
from .io_thread import IoThread
from .landing_table import LandingTable
from .pool import PagePool
from .tcp_sockets import READ

log = logging.getLogger(__name__)

MAX_UNBOUND = 64
"""Connections that have not said who they are. One more closes the oldest: they hold no room's bytes."""


class Inbound(Protocol):
    """One prefill's connection, on the landing's thread. `peer` is None until it has said who it is. It tells its
    landing when it has closed (`forget`)."""

    peer: Seat | None

    def close(self) -> None: ...


class PageLanding(abc.ABC):
    """contract.Landing, of any kind. Callbacks come on its thread. Counters: `bad_frames`, and `table.discarded` by
    verdict."""

    capabilities: Capabilities
    kind: ClassVar[str]

    def __init__(
        self,
        seat: Seat,
        pool: PagePool,
        on_landed: LandedCallback,
        on_quiet: QuietCallback,
        verifier: Verifier | None,
        listener: socket.socket,
        endpoint: DataEndpoint,
    ) -> None:
        """Takes over the listener."""
        self.seat = seat
        self.pool = pool
        self.table = LandingTable(pool.pages, pool.page_bytes, on_landed, on_quiet)
        self.verifier = verifier or Verifier(pool)
        self.endpoint = endpoint
        self.bad_frames = 0
        self._listener = listener
        self._connections: dict[Inbound, None] = {}
        self._io = IoThread(f"pdplane-{self.kind}-landing-{seat}")
        self._io.post(lambda: self._io.watch(self._listener, READ, self._accept))
        self._io.start()

    def arm(self, grant: GrantNo, peer: Seat, pages: Sequence[PageId], slice_: Slice) -> None:
        self.table.arm(grant, peer, pages, slice_)

    def revoke(self, grant: GrantNo) -> bool:
        return self.table.revoke(grant)

    def disarm(self, grant: GrantNo) -> None:
        self.table.disarm(grant)

    def teardown(self, peer: Instance) -> bool:
        """Nothing begins to land in a page of this peer's grants after this. False where something has begun: `revoke`
        tells when it is over (the control thread waits for nothing)."""
        proved = self.table.cut(peer)
        self._io.post(lambda: self._close_peer(peer))
        return proved

    def close(self) -> None:
        self._io.post(self._close_all)
        self._io.stop()

    # --- on the thread ---

    @abc.abstractmethod
    def _connection(self, sock: socket.socket) -> Inbound:
        """Someone has dialled."""

    def bad_frame(self, reason: str) -> None:
        self.bad_frames += 1
        log.warning("%s data connection closed: %s", self.kind, reason)

    def forget(self, connection: Inbound) -> None:
        self._connections.pop(connection, None)

    def _accept(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _address = self._listener.accept()
            self._connections[self._connection(sock)] = None
        unbound = [connection for connection in self._connections if connection.peer is None]
        for connection in unbound[: max(0, len(unbound) - MAX_UNBOUND)]:
            connection.close()

    def _close_peer(self, peer: Instance) -> None:
        for connection in list(self._connections):
            if connection.peer is not None and connection.peer.instance == peer:
                connection.close()

    def _close_all(self) -> None:
        self._io.watch(self._listener, 0, self._accept)
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
