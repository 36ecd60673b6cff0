"""Prefill's connection to one peer: bytes gathered from the pages by the kernel, or staged where a slice is no page.

One frame is under way at a time, so that one staging buffer serves them all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, PageId, Rank, Seat
from pdplane.core.slices import Slice

from . import checksum, slicing
from . import tcp_frames as frames
from .batches import Batch, Batches, pages_per_frame
from .contract import PAGES_PER_FRAME, Endpoint, Pairs
from .mover import Wiring
from .tcp_sockets import READ, WRITE, dial

FRAMES_PER_TURN = 16
STAGING_BYTES = 4 << 20
"""Of a frame that either side stages: a bound on memory, and on how long decode's scattering keeps a revoke waiting."""


class Sender:
    """Without a socket it dials when the next batch comes."""

    def __init__(self, wiring: Wiring, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        self.endpoint = endpoint
        self.slice = slice_
        self._wiring = wiring
        self._io = wiring.io
        self._version = _version(wiring, peer, slice_)
        self._bind = frames.Bind(wiring.seat, peer, endpoint.token, slice_.dst_page, self._version)
        pages = PAGES_PER_FRAME if slice_.whole else pages_per_frame(slice_, STAGING_BYTES)
        self._batches = Batches(wiring.complete, pages)
        self._straight = slicing.packed_at_source(slice_)
        self._staging = memoryview(bytearray(0 if self._straight else pages * slice_.size_bytes))
        self._sock: socket.socket | None = None
        self._up = False
        self._sending: list[memoryview] = []  # what is left of the frame under way
        self._acks = bytearray()

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
        self._sending = []
        if self._sock is not None:
            self._io.watch(self._sock, 0, self._ready)
            self._sock.close()
        self._sock, self._up = None, False
        self._acks.clear()
        self._batches.fail(error)

    # --- the connection ---

    def _dial(self) -> None:
        try:
            self._sock = sock = dial(Endpoint(self.endpoint.host, self.endpoint.port))
        except (OSError, ValueError, OverflowError) as error:  # a peer's HELLO may name an impossible address
            self._lost(error)
            return
        self._io.watch(sock, WRITE, self._ready)
        self._io.after(self._wiring.connect_timeout_s, lambda: self._give_up(sock))

    def _give_up(self, sock: socket.socket) -> None:
        if self._sock is sock and not self._up:
            self._lost(TimeoutError(f"no connection within {self._wiring.connect_timeout_s:g} s"))

    def _lost(self, error: Exception) -> None:
        host, port = self.endpoint.host, self.endpoint.port
        self.fail(f"peer {self._bind.dst} at {host}:{port} is gone: {error}")

    def _ready(self, mask: int) -> None:
        self._attempt(lambda: self._serve(mask))

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, frames.BadData) as error:
            self._lost(error)
        except Exception as error:
            self._lost(error)
            raise

    def _serve(self, mask: int) -> None:
        if self._sock is None:
            return
        if not self._up:
            self._connected(self._sock)
        if mask & READ:
            self._read_acks(self._sock)
        if mask & WRITE and self._sock is not None:
            self._send()

    def _connected(self, sock: socket.socket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._up = True
        self._sending = [memoryview(frames.encode_bind(self._bind))]

    # --- sending ---

    def _send(self) -> None:
        for _ in range(FRAMES_PER_TURN):
            if not self._sending:
                self._next_frame()
            if not self._sending or not self._send_some():
                break
        assert self._sock is not None
        self._io.watch(self._sock, READ | WRITE if self._sending or self._batches.waiting else READ, self._ready)

    def _send_some(self) -> bool:
        """False where the socket takes no more now."""
        assert self._sock is not None
        try:
            sent = self._sock.sendmsg(self._sending)
        except BlockingIOError:
            return False
        self._sending = list(_after(self._sending, sent))
        return True

    def _next_frame(self) -> None:
        head = self._batches.head()
        if head is not None:
            self._sending = self._frame(*head)
            self._batches.begin()

    def _frame(self, seq: int, grant: GrantNo, pairs: Pairs) -> list[memoryview]:
        memory, pages = self._wiring.pool.memory, pairs.src
        digest = checksum.of_source(memory, self.slice, pages) if self._wiring.checksum else None
        head = frames.PagesHead(len(pairs), seq, grant, self.slice.size_bytes, digest)
        data = frames.encode_pages_head(head, pairs.dst, self._version)
        return [memoryview(data), *self._payload(memory, pages)]

    def _payload(self, memory: memoryview, pages: Sequence[PageId]) -> list[memoryview]:
        if self._straight:
            size = self.slice.src_page
            return [memory[page * size : (page + 1) * size] for page in pages]
        staged = self._staging[: len(pages) * self.slice.size_bytes]
        slicing.gather(memory, self.slice, pages, staged)
        return [staged]

    # --- acks ---

    def _read_acks(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(65536)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("it closed the connection")
        self._acks += data
        whole = len(self._acks) - len(self._acks) % frames.ACK_BYTES
        acks = [bytes(self._acks[at : at + frames.ACK_BYTES]) for at in range(0, whole, frames.ACK_BYTES)]
        del self._acks[:whole]
        for ack in acks:
            self._batches.acked(*frames.decode_ack(ack, self._version))


def _after(views: Iterable[memoryview], sent: int) -> Iterable[memoryview]:
    """What is left of `views` when the first `sent` bytes are gone."""
    for view in views:
        if sent >= len(view):
            sent -= len(view)
        else:
            yield view[sent:] if sent else view
            sent = 0


def _version(wiring: Wiring, peer: Seat, slice_: Slice) -> int:
    """The lowest version of the data protocol that says what this connection has to say."""
    old = slice_.whole and not wiring.checksum and wiring.seat.rank == peer.rank == Rank()
    return 1 if old else 2
