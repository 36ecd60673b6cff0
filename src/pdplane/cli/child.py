"""A child process of ours: its lines are shown under its name, its last ones kept for when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence

KEPT_LINES = 20
CONFIG_LINE = re.compile(r"(  \w+ = .*|[\w ]+ config)$")
PR_SET_PDEATHSIG = 1


class Child:
    """One process, in a session of its own: a Ctrl-C in the terminal reaches its supervisor alone."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        """`env` is added to ours."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=_dies_with(os.getpid()),
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> int:
        return await self._process.wait()

    async def end(self, limit_s: float) -> None:
        """SIGTERM, and SIGKILL where that is not enough in time."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), limit_s)
            except TimeoutError:
                print(f"{self.name} did not end within {limit_s:g} s: killed", file=sys.stderr, flush=True)
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        await self._reading

    def cut(self) -> None:
        """A second signal, whether there was a first one or not: it does not wait for what runs."""
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """At once; `end` still has to be awaited."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def obituary(self) -> str:
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        lines = "\n".join(f"    {line}" for line in self._last)
        end = "ended" if code == 0 else "died"
        return f"{self.name} (pid {self.pid}) {end}: {how}; its last lines:\n{lines}"

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if not CONFIG_LINE.match(line):  # the supervisor has shown the fleet's
                self._last.append(line)
                print(f"[{self.name}] {line}", flush=True)


def _dies_with(parent: int) -> Callable[[], None]:
    """Linux: a child must not outlive a supervisor that was killed."""

    def before_exec() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

    return before_exec
