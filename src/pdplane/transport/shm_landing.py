"""Decode's end of the shared-memory transports, and the landing of kind shm: it copies from a prefill's pool, mapped
read-only, into granted pages. So every byte is placed by this side alone, inside the landing table's fence, and needs
nothing of a peer that is frozen or dead."""

from __future__ import annotations

import abc
import contextlib
import logging
import secrets
from collections.abc import Sequence
from typing import ClassVar

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, PageId, Seat
from pdplane.core.slices import Slice

from . import shm_frames as frames
from . import slicing
from .checksum import Verifier
from .contract import Capabilities, LandedCallback, QuietCallback
from .host_identity import shared_host
from .io_thread import IoThread
from .landing_table import Claim, LandingTable, Verdict
from .pool import PagePool
from .shm_connection import Connection, Take
from .shm_memory import map_passed
from .shm_sockets import listen_local
from .tcp_frames import BadData
from .tcp_sockets import READ

log = logging.getLogger(__name__)

MAX_UNBOUND = 64
"""Connections that have not said who they are. One more closes the oldest: they hold no room's bytes."""


class LocalLanding(abc.ABC):
    """contract.Landing, of any kind that prefills dial on a local socket. Callbacks come on its thread. Counters:
    `bad_frames`, and `table.discarded` by verdict."""

    capabilities: Capabilities
    kind: ClassVar[str]
    fds_of_bind: int = 0

    def __init__(
        self,
        seat: Seat,
        pool: PagePool,
        on_landed: LandedCallback,
        on_quiet: QuietCallback,
        *,
        verifier: Verifier | None = None,
    ) -> None:
        """Listens from now on. OSError where pools cannot be shared on this host."""
        self.seat = seat
        self.pool = pool
        self.table = LandingTable(pool.pages, pool.page_bytes, on_landed, on_quiet)
        self.verifier = verifier or Verifier(pool)
        self.token = secrets.token_hex(16)
        self.bad_frames = 0
        name = f"pdplane-{secrets.token_hex(12)}"
        self.endpoint = DataEndpoint(self.kind, shared_host(self.kind, pool), name, 0, self.token)
        self._listener = listen_local(name)
        self._connections: dict[Connection, None] = {}
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
        """No copy into a page of this peer's grants begins after this. False where one has begun: `revoke` tells when
        it is over (the control thread waits for nothing)."""
        self._io.post(lambda: self._close_peer(peer))
        return self.table.cut(peer)

    def close(self) -> None:
        self._io.post(self._close_all)
        self._io.stop()

    @abc.abstractmethod
    def admit(self, bind: frames.Bind, fds: Sequence[int], connection: Connection) -> Take:
        """See shm_connection.Host."""

    # --- on the thread ---

    def bad_frame(self, reason: str) -> None:
        self.bad_frames += 1
        log.warning("local data connection closed: %s", reason)

    def forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)

    def _accept(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _address = self._listener.accept()
            self._connections[Connection(self, self._io, sock)] = None
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


class ShmLanding(LocalLanding):
    """Of kind shm."""

    capabilities = Capabilities(push=True, pull=False, fence=True, one_sided=False)
    kind: ClassVar[str] = "shm"
    fds_of_bind = 1

    def admit(self, bind: frames.Bind, fds: Sequence[int], connection: Connection) -> Take:
        (fd,) = fds
        return _Copying(self, bind, map_passed(fd, bind.pages * bind.page_bytes, writable=False)).take


class _Copying:
    """One prefill's pool, mapped here."""

    def __init__(self, landing: ShmLanding, bind: frames.Bind, source: memoryview) -> None:
        self._landing = landing
        self._bind = bind
        self._source = source

    def take(self, frame: frames.Pages | frames.Placed) -> Verdict:
        if not isinstance(frame, frames.Pages) or len(frame.src) != len(frame.dst):
            raise BadData(f"{self._bind.src} sent a frame that is no page list of kind shm")
        if not 0 <= min(frame.src) <= max(frame.src) < self._bind.pages:
            raise BadData(f"{self._bind.src} names a page outside its pool of {self._bind.pages} pages")
        table = self._landing.table
        claim = table.claim(frame.grant, self._bind.src, frame.dst)
        if not isinstance(claim, Claim):
            return claim
        if not table.enter(claim):
            return table.abandon(claim)
        verdict = Verdict.MISFIT
        try:
            if claim.slice.src_page == self._bind.page_bytes:
                verdict = self._copy(claim, frame)
        finally:  # whatever it was, this copy is over: a revoke waits for it
            verdict = table.finish(claim, verdict)
        return verdict

    def _copy(self, claim: Claim, frame: frames.Pages) -> Verdict:
        slicing.copy(self._source, frame.src, claim.slice, self._landing.pool.memory, claim.pages)
        return self._landing.verifier.verdict(claim, frame.checksum)
