"""Prefill's end of shm_push: it writes into decode's pool itself, as a NIC would, inside the gate of page_lock.py; then
says so. The landing counts what it is told, and the word follows the bytes."""

from __future__ import annotations

import socket
from typing import ClassVar

from pdplane.core.ids import GrantNo

from . import shm_frames as frames
from . import slicing
from .contract import Capabilities, Pairs
from .mover import PeerLink
from .page_lock import WriteGate
from .shm_link import LocalLink
from .shm_memory import map_passed
from .shm_mover import ShmMover
from .shm_sockets import close_all, send_packet
from .tcp_frames import BadData

PUSH = Capabilities(push=True, pull=False, fence=False, one_sided=True, teardown_proves=False)


class _Target:
    """Decode's pool, mapped here, and the gate to it."""

    def __init__(self, bound: frames.Bound, fds: list[int]) -> None:
        """Takes over the descriptors of the pool and of the words."""
        pool, words = fds
        self.pages = bound.pages
        try:
            self.gate = WriteGate(words, bound.slots)
            try:
                self.memory = map_passed(pool, bound.pages * bound.page_bytes, writable=True)
            except BaseException:
                self.gate.close()
                raise
        finally:
            close_all([pool])


class ShmPushLink(LocalLink):
    """Of kind shm_push."""

    fds_of_bound = 2
    _target: _Target | None = None

    def _greet(self, sock: socket.socket, bind: bytes) -> bool:
        send_packet(sock, bind)
        return False

    def _bound(self, bound: frames.Bound, fds: list[int]) -> None:
        if bound.page_bytes != self.slice.dst_page or self._target is not None:
            close_all(fds)
            raise BadData(f"its pages have {bound.page_bytes} bytes, {self.slice.dst_page} were agreed")
        self._target = _Target(bound, fds)

    def fail(self, error: str) -> None:
        if self._target is not None:
            self._target.gate.close()
            self._target = None
        super().fail(error)

    def _frame(self, seq: int, grant: GrantNo, pairs: Pairs) -> frames.Placed:
        return frames.Placed(seq, grant, tuple(pairs.dst), self._write(grant, pairs), self._checksum(pairs))

    def _write(self, grant: GrantNo, pairs: Pairs) -> bool:
        """One batch, or nothing of it. BlockingIOError: try again."""
        assert self._target is not None
        gate, src, dst = self._target.gate, pairs.src, pairs.dst
        if max(dst) >= self._target.pages or len(set(dst)) != len(dst):
            return False
        slot = gate.enter(grant)
        if slot is None:
            return False
        try:
            slicing.copy(self._wiring.pool.memory, src, self.slice, self._target.memory, dst)
        finally:
            gate.leave(slot)
        return True


class ShmPushMover(ShmMover):
    """contract.Mover."""

    capabilities = PUSH
    kind: ClassVar[str] = "shm_push"
    link: ClassVar[type[PeerLink]] = ShmPushLink
