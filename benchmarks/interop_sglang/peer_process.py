"""SGLang's side as a child process that takes one command at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pdplane.core.ids import Rank, Shape

PEER = Path(__file__).with_name("peer.py")
STARTS_WITHIN_S = 120
ANSWERS_WITHIN_S = 60
LINE_BYTES = 1 << 24
HOW = (
    "It is made by `make interop-sglang`, or by hand: python -m venv .interop-sglang-venv, then with its pip "
    "install -r benchmarks/requirements-sglang.txt, then install --no-deps sglang==0.5.23"
)


Ports = dict[Rank, int]


class PeerFailed(Exception):
    """What SGLang's side raised."""


class Peer:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self.pid = process.pid

    async def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        self._stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        await self._stdin.drain()
        return await self.answer(ANSWERS_WITHIN_S)

    async def answer(self, within_s: float) -> dict[str, Any]:
        line = await asyncio.wait_for(self._stdout.readline(), within_s)
        if not line:
            raise PeerFailed("SGLang's process has ended; see what it wrote above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    async def register(self, port: int, shape: Shape, ranks: list[Rank], **more: Any) -> Ports:
        """A prefill manager for each rank registers: where they listen."""
        told = await self.do("register", port=port, shape=axes(shape), ranks=[axes(rank) for rank in ranks], **more)
        return dict(zip(ranks, told["ports"], strict=True))

    async def resolve(self, port: int, decode: Shape, rank: Rank, dp: int, **more: Any) -> dict[str, Any]:
        """What a rank of a decode learns of prefill's dp rank `dp`."""
        return await self.do("resolve", port=port, shape=axes(decode), rank=axes(rank), dp=dp, room=77, **more)

    async def take(self, port: int, shape: Shape, rank: Rank, rooms: list[int], **more: Any) -> list[int]:
        """A sender for each room, at a manager that has registered: their states."""
        told = await self.do("take", port=port, shape=axes(shape), rank=axes(rank), rooms=rooms, **more)
        return list(told["statuses"])

    async def serve(self) -> int:
        """SGLang's registry, fresh: its port."""
        port = free_port()
        await self.do("serve", port=port)
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            while not await listens(port):  # noqa: ASYNC110  (its thread tells nobody)
                await asyncio.sleep(0.01)
        return port


@contextlib.asynccontextmanager
async def running_peer(python: Path) -> AsyncIterator[Peer]:
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(str(python), str(PEER)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=empty,  # SGLang must not find a folder called gguf beside it
            limit=LINE_BYTES,
        )
        try:
            peer = Peer(process)
            try:
                await peer.answer(STARTS_WITHIN_S)
            except PeerFailed:
                log.seek(0)
                print(log.read().decode()[-3000:])
                raise
            yield peer
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def axes(place: Shape | Rank) -> dict[str, int]:
    return {"dp": place.dp, "cp": place.cp, "tp": place.tp, "pp": place.pp}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
