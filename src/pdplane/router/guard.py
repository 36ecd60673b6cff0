"""Ends the worker's side of a leg, from every exit path: the abort call that goes with every close, and the release of
what prefill holds and nobody will fetch.

Routers in the field only close their connections, and workers may notice late or never (I06, I08, I11). Calls go
out beside the data path, are bounded in time and counted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

import msgspec

from pdplane.core.errors import Cause
from pdplane.wire.body import NOT_JSON

from .backends import Backend, EndedLeg, StopCall
from .call import CallFailed, call
from .records import HandoffRecord
from .worker import Worker

ABORT_TIMEOUT_S = 5.0
RELEASE_TRIES = 2
NATIVE = "native"
MISSING = frozenset({404, 405})


class _Released(msgspec.Struct):
    released: list[str] = []


class Guard:
    """`sent` and `failed` count abort calls; `releases` holds by what became of them."""

    def __init__(self, backend: Backend) -> None:
        self.sent = 0
        self.failed = 0
        self.releases: defaultdict[str, int] = defaultdict(int)
        self._backend = backend
        self._running: set[asyncio.Task[None]] = set()

    def abort(self, worker: Worker, ended: EndedLeg, cause: Cause, headers: bytes = b"") -> None:
        """Tell `worker` to end these samples of one attempt, and why. `headers`: the client's authorization, as a
        line."""
        if not worker.no_abort_call:
            self._start(self._abort(worker, self._backend.stop_calls(ended, cause), headers))

    def release(self, worker: Worker, request_id: str, record: HandoffRecord, headers: bytes = b"") -> None:
        """Tell `worker` to let go what it holds under this id of its own; `record` is told what came of it. An engine
        without such a call keeps it until its lease ends."""
        if not self._backend.releases:
            self._released(record, NATIVE)
            return
        self._start(self._release(worker, self._backend.release_call(request_id), record, headers))

    def _start(self, running: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(running)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _abort(self, worker: Worker, calls: list[StopCall], headers: bytes) -> None:
        for i, one in enumerate(calls):
            try:
                status, _ = await self._post(worker, one, headers)
            except CallFailed:
                self.failed += len(calls) - i
                return  # the worker is gone or deaf: the rest would only wait in line
            if status < 300:
                self.sent += 1
            elif status in MISSING and not self._backend.releases:
                worker.no_abort_call = True  # closing the connection is all that it understands
            else:
                self.failed += 1

    async def _release(self, worker: Worker, one: StopCall, record: HandoffRecord, headers: bytes) -> None:
        for _ in range(RELEASE_TRIES):
            try:
                status, body = await self._post(worker, one, headers)
            except CallFailed:
                continue
            if status < 300:
                self._released(record, "released" if _any_released(body) else "unknown")
                return
            if status < 500:
                break
        self._released(record, "failed")

    async def _post(self, worker: Worker, one: StopCall, headers: bytes) -> tuple[int, bytes]:
        return await call(worker.address, "POST", one.path, one.body, headers=headers, timeout_s=ABORT_TIMEOUT_S)

    def _released(self, record: HandoffRecord, outcome: str) -> None:
        self.releases[outcome] += 1
        record.release = outcome

    async def settle(self) -> None:
        """Wait for what is under way (bounded by the calls' own limit)."""
        if self._running:
            await asyncio.wait(set(self._running))


def _any_released(body: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Released).released)
    except NOT_JSON:
        return False
