"""A relay before a server: it sees a generation pass in each direction, and can hold or change what passes.

A client that leaves "between the hops" needs a moment that lasts: the gate makes one. What it holds it never lets go:
the connection ends when its client leaves, and then the gate leaves the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

GENERATIONS = (b"POST /v1/completions", b"POST /v1/chat/completions")
CHUNK_BYTES = 1 << 16


class Gate:
    """`asked`: a generation has come from the client; `answered`: the server's first byte to one has. Both since the
    last `reset`."""

    def __init__(self, port: int) -> None:
        """`port`: of the server, on loopback."""
        self._port = port
        self._connections: set[asyncio.Task[None]] = set()
        self.url = ""
        self.reset()

    def reset(
        self,
        *,
        hold_requests: bool = False,
        hold_answers: bool = False,
        rewrite: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """For the generations that begin from now on. `rewrite` changes each chunk of an answer, not its length."""
        self.asked, self.answered = asyncio.Event(), asyncio.Event()
        self._hold_requests, self._hold_answers = hold_requests, hold_answers
        self._rewrite = rewrite

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Gate]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()  # as if nobody listened
            return
        try:
            await first_of(connection.to_server(reader, up_writer), connection.to_client(up_reader, writer))
        finally:
            for end in (writer, up_writer):
                end.close()

    def passing(self, data: bytes) -> bool:
        """Whether a request begins here that is a generation; it counts."""
        if not data.startswith(GENERATIONS):
            return False
        self.asked.set()
        return True

    @property
    def holds_requests(self) -> bool:
        return self._hold_requests

    def answer(self, data: bytes) -> bytes:
        """What the client gets of it: b"" while answers are held."""
        self.answered.set()
        if self._hold_answers:
            return b""
        return self._rewrite(data) if self._rewrite else data


class _Connection:
    """One client's; kept alive, it carries looks and generations in turn."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._generation = False
        self._held = False

    async def to_server(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await _some(reader):
            if data.startswith((b"GET ", b"POST ")):
                self._generation = self._gate.passing(data)
                self._held = self._generation and self._gate.holds_requests
            if not self._held:
                writer.write(data)
                await writer.drain()

    async def to_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await _some(reader):
            if passed := self._gate.answer(data) if self._generation else data:
                writer.write(passed)
                await writer.drain()


async def first_of(*pumps: Coroutine[None, None, None]) -> None:
    """Until one has ended; the other is ended then."""
    tasks = [asyncio.create_task(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _some(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(CHUNK_BYTES)
    except OSError:
        return b""
