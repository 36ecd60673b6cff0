"""A TCP forwarder that can be slow: what it is given on one address it hands on to another, so many bytes a second."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from gate import first_of

PIECE = 64 * 1024


class Throttle:
    """`bytes_per_s` holds for each connection and may be changed at any time; 0 is as fast as it goes. `passed`: bytes
    handed on so far, towards the target."""

    def __init__(self, host: str, port: int, to_host: str, to_port: int) -> None:
        self.bytes_per_s = 0
        self.passed = 0
        self._at = (host, port)
        self._to = (to_host, to_port)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Throttle:
        """Raises OSError where the address is taken."""
        self._server = await asyncio.start_server(self._connected, *self._at, limit=PIECE)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._to, limit=PIECE)
            await first_of(self._pump(reader, there_writer, slow=True), self._pump(there_reader, writer, slow=False))
            there_writer.close()
        except (OSError, asyncio.CancelledError):
            pass  # the end of one side is the end of the other
        finally:
            writer.close()
            self._open.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE):
                writer.write(data)
                await writer.drain()
                self.passed += len(data) if slow else 0
                if slow and self.bytes_per_s:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
