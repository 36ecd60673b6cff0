"""Our workers as what can be killed and started again, and what our processes logged."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

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


def errors_logged(processes: Sequence[Process]) -> list[str]:
    """A dead peer is none, nor a client that left."""
    return [
        f"{process.name}: {line}"
        for process in processes
        for line in process.log.read_text(errors="replace").splitlines()
        if " ERROR " in line or line.startswith("Traceback")
    ]
