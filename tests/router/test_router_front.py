"""The client's side of HTTP: what cannot be read is refused in OpenAI's words, what is odd but legal is served."""

from __future__ import annotations

import asyncio

import pytest

from .router_fakes import CHAT, fleet, ok, sse, until


@pytest.mark.parametrize("body", [b"", b"{", b"{]", b'{"a":1}}', b"\xff\xfe", b'{"a": nope}'])
async def test_malformed_json_is_a_400(body: bytes) -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        answer = await it.post(body)
        assert (answer.status, answer.error["code"]) == (400, "invalid_json")
        assert answer.error["type"] == "invalid_request_error"
        assert not it.decode.seen
        await it.idle()


@pytest.mark.parametrize("body", [b"[1]", b"5", b'"text"', b"null"])
async def test_json_that_is_no_object_is_a_400(body: bytes) -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        answer = await it.post(body)
        assert answer.status == 400
        assert "JSON object" in answer.error["message"]


async def test_a_body_over_the_limit_is_a_413_that_names_it() -> None:
    async with fleet(prefill=ok, decode=ok, max_body_bytes=100) as it:
        assert (await it.post(b'{"a":"%b"}' % (b"x" * 92))).status == 200
        answer = await it.post(b'{"a":"%b"}' % (b"x" * 93))
        assert answer.status == 413
        assert "100 bytes" in answer.error["message"]
        assert answer.headers["connection"] == "close"
        await it.idle()


async def test_a_chunked_body_over_the_limit_is_a_413_too() -> None:
    async with fleet(prefill=ok, decode=ok, max_body_bytes=100) as it, it.client() as client:
        client.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(20):
            client.send(b"10\r\n0123456789abcdef\r\n")
        assert (await client.read()).status == 413
        assert len(it.decode.seen) == 0


async def test_a_413_arrives_while_the_client_still_sends() -> None:
    async with fleet(max_body_bytes=1000) as it, it.client() as client:
        client.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n")
        for _ in range(80):
            client.send(b"x" * 100_000)
        assert (await client.read()).status == 413


async def test_a_chunked_body_is_served() -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as client:
        client.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b'8\r\n{"text":\r\n')
        client.send(b'5\r\n"hi"}\r\n0\r\n\r\n')
        assert (await client.read()).status == 200
        assert it.decode.seen[0].body["text"] == "hi"
        await it.idle()


async def test_a_request_that_comes_byte_by_byte_is_served() -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as client:
        for byte in b'POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 12\r\n\r\n{"text":"x"}':
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.read()).status == 200


async def test_expect_100_continue_is_answered_before_the_body() -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as client:
        client.send(b"POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 12\r\n\r\n")
        assert (await client.head())[0] == 100
        client.send(b'{"text":"x"}')
        assert (await client.read()).status == 200


async def test_expect_100_continue_for_too_large_a_body_gets_the_413_at_once() -> None:
    async with fleet(max_body_bytes=10) as it, it.client() as client:
        client.send(b"POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 12\r\n\r\n")
        assert (await client.head())[0] == 413


@pytest.mark.parametrize("pieces", [1, 50])
async def test_headers_too_large_are_a_431(pieces: int) -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as client:
        head = b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 100_000 + b"\r\n\r\n"
        size = len(head) // pieces + 1
        for start in range(0, len(head), size):
            client.send(head[start : start + size])
            await asyncio.sleep(0)
        answer = await client.read()
        assert (answer.status, answer.error["code"]) == (431, "head_too_large")


@pytest.mark.parametrize(
    "head",
    [
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: abc\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_not_http_is_a_400_and_closes(head: bytes) -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as client:
        client.send(head)
        answer = await client.read()
        assert answer.status == 400
        assert answer.error["message"]
        assert await client.reader.read() == b""
        assert not it.decode.seen


async def test_an_upgrade_is_not_taken_up_and_ends_the_connection() -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as client:
        client.send(b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n\x00frames")
        assert (await client.read()).status == 200
        assert await client.reader.read() == b""


async def test_garbage_behind_a_request_harms_nobody_else() -> None:
    async with fleet(prefill=ok) as it, it.client() as victim, it.client() as culprit:
        victim.post(b'{"stream": true}')
        decode = await it.decode.next()
        decode.start()
        decode.chunk(b"data: 1\n\n")
        await victim.head()
        assert await victim.chunk() == b"data: 1\n\n"
        culprit.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n\x00garbage")
        decode.chunk(b"data: 2\n\n")
        assert (await culprit.read()).status == 200
        assert (await culprit.read()).status == 400
        assert await victim.chunk() == b"data: 2\n\n"
        decode.chunk(b"data: 3\n\n")
        assert await victim.chunk() == b"data: 3\n\n"
        decode.finish()
        await it.idle()


async def test_many_pipelined_requests_are_answered_in_turn_and_let_others_in() -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as greedy, it.client() as other:
        greedy.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 500)
        other.post(b"{}")
        assert (await other.read()).status == 200
        for _ in range(500):
            assert (await greedy.read()).status == 200


async def test_a_connection_serves_many_requests_in_turn() -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as client:
        for _ in range(5):
            client.post(b"{}")
            assert (await client.read()).status == 200


async def test_connection_close_is_honoured() -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as client:
        client.post(b"{}", headers="connection: close\r\n")
        answer = await client.read()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.reader.read() == b""


async def test_an_http_1_0_client_gets_no_chunks_and_a_closed_connection() -> None:
    async with fleet(prefill=ok, decode=sse) as it, it.client() as client:
        client.post(b'{"stream": true}', version="1.0")
        answer = await client.read()
        assert "transfer-encoding" not in answer.headers
        assert answer.body == b'data: {"a":1}\n\ndata: [DONE]\n\n'
        await it.idle()


async def test_an_http_1_0_client_may_keep_its_connection() -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as client:
        for _ in range(2):
            client.post(b"{}", version="1.0", headers="connection: keep-alive\r\n")
            answer = await client.read()
            assert (answer.status, answer.headers["connection"]) == (200, "keep-alive")


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with fleet(prefill=ok) as it, it.client() as client:
        client.post(b"{}")
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 50)
        client.post(b"{}", headers="connection: close\r\n")
        first = await it.decode.next()
        first.reply(200, {"turn": 1})
        assert (await client.read()).json == {"turn": 1}
        for _ in range(50):
            assert (await client.read()).json["status"] == "alive"
        (await it.decode.next()).reply(200, {"turn": 2})
        assert (await client.read()).json == {"turn": 2}
        assert await client.reader.read() == b""
        await it.idle()


async def test_unknown_paths_and_methods_are_json() -> None:
    async with fleet() as it:
        assert (await it.get("/nothing")).error["code"] == "not_found"
        answer = await it.get(CHAT)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert (await it.post({}, "/health")).status == 405
        assert (await it.get("/abort_request")).status == 405


async def test_the_api_key_guards_all_but_the_probes() -> None:
    async with fleet(prefill=ok, decode=ok, api_key="secret") as it:
        for headers in ("", "authorization: Bearer wrong\r\n", "authorization: secret\r\n"):
            answer = await it.post({}, headers=headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert (await it.get("/workers", headers)).status == 401
        assert (await it.post({}, headers="authorization: Bearer secret\r\n")).status == 200
        assert it.decode.seen[0].headers["authorization"] == "Bearer secret"
        for path in ("/health", "/ready", "/metrics"):
            assert (await it.get(path)).status == 200


async def test_trace_headers_pass_and_others_do_not() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.post({}, headers="traceparent: 00-1\r\nx-custom: 1\r\ncookie: c\r\n")
        for worker in (it.prefill, it.decode):
            seen = worker.seen[0].headers
            assert seen["traceparent"] == "00-1"
            assert not {"x-custom", "cookie", "authorization"} & set(seen)


async def test_over_the_limit_of_requests_in_flight_is_a_429() -> None:
    async with fleet(prefill=ok, max_inflight=1) as it:
        waiting = asyncio.ensure_future(it.post({}))
        decode = await it.decode.next()
        answer = await it.post({})
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        decode.reply()
        assert (await waiting).status == 200
        await it.idle()


async def test_a_client_that_never_ends_its_request_is_closed() -> None:
    async with fleet(read_timeout_s=0.01) as it, it.client() as client:
        client.send(b"POST /generate HTTP/1.1\r\nhost: x\r\n")
        assert await asyncio.wait_for(client.reader.read(), 10) == b""
        await until(lambda: not it.router.fronts)


async def test_a_fault_of_the_router_is_a_500_at_once_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(prefill=ok, decode=ok) as it:

        def choose(*_: object) -> None:
            raise RuntimeError("no such pair")

        with monkeypatch.context() as broken:
            broken.setattr(it.router.pairing, "choose", choose)
            answer = await it.post(b"{}")
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert answer.headers["connection"] == "close"
        assert "no such pair" in caplog.text
        await it.idle()
        assert (await it.post(b"{}")).status == 200


async def test_a_view_that_fails_is_a_500_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(prefill=ok, decode=ok) as it, it.client() as client:

        def missing() -> None:
            raise RuntimeError("no such fact")

        monkeypatch.setattr(it.router.pairing, "missing", missing)
        client.send(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.read()).status == 500
