"""Prefill's end of the shared-memory transports, and the link of kind shm: it hands decode a read-only view of its
pool, then only names pages. Decode copies them.

After a teardown decode may still be copying the frame that it has begun: what it reads then lands, at most, under a
grant that no SUCCESS will ever commit.
"""

from __future__ import annotations

import os
import socket
from typing import ClassVar

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo

from . import memfd
from . import shm_frames as frames
from .contract import Capabilities, Pairs
from .host_identity import shared_host
from .mover import PageMover, PeerLink
from .pool import PagePool
from .shm_link import LocalLink
from .shm_sockets import close_all, send_packet


class ShmLink(LocalLink):
    """Of kind shm."""

    def _greet(self, sock: socket.socket, bind: bytes) -> bool:
        fd = memfd.reopened(self._wiring.pool.fd, os.O_RDONLY)
        try:
            send_packet(sock, bind, [fd])
        finally:
            close_all([fd])
        return True

    def _frame(self, seq: int, grant: GrantNo, pairs: Pairs) -> frames.Pages:
        return frames.Pages(seq, grant, tuple(pairs.src), tuple(pairs.dst), self._checksum(pairs))


class ShmMover(PageMover):
    """contract.Mover. OSError where pools cannot be shared on this host."""

    capabilities = Capabilities(push=True, pull=False, fence=True, one_sided=False)
    kind: ClassVar[str] = "shm"
    link: ClassVar[type[PeerLink]] = ShmLink

    @classmethod
    def offered(cls, pool: PagePool) -> DataEndpoint:
        return DataEndpoint(cls.kind, shared_host(cls.kind, pool))
