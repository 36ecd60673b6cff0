"""One prefill's data connection, as decode reads it: from the socket straight into the granted pages.

Each read into pages is one non-blocking recvmsg inside the landing table's `enter`: a thread is never parked in the
kernel with a page's address in hand, so that a revoke is quiet after at most one such call. What a revoked frame
still has to say is read into scratch, because the connection carries other rooms too. A slice that does not lie in
decode's pages as it comes is read into staging, and scattered in one go inside one `enter`.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import PageId, Seat

from . import checksum, slicing
from . import tcp_frames as frames
from .checksum import Verifier
from .io_thread import IoThread
from .landing_table import Claim, LandingTable, Verdict
from .pool import PagePool
from .tcp_frames import BadData
from .tcp_sockets import READ, WRITE

log = logging.getLogger(__name__)

SCRATCH_BYTES = 1 << 20
MAX_UNREAD_ACKS_BYTES = 1 << 20
READS_PER_TURN = 16

_scratch = memoryview(bytearray(SCRATCH_BYTES))  # written by all, read by nobody


class Owner(Protocol):
    """The landing that listens."""

    seat: Seat
    pool: PagePool
    table: LandingTable
    verifier: Verifier
    endpoint: DataEndpoint

    def bad_frame(self, reason: str) -> None: ...

    def forget(self, receiver: Receiver) -> None: ...


class Frame:
    """A PAGES frame being read. `claim` while it may still land, else `verdict` says why not."""

    def __init__(self, head: frames.PagesHead, pages: Sequence[PageId], claimed: Claim | Verdict) -> None:
        self.seq = head.seq
        self.checksum = head.checksum
        self.pages = pages
        self.page_bytes = head.page_bytes
        self.size = self.left = head.count * head.page_bytes
        self.claim = claimed if isinstance(claimed, Claim) else None
        self.verdict = claimed if isinstance(claimed, Verdict) else Verdict.LANDED

    @property
    def staged(self) -> bool:
        return self.claim is not None and not slicing.packed_at_target(self.claim.slice)

    def page_views(self, pool: PagePool) -> list[memoryview]:
        """Where the rest of the frame goes."""
        done, offset = divmod(self.size - self.left, self.page_bytes)
        size = pool.page_bytes  # the pages are claimed, so they are the pool's
        views = [pool.memory[page * size : (page + 1) * size] for page in self.pages[done:]]
        views[0] = views[0][offset:]
        return views


class Receiver:
    """BIND, then PAGES frames, each answered by an ACK. `peer` is None until bound.

    `_want` bytes of a head are gathered in `_head`, then `_then` takes them; while `_frame` is set, pages are read.
    """

    def __init__(self, landing: Owner, io: IoThread, sock: socket.socket) -> None:
        self.peer: Seat | None = None
        self._landing = landing
        self._table = landing.table
        self._pool = landing.pool
        self._io = io
        self._sock = sock
        self._version = 1
        self._head = bytearray()
        self._want = frames.BIND_HEAD_BYTES
        self._then: Callable[[bytearray], None] = self._bind_head
        self._frame: Frame | None = None
        self._staging = memoryview(bytearray())
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

    def _bind_head(self, data: bytearray) -> None:
        head = frames.decode_bind_head(data)
        self._expect(head.rest, lambda rest: self._bound(frames.decode_bind(head, rest)))

    def _bound(self, bind: frames.Bind) -> None:
        if not hmac.compare_digest(bind.token.encode(), self._landing.endpoint.token.encode()):
            raise BadData(f"{bind.src} came with a wrong token")
        if bind.dst != self._landing.seat:
            raise BadData(f"{bind.src} asked for {bind.dst}, this is {self._landing.seat}")
        if bind.page_bytes != self._pool.page_bytes:
            raise BadData(f"{bind.src} has pages of {bind.page_bytes} bytes, this pool of {self._pool.page_bytes}")
        self.peer = bind.src
        self._version = bind.version
        self._expect_pages()

    def _expect_pages(self) -> None:
        self._expect(frames.pages_head_bytes(self._version), self._pages_head)

    def _pages_head(self, data: bytearray) -> None:
        head = frames.decode_pages_head(data, self._version)
        if head.seq != self._last_seq + 1:
            raise BadData(f"frame {head.seq} of {self.peer} where {self._last_seq + 1} is due")
        if not 1 <= head.page_bytes <= self._pool.page_bytes:
            raise BadData(f"{head.page_bytes} bytes a page, this pool has pages of {self._pool.page_bytes}")
        if head.checksum is not None and not checksum.AVAILABLE:
            raise BadData(f"{self.peer} sends checksums; {checksum.REMEDY}")
        self._last_seq = head.seq
        self._expect(head.count * 4, lambda ids: self._begin(head, frames.decode_page_ids(ids)))

    # --- pages ---

    def _begin(self, head: frames.PagesHead, pages: list[PageId]) -> None:
        assert self.peer is not None
        claimed = self._table.claim(head.grant, self.peer, pages, head.count * head.page_bytes)
        self._frame = frame = Frame(head, pages, claimed)
        if frame.staged and len(self._staging) < frame.size:
            self._staging = memoryview(bytearray(frame.size))
        self._expect_pages()

    def _read_pages(self, frame: Frame) -> int:
        if frame.claim is None:
            return self._into_scratch(frame)
        if frame.staged:
            return self._into_staging(frame, frame.claim)
        if self._table.enter(frame.claim):
            return self._into_pages(frame, frame.claim)
        self._refuse(frame, frame.claim)
        return self._into_scratch(frame)

    def _into_pages(self, frame: Frame, claim: Claim) -> int:
        """One read, entered already."""
        verdict = Verdict.LANDED
        with self._inside(claim):
            size = self._sock.recvmsg_into(frame.page_views(self._pool))[0]
            frame.left -= size
            if not frame.left:
                verdict = self._landing.verifier.verdict(claim, frame.checksum)
        if frame.left:
            self._table.leave(claim)
        else:
            self._finish(frame, claim, verdict)
        return size

    def _into_staging(self, frame: Frame, claim: Claim) -> int:
        size = self._sock.recv_into(self._staging[frame.size - frame.left : frame.size])
        frame.left -= size
        if not frame.left:
            self._scatter(frame, claim)
        return size

    def _scatter(self, frame: Frame, claim: Claim) -> None:
        if not self._table.enter(claim):
            self._refuse(frame, claim)
            self._done(frame, frame.verdict)
            return
        with self._inside(claim):
            slicing.scatter(self._staging[: frame.size], claim.slice, claim.pages, self._pool.memory)
            verdict = self._landing.verifier.verdict(claim, frame.checksum)
        self._finish(frame, claim, verdict)

    @contextlib.contextmanager
    def _inside(self, claim: Claim) -> Iterator[None]:
        """Whatever goes wrong in here, this read is over: a revoke waits for it."""
        try:
            yield
        except BaseException:
            self._table.leave(claim)
            raise

    def _finish(self, frame: Frame, claim: Claim, verdict: Verdict) -> None:
        frame.claim = None
        self._done(frame, self._table.finish(claim, verdict))

    def _refuse(self, frame: Frame, claim: Claim) -> None:
        frame.claim = None
        frame.verdict = self._table.abandon(claim)

    def _into_scratch(self, frame: Frame) -> int:
        size = self._sock.recv_into(_scratch[: frame.left])
        frame.left -= size
        if not frame.left:
            self._done(frame, frame.verdict)
        return size

    # --- acks ---

    def _done(self, frame: Frame, verdict: Verdict) -> None:
        self._frame = None
        self._acks += frames.encode_ack(frame.seq, verdict, self._version)
        if len(self._acks) > MAX_UNREAD_ACKS_BYTES:
            raise BadData(f"{self.peer} does not read its acks")
        self._send_acks()

    def _send_acks(self) -> None:
        with contextlib.suppress(BlockingIOError):
            del self._acks[: self._sock.send(self._acks)]
        self._io.watch(self._sock, READ | WRITE if self._acks else READ, self._ready)
