"""Decode's end over TCP: listens, and holds what all of its connections share (tcp_receiver.py reads them)."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Sequence

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, PageId, Seat
from pdplane.core.slices import Slice

from .checksum import Verifier
from .contract import Capabilities, LandedCallback, QuietCallback
from .io_thread import IoThread
from .landing_table import LandingTable
from .pool import PagePool
from .tcp_receiver import Receiver
from .tcp_sockets import READ, listen, tune

log = logging.getLogger(__name__)

MAX_UNBOUND = 64
"""Connections that have not said who they are. One more closes the oldest: they hold no room's bytes."""


class TcpLanding:
    """contract.Landing. Callbacks come on its thread. Counters: `bad_frames`, and `table.discarded` by verdict."""

    capabilities = Capabilities(push=True, pull=False, fence=True, one_sided=False)

    def __init__(
        self,
        seat: Seat,
        pool: PagePool,
        on_landed: LandedCallback,
        on_quiet: QuietCallback,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str = "",
        verifier: Verifier | None = None,
    ) -> None:
        """Listens from now on. Port 0 takes any free one. `advertise_host`: the address that prefills dial, needed
        where `host` is a wildcard. OSError where the port is taken, ValueError without an address to dial."""
        if host in ("", "0.0.0.0", "::") and not advertise_host:
            raise ValueError(
                f"the data port listens on {host or 'every address'!r}: name the address that prefills dial"
            )
        self.seat = seat
        self.pool = pool
        self.table = LandingTable(pool.pages, pool.page_bytes, on_landed, on_quiet)
        self.verifier = verifier or Verifier(pool)
        self.bad_frames = 0
        self._listener = listen(host, port)
        self.endpoint = DataEndpoint(
            "tcp", host=advertise_host or host, port=self._listener.getsockname()[1], token=secrets.token_hex(16)
        )
        self._receivers: dict[Receiver, None] = {}
        self._io = IoThread(f"pdplane-landing-{seat}")
        self._io.post(lambda: self._io.watch(self._listener, READ, self._accept))
        self._io.start()

    def arm(self, grant: GrantNo, peer: Seat, pages: Sequence[PageId], slice_: Slice) -> None:
        self.table.arm(grant, peer, pages, slice_)

    def revoke(self, grant: GrantNo) -> bool:
        return self.table.revoke(grant)

    def disarm(self, grant: GrantNo) -> None:
        self.table.disarm(grant)

    def teardown(self, peer: Instance) -> bool:
        """No read into a page of this peer's grants begins after this. False where one has begun: `revoke` tells when
        it is over (the control thread waits for nothing)."""
        proved = self.table.cut(peer)
        self._io.post(lambda: self._close_peer(peer))
        return proved

    def close(self) -> None:
        self._io.post(self._close_all)
        self._io.stop()

    # --- on the thread ---

    def _accept(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _address = self._listener.accept()
            tune(sock)
            self._receivers[Receiver(self, self._io, sock)] = None
        unbound = [receiver for receiver in self._receivers if receiver.peer is None]
        for receiver in unbound[: max(0, len(unbound) - MAX_UNBOUND)]:
            receiver.close()

    def _close_peer(self, peer: Instance) -> None:
        for receiver in [each for each in self._receivers if each.peer is not None and each.peer.instance == peer]:
            receiver.close()

    def _close_all(self) -> None:
        self._io.watch(self._listener, 0, self._accept)
        self._listener.close()
        for receiver in list(self._receivers):
            receiver.close()

    def bad_frame(self, reason: str) -> None:
        self.bad_frames += 1
        log.warning("data connection closed: %s", reason)

    def forget(self, receiver: Receiver) -> None:
        self._receivers.pop(receiver, None)
