"""A fleet of real processes on free loopback ports, for benchmarks and trials: start, look, kill, stop.

Everything started here is ended here, by pid, also when the caller fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

READY_LIMIT_S = 120.0
STOP_LIMIT_S = 15.0


def free_ports(count: int) -> list[int]:
    """Ports that are free now, below the ephemeral range: a long load run must not collide with them. From a random one
    on: two runs that begin together must not either."""
    found: list[int] = []
    for port in range(20_000 + secrets.randbelow(11_000), 32_000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")


@dataclasses.dataclass
class Process:
    """One `pdplane` process and where it listens."""

    name: str
    arguments: list[str]
    url: str
    log: Path
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "pdplane", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, reaped."""
        assert self.popen is not None
        self.popen.kill()
        self.popen.wait()

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def terminate(self) -> None:
        """SIGTERM, also to a stopped process: it takes it when it goes on."""
        if self.popen is not None and self.popen.poll() is None:
            self.popen.terminate()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.popen.pid, signal.SIGCONT)

    def stop(self) -> int | None:
        """SIGTERM, then SIGKILL; the exit code."""
        if self.popen is None:
            return None
        if self.popen.poll() is None:
            self.terminate()
            try:
                self.popen.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        return self.popen.returncode

    def get(self, path: str, timeout_s: float = 5.0) -> Any:
        return httpx.get(self.url + path, timeout=timeout_s, trust_env=False).json()

    def figures(self) -> dict[str, Any]:
        """What must be back at its idle value when nothing runs."""
        told: dict[str, Any] = self.get("/server_info")["figures"]
        return told

    def metric(self, name: str) -> float:
        """Summed over its labels; 0 where nothing was counted yet."""
        return sum(self.metric_by(name, "").values())

    def metric_by(self, name: str, label: str) -> dict[str, float]:
        """The samples of a metric, summed by the value of one label."""
        text = httpx.get(self.url + "/metrics", timeout=5.0, trust_env=False).text
        found: dict[str, float] = {}
        for line in text.splitlines():
            if match := re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
                value = labels.get(label, "")
                found[value] = found.get(value, 0.0) + float(match[2])
        return found

    def record(self, key: str) -> Any:
        """What it says of a request; None where it does not know it."""
        answer = httpx.get(f"{self.url}/requests/{key}", timeout=5.0, trust_env=False)
        return answer.json() if answer.status_code == 200 else None

    def wait_ready(self, path: str = "/health") -> None:
        until = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < until:
            if self.popen is not None and self.popen.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.popen.returncode}:\n{self.tail()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + path, timeout=2.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} was not ready after {READY_LIMIT_S:g} s:\n{self.tail()}")

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclasses.dataclass
class Fleet:
    prefills: list[Process]
    decodes: list[Process]
    aggregated: list[Process]
    router: Process | None

    @property
    def workers(self) -> list[Process]:
        return [*self.prefills, *self.decodes, *self.aggregated]

    @property
    def all(self) -> list[Process]:
        return [*self.workers, *([self.router] if self.router else [])]


@contextlib.contextmanager
def fleet(
    prefill: int = 1,
    decode: int = 1,
    aggregated: int = 0,
    *,
    worker_args: Sequence[str] = (),
    prefill_args: Sequence[str] = (),
    decode_args: Sequence[str] = (),
    router_args: Sequence[str] = (),
) -> Iterator[Fleet]:
    """Ready when entered, stopped when left. The router fronts the pairs; aggregated workers stand alone. A role's
    arguments come before those of all workers."""
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="pdplane-fleet-") as folder:
        by_role = {
            "prefill": [*prefill_args, *worker_args],
            "decode": [*decode_args, *worker_args],
            "aggregated": worker_args,
        }
        made = _plan(Path(folder), prefill, decode, aggregated, by_role, router_args)
        try:
            for process in made.all:
                process.start()
            for process in made.workers:
                process.wait_ready()
            if made.router:
                made.router.wait_ready("/ready")
            yield made
        finally:
            end(made.all)


def end(processes: Sequence[Process]) -> None:
    """All together: the time that one takes is the time that all take."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.stop()


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that no process is left behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # not SIGINT: shells let it be ignored in the background

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _plan(
    folder: Path,
    prefill: int,
    decode: int,
    aggregated: int,
    by_role: Mapping[str, Sequence[str]],
    router_args: Sequence[str],
) -> Fleet:
    ports = iter(free_ports(2 * prefill + decode + aggregated + 1))

    def worker(role: str, index: int, extra: Sequence[str] = ()) -> Process:
        port = next(ports)
        arguments = ["worker", "--role", role, "--port", str(port), "--log-level", "warning", *extra, *by_role[role]]
        return Process(f"{role} {index}", arguments, f"http://127.0.0.1:{port}", folder / f"{role}-{index}.log")

    bootstraps = [next(ports) for _ in range(prefill)]
    prefills = [worker("prefill", i, ["--bootstrap-port", str(bootstraps[i])]) for i in range(prefill)]
    decodes = [worker("decode", i) for i in range(decode)]
    whole = [worker("aggregated", i) for i in range(aggregated)]
    if not prefill or not decode:
        return Fleet(prefills, decodes, whole, None)
    port = next(ports)
    arguments = ["router", "--port", str(port), "--log-level", "warning", *router_args]
    for process, bootstrap in zip(prefills, bootstraps, strict=True):
        arguments += ["--prefill", f"{process.url}@{bootstrap}"]
    for process in decodes:
        arguments += ["--decode", process.url]
    router = Process("router", arguments, f"http://127.0.0.1:{port}", folder / "router.log")
    return Fleet(prefills, decodes, whole, router)
