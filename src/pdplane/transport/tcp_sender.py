"""Prefill's connection to one peer: bytes gathered from the pages by the kernel, or staged where a slice is no page.

One frame is under way at a time, so that one staging buffer serves them all.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, MoveNo, PageId, Rank, Seat
from pdplane.core.slices import Slice

from . import checksum, slicing
from . import tcp_frames as frames
from .contract import PAGES_PER_FRAME, Endpoint, Pair
from .io_thread import IoThread
from .landing_table import Verdict
from .pool import PagePool
from .tcp_sockets import READ, WRITE, dial

FRAMES_PER_TURN = 16
STAGING_BYTES = 4 << 20
"""Of a frame that either side stages: a bound on memory, and on how long decode's scattering keeps a revoke waiting."""


class Batch:
    """One move. `frames` are not begun yet; `unacked` counts those that are and have no ACK."""

    __slots__ = ("begun", "error", "frames", "grant", "number", "pairs", "unacked")

    def __init__(self, number: MoveNo, grant: GrantNo, pairs: tuple[Pair, ...]) -> None:
        self.number = number
        self.grant = grant
        self.pairs = pairs
        self.frames: deque[tuple[Pair, ...]] = deque()
        self.begun = False
        self.unacked = 0
        self.error = ""

    def addressable(self) -> bool:
        """No page number of the peer's that the wire has no room for."""
        return all(0 <= pair.dst < 2**32 for pair in self.pairs)

    def cut(self, pages: int) -> None:
        """Into frames of so many pages."""
        starts = range(0, len(self.pairs), pages)
        self.frames.extend(self.pairs[start : start + pages] for start in starts)


class Owner(Protocol):
    """The mover that posts."""

    seat: Seat
    pool: PagePool
    connect_timeout_s: float
    checksum: bool

    def complete(self, batch: Batch, error: str) -> None: ...


class Sender:
    """Without a socket it dials when the next batch comes."""

    def __init__(self, mover: Owner, io: IoThread, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        self._mover = mover
        self._io = io
        self._endpoint = endpoint
        self._slice = slice_
        self._version = _version(mover, peer, slice_)
        self._bind = frames.Bind(mover.seat, peer, endpoint.token, slice_.dst_page, self._version)
        self._straight = slicing.packed_at_source(slice_)
        fitting = PAGES_PER_FRAME if slice_.whole else max(1, STAGING_BYTES // slice_.size_bytes)
        self._pages_per_frame = min(PAGES_PER_FRAME, fitting)
        self._staging = memoryview(bytearray(0 if self._straight else self._pages_per_frame * slice_.size_bytes))
        self._sock: socket.socket | None = None
        self._up = False
        self._queue: deque[Batch] = deque()
        self._unacked: deque[Batch] = deque()  # of frames begun, in the order of their seq
        self._seq = 0
        self._acked = 0
        self._sending: list[memoryview] = []  # what is left of the frame under way
        self._acks = bytearray()

    def leads_to(self, endpoint: DataEndpoint, slice_: Slice) -> bool:
        return self._endpoint == endpoint and self._slice == slice_

    def post(self, batch: Batch) -> None:
        batch.cut(self._pages_per_frame)
        self._queue.append(batch)
        if self._sock is None:
            self._dial()
        elif self._up:
            self._attempt(self._send)

    def cancel(self, grant: GrantNo) -> None:
        dropped = [batch for batch in self._queue if batch.grant == grant and not batch.begun]
        self._queue = deque(batch for batch in self._queue if batch not in dropped)
        for batch in dropped:
            self._mover.complete(batch, "cancelled")

    def fail(self, error: str) -> None:
        """Close; everything outstanding completes with `error`, once. No source page is read after this."""
        self._sending = []
        if self._sock is not None:
            self._io.watch(self._sock, 0, self._ready)
            self._sock.close()
        outstanding = list(dict.fromkeys((*self._unacked, *self._queue)))
        self._sock, self._up, self._seq, self._acked = None, False, 0, 0
        self._queue.clear()
        self._unacked.clear()
        self._acks.clear()
        for batch in outstanding:
            self._mover.complete(batch, batch.error or error)

    # --- the connection ---

    def _dial(self) -> None:
        try:
            self._sock = sock = dial(Endpoint(self._endpoint.host, self._endpoint.port))
        except (OSError, ValueError, OverflowError) as error:  # a peer's HELLO may name an impossible address
            self._lost(error)
            return
        self._io.watch(sock, WRITE, self._ready)
        self._io.after(self._mover.connect_timeout_s, lambda: self._give_up(sock))

    def _give_up(self, sock: socket.socket) -> None:
        if self._sock is sock and not self._up:
            self._lost(TimeoutError(f"no connection within {self._mover.connect_timeout_s:g} s"))

    def _lost(self, error: Exception) -> None:
        host, port = self._endpoint.host, self._endpoint.port
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
        self._io.watch(self._sock, READ | WRITE if self._sending or self._queue else READ, self._ready)

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
        if not self._queue:
            return
        batch = self._queue[0]
        pairs = batch.frames.popleft()
        if not batch.frames:
            self._queue.popleft()
        batch.begun = True
        batch.unacked += 1
        self._seq += 1
        self._unacked.append(batch)
        self._sending = self._frame(batch.grant, pairs)

    def _frame(self, grant: GrantNo, pairs: tuple[Pair, ...]) -> list[memoryview]:
        pool, pages = self._mover.pool, [pair.src for pair in pairs]
        digest = checksum.of_source(pool.memory, self._slice, pages) if self._mover.checksum else None
        head = frames.PagesHead(len(pairs), self._seq, grant, self._slice.size_bytes, digest)
        data = frames.encode_pages_head(head, [pair.dst for pair in pairs], self._version)
        return [memoryview(data), *self._payload(pages)]

    def _payload(self, pages: list[PageId]) -> list[memoryview]:
        pool = self._mover.pool
        if self._straight:
            return [pool.page(page) for page in pages]
        staged = self._staging[: len(pages) * self._slice.size_bytes]
        slicing.gather(pool.memory, self._slice, pages, staged)
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
            self._take_ack(*frames.decode_ack(ack, self._version))

    def _take_ack(self, seq: int, verdict: Verdict) -> None:
        if not self._unacked or seq != self._acked + 1:
            raise frames.BadData(f"ack {seq} where {self._acked + 1} of {self._seq} is due")
        self._acked = seq
        batch = self._unacked.popleft()
        batch.unacked -= 1
        if verdict is not Verdict.LANDED:
            batch.error = batch.error or f"discarded: {verdict}"
            self._drop_rest(batch)
        if not batch.unacked and not batch.frames:
            self._mover.complete(batch, batch.error)

    def _drop_rest(self, batch: Batch) -> None:
        """What has not begun of a discarded move would be discarded too."""
        if batch.frames:
            batch.frames.clear()
            self._queue.remove(batch)


def _after(views: Iterable[memoryview], sent: int) -> Iterable[memoryview]:
    """What is left of `views` when the first `sent` bytes are gone."""
    for view in views:
        if sent >= len(view):
            sent -= len(view)
        else:
            yield view[sent:] if sent else view
            sent = 0


def _version(mover: Owner, peer: Seat, slice_: Slice) -> int:
    """The lowest version of the data protocol that says what this connection has to say."""
    old = slice_.whole and not mover.checksum and mover.seat.rank == peer.rank == Rank()
    return 1 if old else 2
