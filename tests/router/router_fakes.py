"""Small workers on free ports that do what a test tells them, and a raw client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from pdplane.router import RouterConfig, RouterServer
from pdplane.router.routing import Router

CHAT = "/v1/chat/completions"
TIMEOUT_S = 10


class Asked:
    """One request at a fake worker, and the means to answer it."""

    def __init__(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        self.path, self.headers, self.raw, self._writer = path, headers, body, writer
        self.answered = asyncio.Event()
        self.left = asyncio.Event()  # the router closed the connection before an answer was complete

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    @property
    def room(self) -> Any:
        return self.body["bootstrap_room"]

    @property
    def rid(self) -> Any:
        return self.body["rid"]

    def reply(self, status: int = 200, body: Any = None, headers: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body if body is not None else {"ok": True}).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {len(data)}\r\n\r\n"
        self.send(head.encode() + data)
        self.end()

    def fail(self, status: int, code: str = "boom", headers: str = "", **more: Any) -> None:
        self.reply(status, {"error": {"message": f"worker says {status}", "code": code, **more}}, headers)

    def start(self, content_type: str = "text/event-stream") -> None:
        self.send(f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n".encode())

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self) -> None:
        self.send(b"0\r\n\r\n")
        self.end()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def end(self) -> None:
        self.answered.set()

    def reset(self) -> None:
        """Cut the connection."""
        self._writer.transport.abort()
        self.answered.set()


STAMP: dict[str, Any] = {
    "model": "m", "weights": "w", "tokenizer": "t", "page_size": 16, "page_bytes": 1024, "kv_dtype": "f16",
    "groups": [{"name": "kv", "row_bytes": 64, "layers": [0, 1], "dtype": "f16"}], "protocol_max": 2,
}  # fmt: skip

Behaviour = Callable[[Asked], None]


@dataclass
class FakeWorker:
    """`behaviour` answers generations by itself; without one they wait in `asked` for the test."""

    role: str
    behaviour: Behaviour | None = None
    info: dict[str, Any] = field(default_factory=dict)
    health: int = 200
    port: int = 0

    def __post_init__(self) -> None:
        self.facts: dict[str, Any] = {}  # of its /health
        self.seen: list[Asked] = []
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()
        self.aborts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop_connections(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def next(self) -> Asked:
        return await asyncio.wait_for(self.asked.get(), TIMEOUT_S)

    async def aborted(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.aborts.get(), TIMEOUT_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(Asked(lines[0].split(" ")[1], headers, body, writer), reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        if asked.path == "/health":
            asked.reply(self.health, {"status": "x", **self.facts})
        elif asked.path == "/server_info":
            asked.reply(200, {"role": self.role, "model": "m", "bootstrap_port": 8998, **self.info})
        elif asked.path == "/abort_request":
            self.aborts.put_nowait(asked.body)
            asked.reply(200, {"aborted": 1})
        else:
            self.seen.append(asked)
            if self.behaviour is not None:
                self.behaviour(asked)
            else:
                self.asked.put_nowait(asked)
            await self._until_answered(asked, reader)

    async def _until_answered(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        gone = asyncio.ensure_future(reader.read(1))  # the router sends one request at a time: a byte would be a bug
        done = asyncio.ensure_future(asked.answered.wait())
        await asyncio.wait({gone, done}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not asked.answered.is_set():
            assert gone.exception() is not None or gone.result() == b"", "bytes while a request is being answered"
            asked.left.set()
            done.cancel()
            raise ConnectionResetError
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await gone


def ok(asked: Asked) -> None:
    asked.reply(200, {"text": "hello"})


def sse(asked: Asked) -> None:
    asked.start()
    asked.chunk(b'data: {"a":1}\n\n')
    asked.chunk(b"data: [DONE]\n\n")
    asked.finish()


def refuse(status: int, headers: str = "", **more: Any) -> Behaviour:
    return lambda asked: asked.fail(status, headers=headers, **more)


class Fleet:
    """A router before fake workers."""

    def __init__(self, prefills: list[FakeWorker], decodes: list[FakeWorker], server: RouterServer) -> None:
        self.prefills, self.decodes, self.server = prefills, decodes, server

    @property
    def prefill(self) -> FakeWorker:
        return self.prefills[0]

    @property
    def decode(self) -> FakeWorker:
        return self.decodes[0]

    @property
    def router(self) -> Router:
        assert self.server.router is not None
        return self.server.router

    @property
    def port(self) -> int:
        return self.server.port

    async def post(self, body: Any = None, path: str = CHAT, headers: str = "") -> Answer:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        async with self.client() as client:
            client.post(data, path, headers)
            return await client.read()

    async def get(self, path: str, headers: str = "") -> Answer:
        async with self.client() as client:
            client.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())
            return await client.read()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def idle(self) -> None:
        """Every counter is exactly at its idle figure: nothing in flight, no load."""
        await until(lambda: not self.router.active and not self.router.draining and not self.loads())
        assert not self.router.labels
        for worker in self.router.pairing.workers:
            assert worker.load == 0
            assert worker.ranks is None or not any(worker.ranks.loads)

    async def sized(self, dp: int, **info: Any) -> None:
        """The prefills say that they have `dp` ranks, and the router has heard it."""
        for one in self.prefills:
            one.info = {"shape": {"dp": dp, "tp": 1, "cp": 1, "pp": 1}, **info}
        await until(lambda: all(worker.shape.dp == dp for worker in self.router.pairing.prefills))

    def loads(self) -> int:
        return sum(worker.load for worker in self.router.pairing.workers)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def post(self, body: bytes, path: str = CHAT, headers: str = "", version: str = "1.1") -> None:
        head = f"POST {path} HTTP/{version}\r\nhost: x\r\n{headers}content-length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    def leave(self) -> None:
        self._writer.transport.abort()

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)).decode()
        lines = raw.split("\r\n")
        return int(lines[0].split(" ")[1]), {
            k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)
        }

    async def read(self) -> Answer:
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, await self.chunks())
        if "content-length" in headers:
            read = self.reader.readexactly(int(headers["content-length"]))
        else:
            read = self.reader.read()
        return Answer(status, headers, await asyncio.wait_for(read, TIMEOUT_S))

    async def read_raw(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(end), TIMEOUT_S)

    async def chunks(self) -> bytes:
        """All chunks up to the last one; raises IncompleteReadError where the stream was cut."""
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return body

    async def chunk(self) -> bytes:
        size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), TIMEOUT_S), 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), TIMEOUT_S)
        return data[:-2]


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the loop until `condition` holds; fails after a bound that is only there to end a broken test."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 (there is no event to wait for in the code under test)
            await asyncio.sleep(0.002)


async def asked_of(fakes: list[FakeWorker]) -> Asked:
    """The next request at any of them."""
    await until(lambda: any(not fake.asked.empty() for fake in fakes))
    return await next(fake for fake in fakes if not fake.asked.empty()).next()


async def record_of(it: Fleet, answer: Answer) -> dict[str, Any]:
    """What the router tells of the request that got this answer."""
    return dict((await it.get("/requests/" + answer.headers["x-request-id"])).json)


@contextlib.asynccontextmanager
async def fleet(
    prefills: int = 1,
    decodes: int = 1,
    *,
    prefill: Behaviour | None = None,
    decode: Behaviour | None = None,
    ready: bool = True,
    kind: type[FakeWorker] | None = None,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """`prefills` x `decodes` fakes with these behaviours and a router that knows them; waits until it is ready."""
    make = kind or FakeWorker
    left = [make("prefill", prefill) for _ in range(prefills)]
    right = [make("decode", decode) for _ in range(decodes)]
    for worker in left + right:
        await worker.start()
    config = RouterConfig(
        port=0,
        prefill=tuple(worker.url for worker in left),
        decode=tuple(worker.url for worker in right),
        **{"health_interval_s": 0.05, "stop_grace_s": 0.0, **settings},
    )
    server = RouterServer(config)
    await server.start()
    made = Fleet(left, right, server)
    try:
        if ready:
            router = made.router
            await until(lambda: router.pairing.ready and all(w.ready for w in router.pairing.workers))
        yield made
    finally:
        await server.stop()
        for worker in left + right:
            await worker.stop()
