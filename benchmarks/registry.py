"""Requests per second of GET /route, keep-alive, against a registry in its own process; the load comes from this one.

    python benchmarks/registry.py [--concurrency 16] [--seconds 5] [--rounds 3] [--url http://HOST:PORT]

With --url it drives the registry that listens there (SGLang's, say) with the same load, after registering one rank.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import cast
from urllib.parse import urlsplit

import uvloop

from pdplane.registry.client import RegistryClient
from pdplane.registry.server import RegistryConfig, RegistryServer
from pdplane.wire.registry import one_rank

QUERY = "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
ONE_RANK = one_rank("127.0.0.1", 4000, page_size=16, kv_cache_dtype="float32")


class Asker(asyncio.Protocol):
    """One connection: asks, waits for the whole answer, asks again."""

    def __init__(self, request: bytes) -> None:
        self.answers = 0
        self._request = request
        self._buffer = b""
        self._answer_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._answer_bytes:
            self._answer_bytes = length_of_answer(self._buffer)
        if self._answer_bytes and len(self._buffer) >= self._answer_bytes:
            assert self._buffer.startswith(b"HTTP/1.1 200 "), self._buffer
            self._buffer = self._buffer[self._answer_bytes :]
            self.answers += 1
            self._transport.write(self._request)


def length_of_answer(start: bytes) -> int:
    """0 while the head is not whole. Every answer here is of the same length."""
    head, end, _body = start.partition(b"\r\n\r\n")
    if not end:
        return 0
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return len(head) + len(end) + int(lengths[0])


async def drive(host: str, port: int, concurrency: int, seconds: float) -> float:
    """Requests per second."""
    loop = asyncio.get_running_loop()
    request = f"GET {QUERY} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
    pairs = [await loop.create_connection(lambda: Asker(request), host, port) for _ in range(concurrency)]
    before = sum(asker.answers for _, asker in pairs)
    started = time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (sum(asker.answers for _, asker in pairs) - before) / (time.perf_counter() - started)
    for transport, _ in pairs:
        transport.close()
    return rate


def serve_here(tell: Connection) -> None:
    async def run() -> None:
        server = RegistryServer(RegistryConfig(port=0))
        await server.start()
        tell.send(server.port)
        await asyncio.Event().wait()

    uvloop.run(run())


async def measure(url: str, concurrency: int, seconds: float, rounds: int) -> list[float]:
    async with RegistryClient(url) as client:
        await client.register(ONE_RANK)
    target = urlsplit(url)
    assert target.hostname is not None
    assert target.port is not None
    return [await drive(target.hostname, target.port, concurrency, seconds) for _ in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    process = None
    url = options.url
    if not url:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve_here, args=(theirs,), daemon=True)
        process.start()
        url = f"http://127.0.0.1:{ours.recv()}"
    rates = uvloop.run(measure(url, options.concurrency, options.seconds, options.rounds))
    if process is not None:
        process.terminate()
        process.join()
    each = ", ".join(f"{rate:,.0f}" for rate in rates)
    print(f"GET /route, c={options.concurrency}: median {statistics.median(rates):,.0f} req/s ({each}) at {url}")


if __name__ == "__main__":
    main()
