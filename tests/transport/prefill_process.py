"""A prefill in a process of its own, for tests that stop and kill it. `prefill_process.py KIND SEAT` reads JSON lines:

    ["connect", endpoint]   ["move", number, grant, [[src, dst], ...]]   ["stop_inside_copy"]   ["stop_at_lock"]

and prints a JSON line ["wrote", number, error] for each completion. After a "stop_..." verb its next copy (of kind
shm_push: into decode's pool) stops the process by SIGSTOP: in the middle of it, or after it has seen that its grant
stands and before it has the lock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId, Rank, Seat
from pdplane.core.slices import whole_page
from pdplane.transport import page_lock, slicing
from pdplane.transport.contract import Pair
from pdplane.transport.pool import PagePool
from pdplane.transport.shm_mover import ShmMover
from pdplane.transport.shm_push_mover import ShmPushMover

PAGES, PAGE_BYTES = 256, 4096
D = Seat(Instance("d-1"), Rank())


class PrefillProcess:
    """The test's handle on it."""

    def __init__(self, kind: str, instance: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.prefill_process", kind, instance],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def connect(self, endpoint: DataEndpoint) -> None:
        self._say("connect", msgspec.to_builtins(endpoint))

    def move(self, number: int, grant: int, pairs: list[tuple[int, int]]) -> None:
        self._say("move", number, grant, pairs)

    def stop_inside_copy(self) -> None:
        self._say("stop_inside_copy")

    def stop_at_lock(self) -> None:
        self._say("stop_at_lock")

    def end_of(self, number: int) -> str:
        """The error of the next move to complete, which is this one."""
        assert self._process.stdout is not None
        verb, completed, error = json.loads(self._process.stdout.readline())
        assert (verb, completed) == ("wrote", number)
        return str(error)

    def wait_stopped(self) -> None:
        _pid, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.wait_stopped()

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _say(self, *line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()


def main() -> None:
    kind, instance = sys.argv[1:]
    pool = PagePool(PAGES, PAGE_BYTES)
    for page in range(PAGES):
        pool.page(PageId(page))[:] = bytes([page]) * PAGE_BYTES
    make = {"shm": ShmMover, "shm_push": ShmPushMover}[kind]
    mover = make(Seat(Instance(instance), Rank()), pool, tell)
    for line in sys.stdin:
        obey(mover, *json.loads(line))


def obey(mover: ShmMover, verb: str, *rest: Any) -> None:
    match verb:
        case "connect":
            mover.connect(D, msgspec.convert(rest[0], DataEndpoint), whole_page(PAGE_BYTES))
        case "move":
            number, grant, pairs = rest
            mover.move(MoveNo(number), GrantNo(grant), D, [Pair(PageId(src), PageId(dst)) for src, dst in pairs])
        case "stop_inside_copy":
            slicing.copy = stopping_after(slicing.copy)
        case "stop_at_lock":
            page_lock._lock = stopping_before(page_lock._lock)


def stopping_after(call: Callable[..., Any]) -> Callable[..., Any]:
    """In the middle of the copy: one byte of it has been written."""

    def stop(source: Any, src: Any, slice_: Any, target: Any, dst: Any) -> Any:
        target[dst[0] * PAGE_BYTES] = 0x77
        stop_here()
        return call(source, src, slice_, target, dst)

    return stop


def stopping_before(call: Callable[..., Any]) -> Callable[..., Any]:
    def stop(*arguments: Any) -> Any:
        stop_here()
        return call(*arguments)

    return stop


def stop_here() -> None:
    """Aimed at this thread, so that it is this one that does not go on."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def tell(number: MoveNo, error: str) -> None:
    print(json.dumps(["wrote", number, error]), flush=True)


if __name__ == "__main__":
    main()
