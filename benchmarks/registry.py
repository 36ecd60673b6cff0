"""Registry against registry: requests per second and CPU per request of GET /route and POST /register_dp_rank.

    python benchmarks/registry.py [--rounds 5] [--seconds 2] [--connections 16] [--peer .interop-sglang-venv/bin/python]

Ours and SGLang 0.5.23's real one run in one process each, on loopback, asked by this process over kept connections.
Rounds alternate, and only figures of one run compare. Exit 1 where ours is slower in either. Without SGLang's
environment ours is measured alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import cast

import msgspec
import uvloop

from pdplane.core.ids import Rank, Shape
from pdplane.registry.client import RegistryClient
from pdplane.registry.server import RegistryConfig, RegistryServer
from pdplane.wire.registry import registration_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks/interop_sglang"))

from peer_process import HOW, running_peer  # noqa: E402

SHAPE = Shape(dp=2)
ROOMS = 1 << 16
SETTLE_S = 0.2
_TICKS = os.sysconf("SC_CLK_TCK")
_GET = b"GET /route?prefill_dp_rank=1&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0 HTTP/1.1\r\nHost: x\r\n\r\n"
_POST = b"POST /register_dp_rank HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


def posts() -> list[bytes]:
    """One a room, all of them different."""
    bodies = (json.dumps({"bootstrap_room": room, "dp_rank": room % 2}).encode() for room in range(1, ROOMS + 1))
    return [_POST % (len(body), body) for body in bodies]


class Registry(msgspec.Struct):
    name: str
    port: int
    pid: int
    rates: dict[str, list[float]] = {}
    cpu_us: dict[str, list[float]] = {}


class Asker(asyncio.Protocol):
    """One connection: asks, waits for the whole answer, asks again."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self.answers = 0
        self._requests = requests
        self._buffer = b""
        self._answer_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._answer_bytes:
            self._answer_bytes = length_of_answer(self._buffer)
        if self._answer_bytes and len(self._buffer) >= self._answer_bytes:
            assert self._buffer.startswith(b"HTTP/1.1 200 "), self._buffer
            self._buffer = self._buffer[self._answer_bytes :]
            self.answers += 1
            self._transport.write(next(self._requests))


def length_of_answer(start: bytes) -> int:
    """0 while the head is not whole. Every answer of one connection is of the same length."""
    head, end, _body = start.partition(b"\r\n\r\n")
    if not end:
        return 0
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return len(head) + len(end) + int(lengths[0])


async def drive(registry: Registry, requests: list[bytes], connections: int, seconds: float) -> tuple[float, float]:
    """Requests per second, and the registry's CPU microseconds a request."""
    loop = asyncio.get_running_loop()
    starts = [len(requests) * number // connections for number in range(connections)]
    cycles = [itertools.cycle(requests[start:] + requests[:start]) for start in starts]
    pairs = [
        await loop.create_connection(functools.partial(Asker, cycle), "127.0.0.1", registry.port) for cycle in cycles
    ]
    await asyncio.sleep(SETTLE_S)
    before, cpu_before, started = sum(asker.answers for _, asker in pairs), cpu_s(registry.pid), time.perf_counter()
    await asyncio.sleep(seconds)
    took_s, cpu = time.perf_counter() - started, cpu_s(registry.pid) - cpu_before
    answers = sum(asker.answers for _, asker in pairs) - before
    for transport, _ in pairs:
        transport.close()
    return answers / took_s, cpu / answers * 1e6


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def serve_ours(tell: Connection) -> None:
    async def run() -> None:
        server = RegistryServer(RegistryConfig(port=0))
        await server.start()
        tell.send(server.port)
        await asyncio.Event().wait()

    uvloop.run(run())


@contextlib.contextmanager
def ours() -> Iterator[Registry]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_ours, args=(there,), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield Registry("ours", here.recv(), process.pid)
    finally:
        process.terminate()
        process.join()


@contextlib.asynccontextmanager
async def sglangs(python: Path) -> AsyncIterator[Registry]:
    async with running_peer(python) as peer:
        yield Registry("SGLang", await peer.serve(), peer.pid)


async def fill(registry: Registry) -> None:
    async with RegistryClient(f"http://127.0.0.1:{registry.port}") as client:
        for dp in range(SHAPE.dp):
            said = registration_of(Rank(dp), SHAPE, "127.0.0.1", 4000 + dp, page_size=16, kv_cache_dtype="float32")
            await client.register(said)


async def measure(registries: list[Registry], rounds: int, connections: int, seconds: float) -> None:
    asked = {"GET /route": [_GET], "POST /register_dp_rank": posts()}
    for registry in registries:
        await fill(registry)
    for _ in range(rounds):
        for what, requests in asked.items():
            for registry in registries:
                rate, cpu_us = await drive(registry, requests, connections, seconds)
                registry.rates.setdefault(what, []).append(rate)
                registry.cpu_us.setdefault(what, []).append(cpu_us)


def report(registries: list[Registry]) -> bool:
    """Whether ours is at least as fast as each other one in everything."""
    first, *others = registries
    fast_enough = True
    for what, rates in first.rates.items():
        for registry in registries:
            each = ", ".join(f"{rate:,.0f}" for rate in registry.rates[what])
            rate, cpu_us = median(registry.rates[what]), median(registry.cpu_us[what])
            print(f"{what:24} {registry.name:7} median {rate:8,.0f} req/s, CPU {cpu_us:5.1f} us/request ({each})")
        for other in others:
            ratio = median(rate / theirs for rate, theirs in zip(rates, other.rates[what], strict=True))
            fast_enough &= ratio >= 1.0
            print(f"{what:24} {first.name} / {other.name}: {ratio:.2f}, median over the rounds")
    return fast_enough


async def run(options: argparse.Namespace) -> int:
    async with contextlib.AsyncExitStack() as stack:
        registries = [stack.enter_context(ours())]
        if options.peer.exists():
            registries.append(await stack.enter_async_context(sglangs(options.peer)))
        else:
            print(f"Ours alone: {options.peer} is missing. {HOW}")
        await measure(registries, options.rounds, options.connections, options.seconds)
    return 0 if report(registries) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--peer", type=Path, default=ROOT / ".interop-sglang-venv/bin/python")
    sys.exit(uvloop.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
