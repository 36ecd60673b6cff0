"""One prefill's local connection at decode: BIND, then frames, each answered by an ack in order."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from pdplane.core.ids import Seat

from . import shm_frames as frames
from .io_thread import IoThread
from .landing_table import Verdict
from .shm_sockets import check_user, close_all, receive_packet, send_packet
from .tcp_frames import BadData
from .tcp_sockets import READ, WRITE

log = logging.getLogger(__name__)

MAX_UNREAD_ACKS = 1024
FRAMES_PER_TURN = 8
"""Acked together: every ack wakes the prefill, on a host whose cores are busy copying."""

Take = Callable[[frames.Pages | frames.Placed], Verdict]
"""What becomes of a frame. BadData: the connection ends."""


class Host(Protocol):
    """What a connection needs of its landing."""

    seat: Seat
    token: str
    fds_of_bind: int

    def admit(self, bind: frames.Bind, fds: Sequence[int], connection: Connection) -> Take:
        """A peer has come; the descriptors stay the connection's to close. BadData where it cannot be served."""

    def bad_frame(self, reason: str) -> None: ...

    def forget(self, connection: Connection) -> None: ...


class Connection:
    """`peer` is None until bound."""

    def __init__(self, host: Host, io: IoThread, sock: socket.socket) -> None:
        self.peer: Seat | None = None
        self._host = host
        self._io = io
        self._sock = sock
        self._take: Take | None = None
        self._last_seq = 0
        self._verdicts: list[Verdict] = []  # not acked yet, up to that of frame `_last_seq`
        self._closed = False
        sock.setblocking(False)
        io.watch(sock, READ, self._ready)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._take = None  # and with it a mapping of the peer's pool
        self._io.watch(self._sock, 0, self._ready)
        self._sock.close()
        self._host.forget(self)

    def send(self, packet: bytes, fds: Sequence[int]) -> None:
        """With descriptors, which stay the caller's: only as the first packet, for which there is always room."""
        send_packet(self._sock, packet, fds)

    def _ready(self, mask: int) -> None:
        if self._closed:
            return
        try:
            if mask & READ:
                self._read()
            if not self._closed:
                self._send_acks()
        except BadData as bad:
            self._host.bad_frame(str(bad))
            self.close()
        except OSError as error:
            log.debug("local data connection of %s lost: %s", self.peer, error)
            self.close()
        except Exception:
            self.close()
            raise

    def _read(self) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                packet, fds = receive_packet(self._sock, self._host.fds_of_bind if self._take is None else 0)
            except BlockingIOError:
                return
            if not packet:
                self.close()
                return
            try:
                self._frame(frames.decode_to_landing(packet), fds)
            finally:
                close_all(fds)

    def _frame(self, frame: frames.ToLanding, fds: Sequence[int]) -> None:
        if isinstance(frame, frames.Bind):
            self._bind(frame, fds)
        elif self._take is None:
            raise BadData("pages before the peer has said who it is")
        elif frame.seq != self._last_seq + 1:
            raise BadData(f"frame {frame.seq} of {self.peer} where {self._last_seq + 1} is due")
        else:
            self._last_seq = frame.seq
            self._verdicts.append(self._take(frame))

    def _bind(self, bind: frames.Bind, fds: Sequence[int]) -> None:
        if self._take is not None:
            raise BadData(f"{self.peer} has bound already")
        if bind.version != frames.LOCAL_VERSION:
            raise BadData(f"{bind.src} speaks version {bind.version}, this side {frames.LOCAL_VERSION}")
        if not hmac.compare_digest(bind.token.encode(), self._host.token.encode()):
            raise BadData(f"{bind.src} came with a wrong token")
        if bind.dst != self._host.seat:
            raise BadData(f"{bind.src} asked for {bind.dst}, this is {self._host.seat}")
        check_user(self._sock)
        self._take = self._host.admit(bind, fds, self)
        self.peer = bind.src

    def _send_acks(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._verdicts:
                part = tuple(self._verdicts[: frames.MAX_ACKS])
                ack = frames.Ack(self._last_seq - len(self._verdicts) + 1, part)
                send_packet(self._sock, frames.encode(ack))
                del self._verdicts[: len(part)]
        if len(self._verdicts) > MAX_UNREAD_ACKS:
            raise BadData(f"{self.peer} does not read its acks")
        self._io.watch(self._sock, READ | WRITE if self._verdicts else READ, self._ready)
