"""A worker with a rule engine as a process of its own, which a test can freeze: `Process`, and what it runs.

Its engine is held and let go by lines on its standard input: a number of steps, "free", or "spent", which is answered
once the steps are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pdplane.worker.config import WorkerConfig
from pdplane.worker.server import serve

from .fake_engine import RuleEngine, spec
from .fleets import HOST, LIMIT_S, client
from .http_fakes import ByteTokenizer

ROOT = Path(__file__).parent.parent.parent


class Process:
    def __init__(self, process: asyncio.subprocess.Process, ports: dict[str, int]) -> None:
        self._process, self.ports = process, ports
        self.url = f"http://{HOST}:{ports['port']}"

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    async def allow(self, steps: int | None) -> None:
        """The engine may do so many more steps; None: as many as it wants. Returns when it has heard of it."""
        await self._say(b"free\n" if steps is None else b"%d\n" % steps)

    async def spent(self) -> None:
        """Returns when the steps that were allowed are done."""
        await self._say(b"spent\n")

    async def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        async with asyncio.timeout(LIMIT_S):
            while (await self._process.stdout.readline()) not in (b"heard\n", b""):
                pass

    async def figures(self) -> dict[str, Any]:
        async with client(self.url) as http:
            told: dict[str, Any] = (await http.get("/server_info")).json()["figures"]
            return told

    async def until(self, **figures: int) -> None:
        """Its figures are these, and where `idle` is one of them, every page is free or cached."""
        idle = figures.pop("idle", 0)
        async with asyncio.timeout(LIMIT_S):
            while True:
                told = await self.figures()
                held = sum(count for state, count in told["pages"].items() if state not in ("free", "cached"))
                if all(told[name] == value for name, value in figures.items()) and not (idle and held):
                    return
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def own_process(role: str, ports: dict[str, int], **settings: Any) -> AsyncIterator[Process]:
    """In service when it is yielded; killed in the end."""
    given = json.dumps({"role": role, "page_size": 4, "pool_mb": 1, "shutdown_s": 0.1, **ports, **settings})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.worker.own_process", given),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(3 * LIMIT_S):
            ready = await process.stdout.readline()
        assert b"ready at" in ready, ready
        yield Process(process, ports)
    finally:
        process.kill()
        await process.communicate()


def main() -> None:
    given = json.loads(sys.argv[1])
    given["transport"] = tuple(given["transport"])
    engine = RuleEngine(spec())

    def heed() -> None:
        for line in sys.stdin:
            if line == "spent\n":
                while engine.allow:
                    time.sleep(0.001)
            else:
                engine.allow = None if line == "free\n" else int(line)
            print("heard", flush=True)

    threading.Thread(target=heed, daemon=True).start()
    say = lambda text: print(text, flush=True)  # noqa: E731
    asyncio.run(serve(WorkerConfig(**given), lambda _: (engine, ByteTokenizer()), say))


if __name__ == "__main__":
    main()
