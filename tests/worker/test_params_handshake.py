"""Control sessions with whoever may be at the other end: a later release, a stranger, somebody who says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from pdplane.core.frames import Frame, Reject
from pdplane.core.layout import OLDEST_PROTOCOL, PROTOCOL_VERSION
from pdplane.wire.control import WIRE_VERSION, FrameReader, UnknownKind

from .fleets import COMPLETIONS, HOST, completion, texts, until
from .pairs import Pair, pair

BODY = completion()[1]
OURS, LATER = f"{OLDEST_PROTOCOL} to {PROTOCOL_VERSION}", f"{PROTOCOL_VERSION + 5} to {PROTOCOL_VERSION + 6}"
GREETING: dict[str, Any] = {"protocol_min": PROTOCOL_VERSION + 5, "protocol_max": PROTOCOL_VERSION + 6, "rank": "new"}

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


def framed(fields: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return struct.pack("<IB", 1 + len(body), WIRE_VERSION) + body


async def said_to(port: int, data: bytes) -> list[Frame | UnknownKind]:
    """What the other end answers before it closes."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    frames, answer = FrameReader(), bytearray()
    async with asyncio.timeout(10):
        while chunk := await reader.read(4096):
            answer += chunk
    writer.close()
    return frames.feed(answer)


@contextlib.asynccontextmanager
async def stranger(serve: Serve) -> AsyncIterator[int]:
    """Somebody at a port."""
    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])
        server.close()


async def serves(it: Pair) -> None:
    assert texts(await it.both(BODY)) == texts(await it.whole.post(COMPLETIONS, BODY))


async def test_a_decode_of_a_later_release_is_told_which_protocols_there_are() -> None:
    async with pair() as it:
        hello = framed({"t": "hello", "src": "later", "dst": "", "stamp": ["new"], **GREETING})
        [answer] = await said_to(it.prefill.ports["control"], hello)
        assert isinstance(answer, Reject)
        assert OURS in answer.cause.message
        assert LATER in answer.cause.message
        [shown] = (await it.prefill.get("/server_info")).json()["refused_sessions"]
        assert (shown["peer"], LATER in shown["message"]) == ("later", True)
        await serves(it)


async def test_a_prefill_of_a_later_release_is_an_error_that_names_both() -> None:
    async def later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(framed({"t": "welcome", "src": "later", "dst": it.decode.shell.instance, **GREETING}))
        with contextlib.suppress(OSError):
            while await reader.read(4096):
                pass
        writer.close()

    async with pair() as it, stranger(later) as port:
        params = {**await it.params(BODY), "remote_port": port, "pd_ports": [port]}
        answer = await it.read(BODY, params)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "incompatible"), error
        assert OURS in error["message"]
        assert LATER in error["message"]
        await serves(it)


async def test_the_listener_survives_any_bytes() -> None:
    async with pair() as it:
        chance = random.Random(7)
        whole = framed({"t": "hello", "src": "x", "dst": "", "protocol_min": 1, "protocol_max": 1})
        junk = [bytes(chance.randrange(256) for _ in range(chance.randrange(1, 200))) for _ in range(40)]
        cut = [whole[: chance.randrange(1, len(whole))] for _ in range(10)]
        heads = [struct.pack("<IB", length, WIRE_VERSION) for length in (0, 1, 2**31, 2**32 - 1)]
        for data in [*junk, *cut, *heads, b"GET / HTTP/1.1\r\n\r\n", whole]:
            _, writer = await asyncio.open_connection(HOST, it.prefill.ports["control"])
            writer.write(data)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        await serves(it)
        assert not it.prefill.shell.broken
        await it.at_rest()


@pytest.mark.parametrize("count", [1, 8])
async def test_one_who_says_nothing_delays_nobody_elses_handshake(count: int) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(4096):
                pass
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        it = await stack.enter_async_context(pair(decode={"silent_s": 60.0}))
        ports = [await stack.enter_async_context(stranger(silent)) for _ in range(count)]
        waiting = [
            asyncio.create_task(it.read(BODY, {**await it.params(BODY), "remote_port": port, "pd_ports": [port]}))
            for port in ports
        ]
        await until(lambda: len(it.decode.group.jobs) == count)
        await serves(it)
        assert not any(one.done() for one in waiting)
        await it.decode.post("/abort_request", {"abort_all": True})
        for answer in await asyncio.gather(*waiting):
            assert answer.json()["choices"][0]["finish_reason"] == "abort"
        await it.prefill.post("/abort_request", {"abort_all": True})
        await it.at_rest()
