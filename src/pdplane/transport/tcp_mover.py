"""Prefill's end over TCP: a queue per peer, one connection each, bytes gathered from the pages by the kernel.

A move is cut into frames of at most 64 pages. It is complete when every frame's ACK has come, so that completion
means visible in decode's pool, not handed to a socket.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pdplane.core.ids import GrantNo, Instance, MoveNo

from . import tcp_frames as frames
from .contract import PAGES_PER_FRAME, Capabilities, Endpoint, Pair, WroteCallback
from .io_thread import IoThread
from .landing_table import Verdict
from .pool import PagePool
from .tcp_sockets import READ, WRITE, dial

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FRAMES_PER_TURN = 16


class _Batch:
    """One move. `frames` are not begun yet; `unacked` counts those that are and have no ACK."""

    __slots__ = ("begun", "error", "frames", "grant", "number", "unacked")

    def __init__(self, number: MoveNo, grant: GrantNo, pairs: Sequence[Pair]) -> None:
        self.number = number
        self.grant = grant
        starts = range(0, len(pairs), PAGES_PER_FRAME)
        self.frames = deque(tuple(pairs[start : start + PAGES_PER_FRAME]) for start in starts)
        self.begun = False
        self.unacked = 0
        self.error = ""

    def addressable(self) -> bool:
        """No page number of the peer's that the wire has no room for."""
        return all(0 <= pair.dst < 2**32 for frame in self.frames for pair in frame)


class TcpMover:
    """contract.Mover. Callbacks come on its thread."""

    capabilities = Capabilities(push=True, pull=False, fence=True, one_sided=False)

    def __init__(
        self,
        instance: Instance,
        pool: PagePool,
        on_wrote: WroteCallback,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.instance = instance
        self.pool = pool
        self.connect_timeout_s = connect_timeout_s
        self._on_wrote = on_wrote
        self._links: dict[Instance, _Link] = {}
        self._closed = False
        self._io = IoThread(f"pdplane-mover-{instance}")
        self._io.start()

    def connect(self, peer: Instance, endpoint: Endpoint, token: str) -> None:
        self._io.post(lambda: self._connect(peer, endpoint, token))

    def move(self, number: MoveNo, grant: GrantNo, peer: Instance, pairs: Sequence[Pair]) -> None:
        """IndexError for a source page outside the pool, before anything is posted."""
        if self._closed:
            raise RuntimeError(f"move {number} posted to a closed mover")
        for pair in pairs:
            self.pool.page(pair.src)
        batch = _Batch(number, grant, pairs)
        self._io.post(lambda: self._post(peer, batch))

    def cancel(self, grant: GrantNo, peer: Instance) -> None:
        self._io.post(lambda: self._with_link(peer, lambda link: link.cancel(grant)))

    def teardown(self, peer: Instance) -> None:
        self._io.post(lambda: self._teardown(peer, "torn down"))

    def close(self) -> None:
        """Every outstanding move completes with an error before this returns. Idempotent."""
        self._closed = True
        self._io.post(self._close_all)
        self._io.stop()

    # --- on the thread ---

    def complete(self, batch: _Batch, error: str) -> None:
        try:
            self._on_wrote(batch.number, error)
        except Exception:
            log.exception("completion callback of move %s", batch.number)

    def _connect(self, peer: Instance, endpoint: Endpoint, token: str) -> None:
        link = self._links.get(peer)
        if link is not None and link.leads_to(endpoint, token):
            return
        self._teardown(peer, f"peer {peer} has another endpoint now")
        bind = frames.Bind(self.instance, peer, token, self.pool.page_bytes)
        self._links[peer] = _Link(self, self._io, endpoint, bind)

    def _post(self, peer: Instance, batch: _Batch) -> None:
        link = self._links.get(peer)
        if not batch.frames:
            self.complete(batch, "")
        elif not batch.addressable():
            self.complete(batch, f"discarded: {Verdict.NOT_GRANTED}")
        elif link is None:
            self.complete(batch, f"peer {peer} is not connected")
        else:
            link.post(batch)

    def _with_link(self, peer: Instance, call: Callable[[_Link], None]) -> None:
        if peer in self._links:
            call(self._links[peer])

    def _teardown(self, peer: Instance, error: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.fail(error)

    def _close_all(self) -> None:
        for peer in list(self._links):
            self._teardown(peer, "the mover was closed")


class _Link:
    """The connection to one peer. Without a socket it dials when the next batch comes."""

    def __init__(self, mover: TcpMover, io: IoThread, endpoint: Endpoint, bind: frames.Bind) -> None:
        self._mover = mover
        self._io = io
        self._endpoint = endpoint
        self._bind = bind
        self._sock: socket.socket | None = None
        self._up = False
        self._queue: deque[_Batch] = deque()
        self._unacked: deque[_Batch] = deque()  # of frames begun, in the order of their seq
        self._seq = 0
        self._acked = 0
        self._sending: list[memoryview] = []  # what is left of the frame under way
        self._acks = bytearray()

    def leads_to(self, endpoint: Endpoint, token: str) -> bool:
        return self._endpoint == endpoint and self._bind.token == token

    def post(self, batch: _Batch) -> None:
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
            self._sock = sock = dial(self._endpoint)
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
        head = frames.PagesHead(len(pairs), self._seq, batch.grant)
        pool = self._mover.pool
        self._sending = [
            memoryview(frames.encode_pages_head(head, pool.page_bytes, [pair.dst for pair in pairs])),
            *(pool.page(pair.src) for pair in pairs),
        ]

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
            self._take_ack(*frames.decode_ack(ack))

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

    def _drop_rest(self, batch: _Batch) -> None:
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
