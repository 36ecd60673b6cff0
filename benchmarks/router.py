"""Router against router: requests per second, latency and CPU per request, in one run, rounds alternated.

Fake workers and the load share the machine with the router under test, so only figures of one run compare. The peer
is sglang-router 0.3.2, where the given Python can import it::

    python -m venv .bench-venv && .bench-venv/bin/pip install sglang-router==0.3.2
    python benchmarks/router.py [--rounds 3] [--seconds 3] [--connections 32] [--peer .bench-venv/bin/python]

Rows: `short` is a non-streaming chat over 32 connections, `one` the same over one connection, `paced` streams that
get a chunk every 20 ms (CPU is per chunk there).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httptools
import uvloop

CHUNKS = 50
PACE_S = 0.02
PACED_STREAMS = 100
_TICKS = os.sysconf("SC_CLK_TCK")
_CHAT = b"/v1/chat/completions"
_EVENT = b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'


# --- a worker that costs next to nothing ------------------------------------------------------------------------


def plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_ANSWER = plain(
    json.dumps(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "fake",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
        }
    ).encode()
)
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class FakeWorker(asyncio.Protocol):
    """Answers at once; streams advance together on one clock, as a decode batch does."""

    streams: dict[FakeWorker, int]
    role = "decode"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.url, self.body = b"", b""

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:  # the peer asks whether this is gRPC
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self.url, self.body = url, b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.transport.write(self.answer())  # type: ignore[attr-defined]

    def answer(self) -> bytes:
        if self.url == _CHAT:
            if b'"stream":true' not in self.body.replace(b" ", b""):
                return _ANSWER
            if self.role == "prefill":
                return _STREAM + chunk(_EVENT) + _LAST
            self.streams[self] = CHUNKS
            return _STREAM
        if self.url.startswith(b"/server_info"):
            info = {"served_model_name": "fake", "model_path": "fake", "disaggregation_mode": self.role, "tp_size": 1}
            return plain(json.dumps(info).encode())
        if self.url.startswith(b"/model_info"):
            return plain(b'{"model_path": "fake", "is_generation": true}')
        return plain(b"{}")


async def serve_worker(port: int, role: str) -> None:
    FakeWorker.role, FakeWorker.streams = role, {}
    loop = asyncio.get_running_loop()
    await loop.create_server(FakeWorker, "127.0.0.1", port)
    due = loop.time()
    while True:
        due = max(due + PACE_S, loop.time())
        await asyncio.sleep(due - loop.time())
        for worker, left in list(FakeWorker.streams.items()):
            worker.transport.write(chunk(_EVENT) if left else _LAST)  # type: ignore[attr-defined]
            if left:
                FakeWorker.streams[worker] = left - 1
            else:
                del FakeWorker.streams[worker]


# --- load ---------------------------------------------------------------------------------------------------------


class Caller(asyncio.Protocol):
    """One connection that sends the next request when the last is answered, until `stop`."""

    def __init__(self, request: bytes, took: list[float]) -> None:
        self.request, self.took = request, took
        self.stop = False
        self.failed = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.failed += 1
            self.done.set_result(None)

    def ask(self) -> None:
        self.sent = time.perf_counter()
        self.transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.took.append(time.perf_counter() - self.sent)
        self.failed += self.parser.get_status_code() != 200
        if self.stop:
            self.done.set_result(None)
        else:
            self.ask()


def chat(port: int, stream: bool) -> bytes:
    body = json.dumps(
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "Say hello in one short sentence."}],
            "max_tokens": 64,
            "stream": stream,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"accept: */*\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@dataclass
class Row:
    """Per second, milliseconds, microseconds of CPU per request (per chunk where streamed)."""

    rate: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    failed: int


async def load(port: int, pid: int, connections: int, seconds: float, *, stream: bool = False) -> Row:
    loop, took = asyncio.get_running_loop(), list[float]()
    request = chat(port, stream)
    callers = [
        (await loop.create_connection(lambda: Caller(request, took), "127.0.0.1", port))[1] for _ in range(connections)
    ]
    if not stream:
        await asyncio.sleep(0.3)
    took.clear()
    began, cpu = time.perf_counter(), cpu_s(pid)
    if not stream:
        await asyncio.sleep(seconds)
    for caller in callers:
        caller.stop = True
    await asyncio.gather(*(caller.done for caller in callers))
    elapsed, used = time.perf_counter() - began, cpu_s(pid) - cpu
    for caller in callers:
        caller.transport.close()
    count = max(len(took), 1)
    took.sort()
    units = count * (CHUNKS + 1 if stream else 1)
    return Row(
        units / elapsed,
        took[len(took) // 2] * 1e3 if took else 0.0,
        took[int(len(took) * 0.99)] * 1e3 if took else 0.0,
        used / units * 1e6,
        sum(caller.failed for caller in callers),
    )


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


# --- candidates ---------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    name: str
    command: Callable[[int, int, int], list[str]]
    rows: dict[str, list[Row]] = field(default_factory=dict)


def ours(port: int, prefill: int, decode: int) -> list[str]:
    code = (
        "from pdplane.router import RouterConfig, run; "
        f"run(RouterConfig(port={port}, prefill=('http://127.0.0.1:{prefill}@8998',), "
        f"decode=('http://127.0.0.1:{decode}',)))"
    )
    return [sys.executable, "-c", code]


def peer(python: str) -> Callable[[int, int, int], list[str]]:
    def command(port: int, prefill: int, decode: int) -> list[str]:
        return [
            python, "-m", "sglang_router.launch_router", "--pd-disaggregation",
            "--prefill", f"http://127.0.0.1:{prefill}", "8998", "--decode", f"http://127.0.0.1:{decode}",
            "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "warn",
        ]  # fmt: skip

    return command


def free_port() -> int:
    """Below the ephemeral range, which a long load may exhaust."""
    for port in range(20_000 + os.getpid() % 5_000, 32_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0 and port not in _TAKEN:
                _TAKEN.add(port)
                return port
    raise SystemExit("no free port below 32000")


_TAKEN: set[int] = set()


async def answering(port: int) -> None:
    """Until a chat through `port` is answered by 200."""
    for _ in range(200):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(chat(port, stream=False))
            line = await asyncio.wait_for(reader.readline(), 5)
            writer.close()
            if b" 200 " in line:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit(f"nothing answers on port {port}")


async def measure(candidate: Candidate, args: argparse.Namespace, port: int, pid: int) -> None:
    await answering(port)
    rows = {
        "short": await load(port, pid, args.connections, args.seconds),
        "one": await load(port, pid, 1, args.seconds / 2),
        "paced": await load(port, pid, PACED_STREAMS, 0, stream=True),
    }
    for name, row in rows.items():
        candidate.rows.setdefault(name, []).append(row)


def compare(args: argparse.Namespace) -> None:
    candidates = [Candidate("pdplane", ours)]
    if can_import(args.peer, "sglang_router"):
        candidates.append(Candidate("sglang-router", peer(args.peer)))
    ports = {"prefill": free_port(), "decode": free_port()}
    workers = [
        subprocess.Popen([sys.executable, __file__, "--serve", role, "--port", str(port)])
        for role, port in ports.items()
    ]
    try:
        for _ in range(args.rounds):
            for candidate in candidates:
                port = free_port()
                command = candidate.command(port, ports["prefill"], ports["decode"])
                router = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                try:
                    uvloop.run(measure(candidate, args, port, router.pid))
                finally:
                    end(router)
    finally:
        for worker in workers:
            end(worker)
    report(candidates)


def can_import(python: str, module: str) -> bool:
    return Path(python).exists() and subprocess.run([python, "-c", f"import {module}"], check=False).returncode == 0


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def report(candidates: list[Candidate]) -> None:
    print(f"{'row':<7}{'router':<15}{'per s':>10}{'p50 ms':>9}{'p99 ms':>9}{'CPU us':>9}{'range us':>14}{'failed':>8}")
    for name in candidates[0].rows:
        cpu: dict[str, float] = {}
        for candidate in candidates:
            rows = candidate.rows[name]
            cpu[candidate.name] = median(row.cpu_us for row in rows)
            spread = f"{min(row.cpu_us for row in rows):.1f}-{max(row.cpu_us for row in rows):.1f}"
            print(
                f"{name:<7}{candidate.name:<15}{median(row.rate for row in rows):>10,.0f}"
                f"{median(row.p50_ms for row in rows):>9.2f}{median(row.p99_ms for row in rows):>9.2f}"
                f"{cpu[candidate.name]:>9.1f}{spread:>14}{sum(row.failed for row in rows):>8}"
            )
        if len(cpu) == 2:
            mine, theirs = cpu.values()
            print(f"{name:<7}the peer uses {theirs / mine:.2f} times the CPU")
    if len(candidates) == 1:
        print("no peer: give --peer a Python that has sglang-router installed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--peer", default=".bench-venv/bin/python")
    parser.add_argument("--serve", choices=["prefill", "decode"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve_worker(args.port, args.serve))
    else:
        compare(args)


if __name__ == "__main__":
    main()
