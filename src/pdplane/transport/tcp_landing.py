"""Decode's end over TCP: bytes go from the socket straight into the granted pages, placed by this side alone.

Each read into pages is one non-blocking recvmsg inside the landing table's `enter`: a thread is never parked in the
kernel with a page's address in hand, so that a revoke is quiet after at most one such call. What a revoked frame
still has to say is read into scratch, because the connection carries other rooms too.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Sequence

from pdplane.core.ids import GrantNo, Instance, PageId

from . import tcp_frames as frames
from .contract import Capabilities, Endpoint, LandedCallback, QuietCallback
from .io_thread import IoThread
from .landing_table import Claim, LandingTable, Verdict
from .pool import PagePool
from .tcp_frames import BadData
from .tcp_sockets import READ, WRITE, listen, tune

log = logging.getLogger(__name__)

SCRATCH_BYTES = 1 << 20
MAX_UNBOUND = 64
"""Connections that have not said who they are. One more closes the oldest: they hold no room's bytes."""
MAX_UNREAD_ACKS_BYTES = 1 << 20
READS_PER_TURN = 16


class TcpLanding:
    """contract.Landing. Callbacks come on its thread. Counters: `bad_frames`, and `table.discarded` by verdict."""

    capabilities = Capabilities(push=True, pull=False, fence=True, one_sided=False)

    def __init__(
        self,
        instance: Instance,
        pool: PagePool,
        on_landed: LandedCallback,
        on_quiet: QuietCallback,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str = "",
    ) -> None:
        """Listens from now on. Port 0 takes any free one. `advertise_host`: the address that prefills dial, needed
        where `host` is a wildcard. OSError where the port is taken, ValueError without an address to dial."""
        if host in ("", "0.0.0.0", "::") and not advertise_host:
            raise ValueError(
                f"the data port listens on {host or 'every address'!r}: name the address that prefills dial"
            )
        self.instance = instance
        self.pool = pool
        self.table = LandingTable(pool.pages, on_landed, on_quiet)
        self.token = secrets.token_hex(16)
        self.bad_frames = 0
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._listener = listen(host, port)
        self.endpoint = Endpoint(advertise_host or host, self._listener.getsockname()[1])
        self._connections: dict[_Connection, None] = {}
        self._io = IoThread(f"pdplane-landing-{instance}")
        self._io.post(lambda: self._io.watch(self._listener, READ, self._accept))
        self._io.start()

    def arm(self, grant: GrantNo, peer: Instance, pages: Sequence[PageId]) -> None:
        self.table.arm(grant, peer, pages)

    def revoke(self, grant: GrantNo) -> bool:
        return self.table.revoke(grant)

    def disarm(self, grant: GrantNo) -> None:
        self.table.disarm(grant)

    def teardown(self, peer: Instance) -> None:
        """No read into a page of this peer's grants begins after this. One that has begun is `revoke`'s to tell."""
        self.table.cut(peer)
        self._io.post(lambda: self._close_peer(peer))

    def close(self) -> None:
        self._io.post(self._close_all)
        self._io.stop()

    # --- on the thread ---

    def _accept(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _address = self._listener.accept()
            tune(sock)
            self._connections[_Connection(self, self._io, sock)] = None
        unbound = [connection for connection in self._connections if connection.peer is None]
        for connection in unbound[: max(0, len(unbound) - MAX_UNBOUND)]:
            connection.close()

    def _close_peer(self, peer: Instance) -> None:
        for connection in [connection for connection in self._connections if connection.peer == peer]:
            connection.close()

    def _close_all(self) -> None:
        self._io.watch(self._listener, 0, self._accept)
        self._listener.close()
        for connection in list(self._connections):
            connection.close()

    def bad_frame(self, reason: str) -> None:
        self.bad_frames += 1
        log.warning("data connection closed: %s", reason)

    def forget(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)


class _Frame:
    """A PAGES frame being read. `claim` while it may still land, else `verdict` says why not."""

    def __init__(self, seq: int, pages: Sequence[PageId], page_bytes: int) -> None:
        self.seq = seq
        self.pages = pages
        self.page_bytes = page_bytes
        self.left = len(pages) * page_bytes
        self.claim: Claim | None = None
        self.verdict = Verdict.LANDED

    def page_views(self, pool: PagePool) -> list[memoryview]:
        """Where the rest of the frame goes."""
        done, offset = divmod(len(self.pages) * self.page_bytes - self.left, self.page_bytes)
        views = [pool.page(page) for page in self.pages[done:]]
        views[0] = views[0][offset:]
        return views


class _Connection:
    """One prefill's connection: BIND, then PAGES frames, each answered by an ACK. `peer` is None until bound.

    `_want` bytes of a head are gathered in `_head`, then `_then` takes them; while `_frame` is set, pages are read.
    """

    def __init__(self, landing: TcpLanding, io: IoThread, sock: socket.socket) -> None:
        self.peer: Instance | None = None
        self._landing = landing
        self._table = landing.table
        self._pool = landing.pool
        self._io = io
        self._sock = sock
        self._head = bytearray()
        self._want = frames.BIND_HEAD_BYTES
        self._then: Callable[[bytearray], None] = self._bind_head
        self._frame: _Frame | None = None
        self._last_seq = 0
        self._acks = bytearray()
        self._closed = False
        io.watch(sock, READ, self._ready)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._frame is not None and self._frame.claim is not None:
            self._table.abandon(self._frame.claim)
        self._io.watch(self._sock, 0, self._ready)
        self._sock.close()
        self._landing.forget(self)

    def _ready(self, mask: int) -> None:
        if self._closed:
            return
        try:
            if mask & WRITE:
                self._send_acks()
            if mask & READ:
                self._read()
        except BadData as bad:
            self._landing.bad_frame(str(bad))
            self.close()
        except OSError as error:
            log.debug("data connection of %s lost: %s", self.peer, error)
            if self._in_frame:
                self._landing.bad_frame(f"half a frame of {self.peer}: {error}")
            self.close()
        except Exception:
            self.close()
            raise

    @property
    def _in_frame(self) -> bool:
        at_head = self._then in (self._bind_head, self._pages_head)
        return self._frame is not None or bool(self._head) or not at_head

    def _read(self) -> None:
        for _ in range(READS_PER_TURN):
            if self._closed:
                return
            try:
                more = self._read_pages(self._frame) if self._frame is not None else self._read_head()
            except BlockingIOError:
                return
            if not more:
                self._at_end()
                return

    def _at_end(self) -> None:
        if self._in_frame:
            raise BadData(f"half a frame of {self.peer or 'an unknown peer'}: the connection ended inside it")
        self.close()

    # --- heads ---

    def _read_head(self) -> int:
        data = self._sock.recv(self._want - len(self._head))
        self._head += data
        if len(self._head) == self._want:
            head, self._head = self._head, bytearray()
            self._then(head)
        return len(data)

    def _expect(self, want: int, then: Callable[[bytearray], None]) -> None:
        self._want = want
        self._then = then

    def _bind_head(self, head: bytearray) -> None:
        lengths = frames.bind_lengths(head)
        self._expect(sum(lengths[:3]), lambda names: self._bound(frames.decode_bind(lengths, names)))

    def _bound(self, bind: frames.Bind) -> None:
        if not hmac.compare_digest(bind.token.encode(), self._landing.token.encode()):
            raise BadData(f"{bind.src} came with a wrong token")
        if bind.dst != self._landing.instance:
            raise BadData(f"{bind.src} asked for {bind.dst}, this is {self._landing.instance}")
        if bind.page_bytes != self._pool.page_bytes:
            raise BadData(f"{bind.src} has pages of {bind.page_bytes} bytes, this pool of {self._pool.page_bytes}")
        self.peer = bind.src
        self._expect(frames.PAGES_HEAD_BYTES, self._pages_head)

    def _pages_head(self, data: bytearray) -> None:
        head = frames.decode_pages_head(data, self._pool.page_bytes)
        if head.seq != self._last_seq + 1:
            raise BadData(f"frame {head.seq} of {self.peer} where {self._last_seq + 1} is due")
        self._last_seq = head.seq
        self._expect(head.count * 4, lambda ids: self._begin(head, frames.decode_page_ids(ids)))

    # --- pages ---

    def _begin(self, head: frames.PagesHead, pages: list[PageId]) -> None:
        assert self.peer is not None
        frame = _Frame(head.seq, pages, self._pool.page_bytes)
        claimed = self._table.claim(head.grant, self.peer, pages)
        if isinstance(claimed, Claim):
            frame.claim = claimed
        else:
            frame.verdict = claimed
        self._frame = frame
        self._expect(frames.PAGES_HEAD_BYTES, self._pages_head)

    def _read_pages(self, frame: _Frame) -> int:
        if frame.claim is not None and not self._table.enter(frame.claim):
            frame.verdict = self._table.abandon(frame.claim)
            frame.claim = None
        return self._into_scratch(frame) if frame.claim is None else self._into_pages(frame, frame.claim)

    def _into_pages(self, frame: _Frame, claim: Claim) -> int:
        """One read, entered already."""
        try:
            size = self._sock.recvmsg_into(frame.page_views(self._pool))[0]
        except BaseException:  # whatever it was, this read is over: a revoke waits for it
            self._table.leave(claim)
            raise
        frame.left -= size
        if frame.left:
            self._table.leave(claim)
        else:
            frame.claim = None
            self._done(frame, self._table.finish(claim))
        return size

    def _into_scratch(self, frame: _Frame) -> int:
        size = self._sock.recv_into(self._landing.scratch[: frame.left])
        frame.left -= size
        if not frame.left:
            self._done(frame, frame.verdict)
        return size

    # --- acks ---

    def _done(self, frame: _Frame, verdict: Verdict) -> None:
        self._frame = None
        self._acks += frames.encode_ack(frame.seq, verdict)
        if len(self._acks) > MAX_UNREAD_ACKS_BYTES:
            raise BadData(f"{self.peer} does not read its acks")
        self._send_acks()

    def _send_acks(self) -> None:
        with contextlib.suppress(BlockingIOError):
            del self._acks[: self._sock.send(self._acks)]
        self._io.watch(self._sock, READ | WRITE if self._acks else READ, self._ready)
