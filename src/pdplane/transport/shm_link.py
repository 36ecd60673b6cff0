"""The connection from a mover to one seat of decode on the same host. Without a socket it dials when a batch comes."""

from __future__ import annotations

import abc
import socket
from collections.abc import Callable

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Seat
from pdplane.core.slices import Slice

from . import checksum
from . import shm_frames as frames
from .batches import Batch, Batches, pages_per_frame
from .contract import Pairs
from .host_identity import host_identity
from .mover import Wiring
from .shm_sockets import close_all, dial_local, receive_packet, send_packet
from .tcp_frames import BadData
from .tcp_sockets import READ, WRITE

FRAME_BYTES = 4 << 20
"""A frame is copied in one go, and a revoke may have to wait for it."""
WINDOW = 32
"""Frames on their way: several turns of the landing, which acks once a turn, yet few enough for a cancel to find
something to drop."""
RETRY_S = 0.0005
PACKETS_PER_TURN = 16


class LocalLink(abc.ABC):
    """On the mover's thread. Subclasses say what BIND brings along and what becomes of a frame."""

    fds_of_bound = 0

    def __init__(self, wiring: Wiring, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.slice = slice_
        self._wiring = wiring
        self._io = wiring.io
        self._batches = Batches(wiring.complete, pages_per_frame(slice_, FRAME_BYTES))
        self._sock: socket.socket | None = None
        self._up = False
        self._packet = b""  # made, and not taken by the socket yet

    # --- of the kind ---

    @abc.abstractmethod
    def _greet(self, sock: socket.socket, bind: bytes) -> bool:
        """Send BIND. True: frames may follow at once."""

    @abc.abstractmethod
    def _frame(self, seq: int, grant: GrantNo, pairs: Pairs) -> frames.Pages | frames.Placed:
        """What to say of these pages. BlockingIOError: not now, try again."""

    def _bound(self, bound: frames.Bound, fds: list[int]) -> None:
        """Takes over the descriptors."""
        close_all(fds)
        raise BadData(f"{self.peer} answered as another kind of transport")

    # --- from the mover ---

    def post(self, batch: Batch) -> None:
        self._batches.post(batch)
        if self._sock is None:
            self._dial()
        elif self._up:
            self._attempt(self._send)

    def cancel(self, grant: GrantNo) -> None:
        self._batches.cancel(grant)

    def fail(self, error: str) -> None:
        """See mover.PeerLink."""
        if self._sock is not None:
            self._io.watch(self._sock, 0, self._ready)
            self._sock.close()
        self._sock, self._up, self._packet = None, False, b""
        self._batches.fail(error)

    # --- the connection ---

    def _dial(self) -> None:
        try:
            self._check_host()
            self._sock = sock = dial_local(self.endpoint.host)
        except (OSError, ValueError) as error:  # a peer's HELLO may name an impossible address
            self._lost(error)
            return
        self._io.watch(sock, READ, self._ready)
        self._io.after(self._wiring.connect_timeout_s, lambda: self._give_up(sock))
        self._attempt(lambda: self._bind(sock))

    def _check_host(self) -> None:
        there, here = self.endpoint.where, host_identity()
        if there != here:
            raise ValueError(f"it shares memory on {there or 'no host'}, this process on {here or 'none'}")

    def _bind(self, sock: socket.socket) -> None:
        wiring, pool = self._wiring, self._wiring.pool
        bind = frames.Bind(
            frames.LOCAL_VERSION, wiring.seat, self.peer, self.endpoint.token, pool.pages, pool.page_bytes
        )
        self._up = self._greet(sock, frames.encode(bind))
        if self._up:
            self._send()

    def _give_up(self, sock: socket.socket) -> None:
        if self._sock is sock and not self._up:
            self._lost(TimeoutError(f"no answer within {self._wiring.connect_timeout_s:g} s"))

    def _lost(self, error: Exception) -> None:
        self.fail(f"peer {self.peer} at {self.endpoint.host} is gone: {error}")

    def _ready(self, mask: int) -> None:
        self._attempt(lambda: self._serve(mask))

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, BadData) as error:
            self._lost(error)
        except Exception as error:
            self._lost(error)
            raise

    def _serve(self, mask: int) -> None:
        if mask & READ:
            self._read()
        if self._up:
            self._send()

    def _read(self) -> None:
        for _ in range(PACKETS_PER_TURN):
            if self._sock is None:
                return
            try:
                packet, fds = receive_packet(self._sock, 0 if self._up else self.fds_of_bound)
            except BlockingIOError:
                return
            if not packet:
                raise ConnectionResetError("it closed the connection")
            self._take(packet, fds)

    def _take(self, packet: bytes, fds: list[int]) -> None:
        try:
            frame = frames.decode_to_mover(packet)
        except BadData:
            close_all(fds)
            raise
        if isinstance(frame, frames.Ack):
            close_all(fds)
            for seq, verdict in enumerate(frame.verdicts, frame.seq):
                self._batches.acked(seq, verdict)
        else:
            self._bound(frame, fds)
            self._up = True

    def _send(self) -> None:
        while self._sock is not None and (self._packet or self._make_packet()):
            try:
                send_packet(self._sock, self._packet)
            except BlockingIOError:
                break
            self._packet = b""
        if self._sock is not None:
            self._io.watch(self._sock, READ | WRITE if self._packet else READ, self._ready)

    def _make_packet(self) -> bool:
        head = self._batches.head() if self._batches.in_flight < WINDOW else None
        if head is None:
            return False
        try:
            self._packet = frames.encode(self._frame(*head))
        except BlockingIOError:
            sock = self._sock
            self._io.after(RETRY_S, lambda: self._again(sock))
            return False
        self._batches.begin()
        return True

    def _again(self, sock: socket.socket | None) -> None:
        if self._sock is sock and self._up:
            self._attempt(self._send)

    # --- for the kinds ---

    def _checksum(self, pairs: Pairs) -> int | None:
        if not self._wiring.checksum:
            return None
        return checksum.of_source(self._wiring.pool.memory, self.slice, pairs.src)
