"""Control sessions on asyncio: connections become events of the core, frames become bytes, and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from pdplane.core.events import Accepted, ConnLost, ControlEndpoint, DialFailed, Dialled, Event, FrameIn
from pdplane.core.frames import Frame
from pdplane.core.ids import ConnId, Rank
from pdplane.wire.control import BadFrame, FrameReader, UnknownKind, encode

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 3.0
UNSENT_LIMIT_BYTES = 16 * 1024 * 1024
FLUSH_LIMIT_S = 5.0


class ControlNet:
    """All control connections of one group. `post` takes events, `count` takes names of what was wrong."""

    def __init__(self, post: Callable[[Event], None], count: Callable[[str], None]) -> None:
        self._post, self._count = post, count
        self._conns: dict[ConnId, _Connection] = {}
        self._last = 0
        self._servers: list[asyncio.Server] = []
        self._dials: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int, here: Rank) -> int:
        """The port that our rank `here` listens on. Raises OSError where it is taken."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self, accepted_at=here), host, port)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def dial(self, endpoint: ControlEndpoint, here: Rank) -> None:
        task = asyncio.get_running_loop().create_task(self._dial(endpoint, here))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    def send(self, conn: ConnId, frame: Frame) -> None:
        if connection := self._conns.get(conn):
            connection.send(encode(frame))

    def close(self, conn: ConnId) -> None:
        """Flush and close; no ConnLost follows."""
        if connection := self._conns.pop(conn, None):
            connection.close()

    async def stop(self) -> None:
        for task in list(self._dials):
            task.cancel()
        for conn in list(self._conns):
            self.close(conn)
        for server in self._servers:
            server.close()

    async def _dial(self, endpoint: ControlEndpoint, here: Rank) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, accepted_at=None), endpoint.host, endpoint.port
                )
        except TimeoutError:
            self._post(DialFailed(endpoint, here, f"no answer within {DIAL_TIMEOUT_S:g} s"))
        except OSError as error:
            self._post(DialFailed(endpoint, here, error.strerror or str(error)))
        except (ValueError, OverflowError) as error:  # a registry may name an impossible address
            self._post(DialFailed(endpoint, here, str(error)))
        else:
            if connection.conn in self._conns:
                self._post(Dialled(endpoint, here, connection.conn))
            else:
                self._post(DialFailed(endpoint, here, "it closed the connection at once"))

    # --- for connections ---

    def opened(self, connection: _Connection, accepted_at: Rank | None) -> ConnId:
        self._last += 1
        conn = ConnId(self._last)
        self._conns[conn] = connection
        if accepted_at is not None:
            self._post(Accepted(conn, accepted_at))
        return conn

    def frame(self, conn: ConnId, frame: Frame | UnknownKind) -> None:
        if conn not in self._conns:
            return
        if isinstance(frame, UnknownKind):
            self._count("unknown_kind")
        else:
            self._post(FrameIn(conn, frame))

    def bad(self, conn: ConnId, error: BadFrame) -> None:
        self._count("bad_control_frame")
        log.warning("control connection closed: %s", error)
        if connection := self._conns.pop(conn, None):
            connection.close()
            self._post(ConnLost(conn))

    def lost(self, conn: ConnId, half_frame_bytes: int) -> None:
        if self._conns.pop(conn, None) is None:
            return  # closed by us, and counted if it was for bad bytes
        if half_frame_bytes:
            self._count("bad_control_frame")
        self._post(ConnLost(conn))


class _Connection(asyncio.Protocol):
    """`accepted_at`: our rank whose port took it; None where we dialled."""

    def __init__(self, net: ControlNet, *, accepted_at: Rank | None) -> None:
        self._net = net
        self._accepted_at = accepted_at
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self.conn = ConnId(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self.conn = self._net.opened(self, self._accepted_at)

    def data_received(self, data: bytes) -> None:
        try:
            frames, bad = self._reader.feed(data), None
        except BadFrame as error:
            frames, bad = error.before, error
        for frame in frames:
            self._net.frame(self.conn, frame)
        if bad is not None:
            self._net.bad(self.conn, bad)

    def connection_lost(self, exc: Exception | None) -> None:
        self._net.lost(self.conn, self._reader.half_frame_bytes)

    def send(self, data: bytes) -> None:
        """A peer that takes nothing is cut off before it costs memory; its session's clocks say the rest."""
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > UNSENT_LIMIT_BYTES:
            self._transport.abort()
            return
        self._transport.write(data)

    def close(self) -> None:
        """Flush and close; a peer that takes nothing is cut off after a while."""
        if self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(FLUSH_LIMIT_S, self._transport.abort)
