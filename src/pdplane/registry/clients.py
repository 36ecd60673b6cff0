"""Clients of many registries, one an address, kept alive and bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from .client import RegistryClient

MAX_CLIENTS = 256


class Clients:
    """`make(address)` is called once an address. Of more than `most`, the one unused for longest is closed; one in use
    never is. Used on one loop."""

    def __init__(self, make: Callable[[str], RegistryClient], most: int = MAX_CLIENTS) -> None:
        self._make = make
        self._most = most
        self._clients: dict[str, RegistryClient] = {}  # the latest used last
        self._users: dict[str, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._clients)

    @contextlib.contextmanager
    def of(self, address: str) -> Iterator[RegistryClient]:
        client = self._clients.pop(address, None) or self._make(address)
        self._clients[address] = client
        self._users[address] = self._users.get(address, 0) + 1
        try:
            yield client
        finally:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
            self._shrink()

    async def close(self) -> None:
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*(client.close() for client in clients), *self._closing)

    def _shrink(self) -> None:
        idle = (address for address in self._clients if address not in self._users)
        while len(self._clients) > self._most and (address := next(idle, None)) is not None:
            task = asyncio.get_running_loop().create_task(self._clients.pop(address).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            idle = (address for address in self._clients if address not in self._users)
