"""Ends the worker's side of a leg: the abort call that goes with every close, from every exit path.

Routers in the field only close their connections, and workers may notice late or never (I06, I08, I11). Calls go
out beside the data path, are bounded in time and counted.
"""

from __future__ import annotations

import asyncio

import msgspec

from pdplane.core.errors import Cause
from pdplane.core.ids import Rid, Room

from .call import CallFailed, call
from .worker import Worker

ABORT_TIMEOUT_S = 5.0


class Guard:
    def __init__(self) -> None:
        self.sent = 0
        self.failed = 0
        self._running: set[asyncio.Task[None]] = set()

    def abort(
        self, worker: Worker, rids: tuple[Rid, ...], rooms: tuple[Room, ...], cause: Cause, headers: bytes = b""
    ) -> None:
        """Tell `worker` to end these samples of one attempt, and why. `headers`: the client's authorization, as a
        line."""
        task = asyncio.get_running_loop().create_task(self._abort(worker, rids, rooms, cause, headers))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _abort(
        self, worker: Worker, rids: tuple[Rid, ...], rooms: tuple[Room, ...], cause: Cause, headers: bytes
    ) -> None:
        why = {"code": cause.code, "message": cause.message}
        for i, rid in enumerate(rids):
            body = msgspec.json.encode(
                {"rid": rid, "room": rooms[i] if rooms else None, "abort_all": False, "cause": why}
            )
            try:
                status, _ = await call(
                    worker.address, "POST", "/abort_request", body, headers=headers, timeout_s=ABORT_TIMEOUT_S
                )
            except CallFailed:
                self.failed += len(rids) - i
                return  # the worker is gone or deaf: the rest would only wait in line
            if status < 300:
                self.sent += 1
            else:
                self.failed += 1

    async def settle(self) -> None:
        """Wait for what is under way (bounded by the calls' own limit)."""
        if self._running:
            await asyncio.wait(set(self._running))
