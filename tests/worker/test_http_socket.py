"""Over a real socket: clients that leave, events one by one, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec
import openai
import pytest
import uvicorn

from pdplane.worker.http import build_app, connection

from .http_fakes import FakeService, chunk, says

LIMIT_S = 30.0


class Server(uvicorn.Server):
    """Says when it listens, and leaves signals to the test runner."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.asynccontextmanager
async def serving(service: FakeService) -> AsyncIterator[int]:
    """The port on which `service` is served by uvicorn."""
    config = uvicorn.Config(
        build_app(service), host="127.0.0.1", port=0, log_level="critical", lifespan="off", http=connection.BoundedHttp
    )
    server = Server(config)
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(LIMIT_S):
            await server.listening.wait()
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def send(port: int, path: str, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = msgspec.json.encode(body)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("sizes", [[70_000], [40_000, 40_000], [1_000] * 70])
async def test_a_head_over_the_limit_is_a_431_and_ends_the_connection(sizes: list[int]) -> None:
    async with serving(FakeService()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
        for size in sizes:
            writer.write(b"a" * size)
        answer = await asyncio.wait_for(reader.read(), LIMIT_S)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"head_too_large"' in answer
        await leave(writer)


async def test_what_is_not_http_is_a_400_with_our_error_body() -> None:
    async with serving(FakeService()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"nonsense\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), LIMIT_S)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"bad_http"' in answer
        await leave(writer)


async def test_heads_under_the_limit_pass_one_after_the_other_on_one_connection() -> None:
    async with serving(FakeService()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(4):
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 30_000 + b"\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
            assert head.startswith(b"HTTP/1.1 200 ")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        await leave(writer)


@pytest.mark.parametrize("half", [b"POST /generate HT", b"POST /generate HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"])
async def test_a_request_that_does_not_arrive_in_time_ends_its_connection(
    half: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ARRIVAL_LIMIT_S", 0.01)
    async with serving(FakeService()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(half)
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        await leave(writer)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_any_answer_ends_all_its_samples(stream: bool) -> None:
    service = FakeService()
    async with serving(service) as port:
        _, writer = await send(port, "/v1/completions", {"prompt": "x", "n": 3, "stream": stream})
        await service.until(lambda: len(service.streams) == 3)
        await leave(writer)
        await service.until(lambda: len(service.closed) == 3)
    assert {rid for rid, _ in service.closed} == {generation.rid for generation in service.batch}
    assert {cause.code for _, cause in service.closed} == {"client_left"}


async def test_a_client_that_leaves_in_mid_stream_ends_what_still_runs() -> None:
    service = FakeService()
    async with serving(service) as port:
        reader, writer = await send(port, "/v1/completions", {"prompt": "x", "n": 2, "stream": True})
        await service.until(lambda: len(service.streams) == 2)
        first, second = service.streams
        first.push(chunk(service.batch[0], "done", finish_reason="length"))
        second.push(chunk(service.batch[1], "more"))
        async with asyncio.timeout(LIMIT_S):
            await reader.readuntil(b'"more"')
        await leave(writer)
        await service.until(lambda: bool(service.closed))
    assert [rid for rid, _ in service.closed] == [second.rid]


async def test_events_leave_one_by_one() -> None:
    service = FakeService()
    async with serving(service) as port:
        reader, writer = await send(port, "/generate", {"text": "x", "stream": True})
        await service.until(lambda: bool(service.streams))
        service.streams[0].push(chunk(service.batch[0], "a"))
        async with asyncio.timeout(LIMIT_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert b'"text":"a"' in await reader.readuntil(b"\n\n")
            service.streams[0].push(chunk(service.batch[0], "b", 1, finish_reason="length"))
            assert b'"text":"ab"' in await reader.readuntil(b"\n\n")
            assert await reader.readuntil(b"[DONE]\n\n")
        await leave(writer)
    assert service.closed == []


async def test_a_finished_answer_is_no_cancel_when_its_client_closes() -> None:
    service = FakeService()
    service.script = says("a")
    async with serving(service) as port:
        reader, writer = await send(port, "/generate", {"text": "x"})
        async with asyncio.timeout(LIMIT_S):
            await reader.readuntil(b"}}")
        await leave(writer)
    assert service.closed == []


@contextlib.asynccontextmanager
async def openai_client(service: FakeService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(service) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_openais_client_chats() -> None:
    service = FakeService()
    service.script = says("Par", "is", finish="stop")
    async with openai_client(service) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "?"}])
        assert answer.choices[0].message.content == "Paris"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5


async def test_openais_client_streams_a_chat() -> None:
    service = FakeService()
    service.script = says("Par", "is", finish="stop")
    async with openai_client(service) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "?"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [piece async for piece in stream]
    assert "".join(piece.choices[0].delta.content or "" for piece in chunks if piece.choices) == "Paris"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


async def test_openais_client_completes_with_logprobs() -> None:
    service = FakeService()
    service.script = says("ab")
    async with openai_client(service) as client:
        answer = await client.completions.create(model="tiny", prompt=["x", "y"], n=2, logprobs=0)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.tokens == ["a", "b"]


async def test_openais_client_meets_the_errors_it_knows() -> None:
    service = FakeService()
    async with openai_client(service) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="x")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="x", temperature=3)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
