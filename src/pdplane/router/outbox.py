"""Collects what is written during one turn of the loop and flushes it once, at the turn's end.

All reads first, then all writes: a stream's paced chunk costs a third less that way (benchmarks/router.py).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger(__name__)


class Writable(Protocol):
    transport: asyncio.Transport | None


class Outbox:
    """Pending bytes by connection. A connection that closes gracefully must be flushed first."""

    __slots__ = ("_loop", "_pending")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: dict[Writable, bytes] = {}

    def write(self, connection: Writable, data: bytes) -> None:
        pending = self._pending
        if not pending:
            self._loop.call_soon(self.flush)
        before = pending.get(connection)
        pending[connection] = data if before is None else before + data

    def flush(self) -> None:
        """One connection's fault is its own: the bytes of all others go out."""
        pending, self._pending = self._pending, {}
        for connection, data in pending.items():
            transport = connection.transport
            if transport is not None:
                try:
                    transport.write(data)
                except Exception:
                    log.exception("a connection that takes no bytes is cut")
                    transport.abort()

    def flush_one(self, connection: Writable) -> None:
        data = self._pending.pop(connection, None)
        if data is not None and connection.transport is not None:
            connection.transport.write(data)

    def drop(self, connection: Writable) -> bool:
        """Forget what is pending; True where there was something, so that nothing of it was ever sent."""
        return self._pending.pop(connection, None) is not None
