"""The registry as a server: embedded in a prefill worker, or on its own for one prefill group, whose instances may come
and go behind its address."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import time
from collections.abc import Callable

from pdplane.core.ids import Room
from pdplane.settings import BadSetting, check_token, setting
from pdplane.wire.address import is_loopback, url_of

from .http import HttpConnection
from .rooms import MAX_ROOMS, ROOM_TTL_S, RoomTable
from .routes import Routes
from .table import RouteTable

log = logging.getLogger(__name__)

SWEEP_S = 15.0


@dataclasses.dataclass(frozen=True)
class RegistryConfig:
    host: str = setting(
        "127.0.0.1", "address to listen on; one beyond loopback needs --write-token or --allow-insecure"
    )
    port: int = setting(8998, "port to listen on, the bootstrap port of the prefill; 0 takes any free one")
    write_token: str = setting("", "Bearer token that registering needs; empty lets anyone register", secret=True)
    allow_insecure: bool = setting(
        False, "let whoever reaches it register: the network keeps others out, or SGLang's prefills must"
    )
    expire_s: float = setting(
        0.0, "silence after which a rank is gone that named no time itself; 0 never, as SGLang's ranks register once"
    )
    room_ttl_s: float = setting(ROOM_TTL_S, "seconds (up to twice as many) that a room's dp rank is kept")
    max_rooms: int = setting(MAX_ROOMS, "rooms kept at most; the oldest half goes when it is full")
    keep_alive_s: float = setting(75.0, "seconds after which an idle connection is closed")
    log_level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        """Raises BadSetting: who registers is where decodes send their requests' pages from."""
        check_token("write_token", self.write_token)
        if not (self.write_token or self.allow_insecure or is_loopback(self.host)):
            raise BadSetting(
                f"--host {self.host} is not loopback: whoever reaches it could register as the prefill. Give it "
                "--write-token and every prefill the same --registry-token, or say --allow-insecure where the network "
                "itself keeps others out (SGLang's prefills know no token)"
            )


class RegistryServer:
    """`table` and `rooms` may be read on the same loop. Stopping closes every connection."""

    def __init__(self, config: RegistryConfig | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config or RegistryConfig()
        self.table = RouteTable(self.config.expire_s)
        self.rooms = RoomTable(clock(), ttl_s=self.config.room_ttl_s, capacity=self.config.max_rooms)
        self._clock = clock
        self._routes = Routes(self.table, self.rooms, clock, self.config.write_token)
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listens when it returns. BadSetting where the address cannot be had."""
        host, port = self.config.host, self.config.port
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._connection, host, port)
        except (OSError, OverflowError) as error:
            raise BadSetting(
                f"the registry cannot listen on {host}:{port}: {error}; choose another --host or --port, or port 0"
            ) from None
        self._sweep_timer = loop.call_later(SWEEP_S, self._sweep)

    @property
    def port(self) -> int:
        assert self._server is not None, "not started"
        return int(self._server.sockets[0].getsockname()[1])

    def take_room(self, room: Room, dp_rank: int) -> None:
        """As POST /register_dp_rank does, for the process that the registry is embedded in."""
        self.rooms.put(room, dp_rank, self._clock())

    async def stop(self) -> None:
        """Idempotent."""
        if self._server is None:
            return
        assert self._sweep_timer is not None
        self._sweep_timer.cancel()
        self._server.close()
        for connection in list(self._connections):
            connection.close()
        await self._server.wait_closed()
        self._server = None

    def close_idle(self) -> int:
        """How many connections were idle for longer than `keep_alive_s`, or never got to say what they want."""
        limit = self._clock() - self.config.keep_alive_s
        idle = [connection for connection in self._connections if connection.last_used < limit]
        for connection in idle:
            connection.close()
        return len(idle)

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._routes, self._connections, self._clock)

    def _sweep(self) -> None:
        self.close_idle()
        self.table.expire(self._clock())
        self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


async def serve(config: RegistryConfig) -> None:
    """Runs a registry on its own until SIGINT, SIGTERM or a cancel."""
    server = RegistryServer(config)
    await server.start()
    if not config.write_token and not is_loopback(config.host):
        log.warning("whoever reaches %s can register here; --write-token says who may", config.host)
    print(f"registry at {url_of(config.host, server.port)} (Ctrl-C stops it)", flush=True)
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    try:
        await asked_to_stop.wait()
    finally:
        await server.stop()
