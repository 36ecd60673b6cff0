"""Routers before a pair: ours, and vLLM's own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from fleet import Process, free_ports

HOST = "127.0.0.1"


@dataclasses.dataclass
class ForeignRouter(Process):
    """A program that is not ours."""

    program: Path = Path()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [str(self.program), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextlib.asynccontextmanager
async def ours(folder: Path, prefill: str, decode: str, settings: Sequence[str]) -> AsyncIterator[Process]:
    """`pdplane router`, ready when entered."""
    [port] = free_ports(1)
    arguments = ["router", "--port", str(port), "--prefill", prefill, "--decode", decode, *settings]
    process = Process("router", arguments, f"http://{HOST}:{port}", folder / f"router-{port}.log")
    async with _running(process, "/ready"):
        yield process


@contextlib.asynccontextmanager
async def vllms(folder: Path, program: Path, prefill: str, decode: str) -> AsyncIterator[Process]:
    """`vllm-router` in its mode for NIXL pairs, ready when entered."""
    port, prometheus = free_ports(2)
    arguments = [
        *("--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--kv-connector", "nixl"),
        *("--host", HOST, "--port", str(port), "--prometheus-port", str(prometheus), "--log-level", "warning"),
    ]
    log = folder / f"vllm-router-{port}.log"
    process = ForeignRouter("vllm-router", arguments, f"http://{HOST}:{port}", log, program=program)
    async with _running(process, "/readiness"):
        yield process


@contextlib.asynccontextmanager
async def _running(process: Process, path: str) -> AsyncIterator[None]:
    process.start()
    try:
        await asyncio.to_thread(process.wait_ready, path)
        yield
    finally:
        await asyncio.to_thread(process.stop)
