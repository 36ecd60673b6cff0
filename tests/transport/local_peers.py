"""Ends of a local data connection that say what they like."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Sequence

import msgspec

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, PageId
from pdplane.transport import memfd
from pdplane.transport import shm_frames as frames
from pdplane.transport.host_identity import host_identity
from pdplane.transport.landing_table import Verdict

from .rigs import PAGE_BYTES, PATIENCE_S, D, P, Rig


class RawPrefill:
    """A socket at the landing."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._acks: list[frames.Ack] = []
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(f"\0{rig.landing.endpoint.host}")

    def __enter__(self) -> RawPrefill:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def bind(self, fds: Sequence[int] | None = None, /, **change: object) -> None:
        """A right one but for `change`; with the rig's source pool, but for `fds`."""
        pool, token = self.rig.source, self.rig.landing.endpoint.token
        bind = frames.Bind(frames.LOCAL_VERSION, P, D, token, pool.pages, pool.page_bytes)
        self.send(msgspec.structs.replace(bind, **change), [pool.fd] if fds is None else fds)

    def send(self, frame: msgspec.Struct | bytes, fds: Sequence[int] = ()) -> None:
        packet = frame if isinstance(frame, bytes) else frames.encode(frame)
        if fds:
            socket.send_fds(self.sock, [packet], list(fds))
        else:
            self.sock.send(packet)

    def ack(self) -> frames.Ack:
        """Of the next frame alone: the landing may ack several at once."""
        if not self._acks:
            answer = frames.decode_to_mover(self.sock.recv(frames.MAX_FRAME_BYTES))
            assert isinstance(answer, frames.Ack)
            self._acks += [acked(seq, verdict) for seq, verdict in enumerate(answer.verdicts, answer.seq)]
        return self._acks.pop(0)

    def is_closed_by_decode(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


class FakeDecode:
    """Listens as a landing would."""

    def __init__(self, kind: str) -> None:
        self.name = f"pdplane-test-{os.getpid()}-{id(self)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.settimeout(PATIENCE_S)
        self.listener.bind(f"\0{self.name}")
        self.listener.listen()
        self.endpoint = DataEndpoint(kind, host_identity(), self.name, 0, "t")

    def __enter__(self) -> FakeDecode:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def accept(self) -> socket.socket:
        sock = self.listener.accept()[0]
        sock.settimeout(PATIENCE_S)
        return sock


def page_list(seq: int, grant: int, src: Sequence[int], dst: Sequence[int]) -> frames.Pages:
    return frames.Pages(seq, GrantNo(grant), tuple(map(PageId, src)), tuple(map(PageId, dst)))


def placed(seq: int, grant: int, dst: Sequence[int], *, written: bool = True) -> frames.Placed:
    return frames.Placed(seq, GrantNo(grant), tuple(map(PageId, dst)), written)


def acked(seq: int, verdict: Verdict = Verdict.LANDED) -> frames.Ack:
    return frames.Ack(seq, (verdict,))


def a_memfd(size: int, *, sealed: bool = True) -> int:
    if sealed:
        return memfd.sealed_memfd("test", size)
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd


POOL_BYTES = 256 * PAGE_BYTES
"""Of a Rig's pools."""


def open_files() -> int:
    gc.collect()  # what earlier tests left in cycles
    return len(os.listdir("/proc/self/fd"))


def is_served(rig: Rig, page: int = 200) -> bool:
    """The landing still takes pages from those that behave."""
    rig.arm(900 + page, [page])
    rig.move(900 + page, 900 + page, [(3, page)])
    return rig.told.end_of(900 + page) == "" and rig.has(page, src=3)
