"""Decode's end over TCP: listens, and holds what all of its connections share (tcp_receiver.py reads them)."""

from __future__ import annotations

import secrets
import socket
from typing import ClassVar

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import Seat

from .checksum import Verifier
from .contract import Capabilities, LandedCallback, QuietCallback
from .landing import PageLanding
from .pool import PagePool
from .tcp_receiver import Receiver
from .tcp_sockets import listen, tune


class TcpLanding(PageLanding):
    """contract.Landing."""

    capabilities = Capabilities(push=True, pull=False, fence=True, one_sided=False)
    kind: ClassVar[str] = "tcp"

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
        listener = listen(host, port)
        dialled = advertise_host or host, listener.getsockname()[1]
        endpoint = DataEndpoint(self.kind, host=dialled[0], port=dialled[1], token=secrets.token_hex(16))
        super().__init__(seat, pool, on_landed, on_quiet, verifier, listener, endpoint)

    def _connection(self, sock: socket.socket) -> Receiver:
        tune(sock)
        return Receiver(self, self._io, sock)
