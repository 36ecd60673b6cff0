"""Decode's end of the shared-memory transports, and the landing of kind shm: it copies from a prefill's pool, mapped
read-only, into granted pages. So every byte is placed by this side alone, inside the landing table's fence, and needs
nothing of a peer that is frozen or dead."""

from __future__ import annotations

import abc
import secrets
import socket
from collections.abc import Sequence
from typing import ClassVar

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import Seat

from . import shm_frames as frames
from . import slicing
from .checksum import Verifier
from .contract import Capabilities, LandedCallback, QuietCallback
from .host_identity import shared_host
from .landing import PageLanding
from .landing_table import Claim, Verdict
from .pool import PagePool
from .shm_connection import Connection, Take
from .shm_memory import map_passed
from .shm_sockets import listen_local
from .tcp_frames import BadData


class LocalLanding(PageLanding):
    """contract.Landing, of any kind that prefills dial on a local socket."""

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
        self.token = secrets.token_hex(16)
        name = f"pdplane-{secrets.token_hex(12)}"
        endpoint = DataEndpoint(self.kind, shared_host(self.kind, pool), name, 0, self.token)
        super().__init__(seat, pool, on_landed, on_quiet, verifier, listen_local(name), endpoint)

    @abc.abstractmethod
    def admit(self, bind: frames.Bind, fds: Sequence[int], connection: Connection) -> Take:
        """See shm_connection.Host."""

    def _connection(self, sock: socket.socket) -> Connection:
        return Connection(self, self._io, sock)


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
