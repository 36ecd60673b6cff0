"""Our workers as what can be killed and started again."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from fleet import Process


@dataclasses.dataclass(frozen=True)
class OurServer:
    process: Process

    @property
    def url(self) -> str:
        return self.process.url

    def kill(self) -> None:
        self.process.kill()

    def start(self) -> None:
        self.process.start()

    async def ready(self) -> float:
        """Seconds until it is healthy."""
        started = time.monotonic()
        await asyncio.to_thread(self.process.wait_ready)
        return time.monotonic() - started
