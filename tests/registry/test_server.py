"""The registry over real sockets: SGLang's status codes and bodies, and what malformed traffic gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import uvloop

from pdplane.registry.http import MAX_BODY_BYTES, MAX_HEAD_BYTES
from pdplane.registry.server import RegistryConfig, RegistryServer, serve
from pdplane.settings import BadSetting
from pdplane.wire import registry as wire

from .conftest import Clock, registration

INFO = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
RANK = "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
GROUP = {
    "attn_cp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "page_size": 16,
    "kv_cache_dtype": "float32",
    "follow_bootstrap_room": True,
    "enable_dsa_cache_layer_split": False,
    "enable_kv_cache_sharding": False,
    "decode_allocation_policy": "early",
}
INFO_KEYS = {
    *("attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype", "follow_bootstrap_room"),
    *("enable_dsa_cache_layer_split", "enable_kv_cache_sharding", "decode_allocation_policy", "prefill_http_port"),
    *("target_tp_rank", "target_tp_ranks", "target_cp_ranks", "target_pp_ranks", "required_dst_info_num"),
    "required_prefill_response_num",
}


async def ask(server: RegistryServer, method: str, path: str, body: object = None, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.request(method, f"http://127.0.0.1:{server.port}{path}", content=content, headers=headers)


async def put(server: RegistryServer, **change: object) -> httpx.Response:
    return await ask(server, "PUT", "/route", wire.encode(registration(**change)))


@contextlib.asynccontextmanager
async def connected(server: RegistryServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def raw(server: RegistryServer, sent: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    async with connected(server) as (reader, writer):
        writer.write(sent)
        return await reader.read()


def text(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.text


# --- SGLang's routes ---------------------------------------------------------------------------------------------


async def test_health_is_ok_whoever_has_registered(server: RegistryServer) -> None:
    answer = await ask(server, "GET", "/health")
    assert text(answer) == (200, "OK")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


async def test_a_route_is_put_and_got(server: RegistryServer) -> None:
    assert text(await ask(server, "GET", INFO)) == (
        503,
        "Prefill server not fully registered yet (0 workers registered).",
    )
    assert text(await put(server, pd_instance="p-1")) == (200, "OK")
    answer = await ask(server, "GET", RANK)
    assert answer.json() == {"rank_ip": "10.0.0.1", "rank_port": 4000}
    assert answer.headers["content-type"] == "application/json; charset=utf-8"


async def test_server_info_has_sglangs_keys_and_no_other(server: RegistryServer) -> None:
    await put(server, pd_instance="p-1", load_balance_method="round_robin")
    info = (await ask(server, "GET", INFO)).json()
    assert info.keys() == INFO_KEYS
    assert info["follow_bootstrap_room"] is False


async def test_server_info_has_the_layouts_where_they_are_set(server: RegistryServer) -> None:
    await put(server, kv_layout="a", dsv41_spec_layout={"num_draft_tokens": 2})
    info = (await ask(server, "GET", INFO)).json()
    assert info.keys() == INFO_KEYS | {"kv_layout", "dsv41_spec_layout"}


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?",
        "?prefill_dp_rank=0",
        INFO.removeprefix("/route").replace("pp_rank=-1", "pp_rank="),
        "?prefill_dp_rank&x=%ff&&=",
    ],
)
async def test_missing_inputs_are_400(server: RegistryServer, query: str) -> None:
    assert text(await ask(server, "GET", f"/route{query}")) == (400, "Missing inputs for bootstrap server.")


async def test_inputs_that_are_no_integers_are_400_and_named(server: RegistryServer) -> None:
    status, body = text(await ask(server, "GET", RANK.replace("tp_rank=0", "tp_rank=x", 1)))
    assert status == 400
    assert "must be integers" in body


async def test_of_an_input_given_twice_the_first_counts(server: RegistryServer) -> None:
    await put(server)
    assert (await ask(server, "GET", RANK + "&target_pp_rank=9")).status_code == 200


async def test_escaped_inputs_are_understood(server: RegistryServer) -> None:
    await put(server)
    assert (await ask(server, "GET", RANK.replace("target_tp_rank", "target%5Ftp%5Frank"))).status_code == 200


async def test_a_rank_that_is_not_there_is_404(server: RegistryServer) -> None:
    await put(server)
    answer = await ask(server, "GET", RANK.replace("target_tp_rank=0", "target_tp_rank=9"))
    assert text(answer) == (404, "Bootstrap info not found for dp_rank=0 cp_rank=0 tp_rank=9 pp_rank=0")


@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH", "HEAD", "OPTIONS"])
async def test_other_methods_on_the_route_are_405_in_sglangs_words(server: RegistryServer, method: str) -> None:
    answer = await ask(server, method, "/route")
    assert text(answer) == (405, "" if method == "HEAD" else "Method not allowed")
    assert answer.headers["content-type"].startswith("application/json")


async def test_unknown_paths_and_other_methods_elsewhere(server: RegistryServer) -> None:
    assert (await ask(server, "GET", "/routes")).status_code == 404
    assert (await ask(server, "PUT", "/health")).status_code == 405
    assert text(await ask(server, "HEAD", "/health")) == (200, "")


async def test_rooms_are_registered_and_queried(server: RegistryServer, clock: Clock) -> None:
    for room, rank in ((7, 1), (2**63 - 1, 0)):
        answer = await ask(server, "POST", "/register_dp_rank", {"bootstrap_room": room, "dp_rank": rank})
        assert text(answer) == (200, "OK")
    query = {"bootstrap_rooms": [7, 8, 2**63 - 1, -1]}
    assert (await ask(server, "POST", "/query_dp_ranks", query)).json() == {"7": 1, str(2**63 - 1): 0}
    clock.now += 240
    assert (await ask(server, "POST", "/query_dp_ranks", query)).json() == {}


# --- malformed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/route", b"{"),
        ("PUT", "/route", b""),
        ("PUT", "/route", {"attn_tp_size": 1}),
        ("POST", "/register_dp_rank", {"bootstrap_room": 1}),
        ("POST", "/register_dp_rank", {"bootstrap_room": 0, "dp_rank": 0}),
        ("POST", "/register_dp_rank", {"bootstrap_room": 2**63, "dp_rank": 0}),
        ("POST", "/register_dp_rank", {"bootstrap_room": 1.5, "dp_rank": 0}),
        ("POST", "/register_dp_rank", {"bootstrap_room": 1, "dp_rank": -1}),
        ("POST", "/register_dp_rank", {"bootstrap_room": 1, "dp_rank": 1}),
        ("POST", "/query_dp_ranks", {"bootstrap_rooms": 7}),
        ("POST", "/query_dp_ranks", {"bootstrap_rooms": ["x"]}),
        ("DELETE", "/v1/route", {}),
    ],
)
async def test_malformed_input_is_400_in_plain_text(
    server: RegistryServer, method: str, path: str, body: object
) -> None:
    await put(server)
    answer = await ask(server, method, path, body)
    assert answer.status_code == 400
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text
    assert (await ask(server, "GET", RANK)).status_code == 200


async def test_a_body_over_the_cap_is_413_announced_or_chunked(server: RegistryServer) -> None:
    long = b'{"bootstrap_rooms":[' + b"1," * (MAX_BODY_BYTES // 2) + b"1]}"
    assert (await ask(server, "POST", "/query_dp_ranks", long)).status_code == 413
    chunk = b"%x\r\n" % len(long) + long + b"\r\n0\r\n\r\n"
    head = b"POST /query_dp_ranks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert (await raw(server, head + chunk)).startswith(b"HTTP/1.1 413 ")
    assert (await ask(server, "GET", "/health")).status_code == 200


async def test_the_largest_body_passes(server: RegistryServer) -> None:
    body = b'{"bootstrap_rooms":[1]}'.ljust(MAX_BODY_BYTES)
    assert text(await ask(server, "POST", "/query_dp_ranks", body)) == (200, "{}")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"PUT /route HTTP/1.1\r\nContent-Length: many\r\n\r\n", b"400"),
        (b"PUT /route HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"PUT /route HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"413"),
        (b"GET /" + b"x" * (MAX_HEAD_BYTES + 400_000), b"431"),
    ],
)
async def test_what_is_no_http_gets_its_status_and_the_connection_is_closed(
    server: RegistryServer, sent: bytes, status: bytes
) -> None:
    async with connected(server) as (reader, writer):
        for start in range(0, len(sent), 4096):
            writer.write(sent[start : start + 4096])
            await asyncio.sleep(0)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 " + status + b" ")
    assert b"Connection: close" in answer
    assert (await ask(server, "GET", "/health")).status_code == 200


# --- connections -------------------------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order(server: RegistryServer) -> None:
    get = b"GET /%s HTTP/1.1\r\nHost: x\r\n%s\r\n"
    answer = await raw(
        server, get % (b"health", b"") + get % (b"none", b"") + get % (b"health", b"Connection: close\r\n")
    )
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


async def test_a_request_in_single_bytes_is_understood(server: RegistryServer) -> None:
    async with connected(server) as (reader, writer):
        for byte in b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.read()).endswith(b"\r\n\r\nOK")


async def test_http_1_0_and_upgrades_are_answered_and_closed(server: RegistryServer) -> None:
    assert (await raw(server, b"GET /health HTTP/1.0\r\n\r\n")).endswith(b"OK")
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert (await raw(server, upgrade)).endswith(b"OK")


async def test_a_client_that_waits_for_continue_gets_it(server: RegistryServer) -> None:
    body = b'{"bootstrap_rooms":[]}'
    head = b"POST /query_dp_ranks HTTP/1.1\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    async with connected(server) as (reader, writer):
        writer.write(head % len(body))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).endswith(b"{}")


GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_idle_connections_are_closed_and_used_ones_are_not(server: RegistryServer, clock: Clock) -> None:
    async with connected(server) as (idle, idle_writer), connected(server) as (used, used_writer):
        idle_writer.write(GET_HEALTH)
        await idle.readuntil(b"\r\n\r\nOK")
        clock.now += 76
        used_writer.write(GET_HEALTH)
        await used.readuntil(b"\r\n\r\nOK")
        assert server.close_idle() == 1
        assert await idle.read() == b""
        used_writer.write(GET_HEALTH)
        await used.readuntil(b"\r\n\r\nOK")


async def test_stopping_closes_open_connections_and_frees_the_port(clock: Clock) -> None:
    server = RegistryServer(RegistryConfig(port=0), clock)
    await server.start()
    port = server.port
    async with connected(server) as (reader, writer):
        writer.write(GET_HEALTH)
        await reader.readuntil(b"\r\n\r\nOK")
        await server.stop()
        await server.stop()
        assert await reader.read() == b""
    again = RegistryServer(RegistryConfig(port=port), clock)
    await again.start()
    assert again.port == port
    await again.stop()


def test_it_serves_on_uvloop_too() -> None:
    async def once() -> httpx.Response:
        server = RegistryServer(RegistryConfig(port=0))
        await server.start()
        await put(server)
        answer = await ask(server, "GET", RANK)
        assert (await raw(server, b"not http\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        await server.stop()
        return answer

    assert uvloop.run(once()).json() == {"rank_ip": "10.0.0.1", "rank_port": 4000}


async def test_serve_says_where_it_is_and_a_cancel_frees_the_port(capsys: pytest.CaptureFixture[str]) -> None:
    task = asyncio.create_task(serve(RegistryConfig(port=0)))
    printed = ""
    while not printed:
        await asyncio.sleep(0)
        printed = capsys.readouterr().out
    url = printed.split()[2]
    async with httpx.AsyncClient(trust_env=False) as http:
        assert text(await http.get(f"{url}/health")) == (200, "OK")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{url}/health")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-7"])
def test_a_registry_leaves_loopback_with_a_token_or_by_saying_that_it_needs_none(host: str) -> None:
    with pytest.raises(BadSetting, match=r"--write-token.*--allow-insecure"):
        RegistryConfig(host=host)
    for allowed in ({"write_token": "s3cret"}, {"allow_insecure": True}):
        assert RegistryConfig(host=host, **allowed).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_registry_on_loopback_needs_no_token(host: str) -> None:
    assert RegistryConfig(host=host).write_token == ""


async def test_a_registry_that_lets_whoever_comes_register_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdplane.registry.server.is_loopback", lambda host: False)
    task = asyncio.create_task(serve(RegistryConfig(port=0, allow_insecure=True)))
    async with asyncio.timeout(10):
        while not caplog.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert "--write-token" in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_taken_port_is_named_with_its_setting(server: RegistryServer) -> None:
    second = RegistryServer(RegistryConfig(port=server.port))
    with pytest.raises(BadSetting, match=f"cannot listen on 127.0.0.1:{server.port}.*--port"):
        await second.start()


# --- our own routes ----------------------------------------------------------------------------------------------


async def test_the_status_says_who_is_there_and_who_is_missing(server: RegistryServer) -> None:
    await put(server, attn_tp_size=2, pd_instance="p-1")
    assert (await ask(server, "GET", "/v1/registry")).json() == {
        "ready": False,
        "epoch": 1,
        "instance": "p-1",
        "expected": 2,
        "registered": [
            {"rank": [0, 0, 0, 0], "rank_ip": "10.0.0.1", "rank_port": 4000, "instance": "p-1", "expires_in_s": None}
        ],
        "missing": [[0, 0, 1, 0]],
        "rooms": 0,
        "expired": [],
        "refused": [],
        "group": {**dict.fromkeys(INFO_KEYS), **GROUP, "attn_tp_size": 2},
    }


async def test_who_has_disagreed_is_in_the_status(server: RegistryServer) -> None:
    await put(server, attn_tp_size=2)
    await put(server, attn_tp_size=2, attn_tp_rank=1, decode_allocation_policy="prefill_complete")
    (refused,) = (await ask(server, "GET", "/v1/registry")).json()["refused"]
    assert refused["rank"] == [0, 0, 1, 0]
    assert "is 'prefill_complete', the group registered 'early'" in refused["reason"]


async def test_a_rank_that_falls_silent_turns_200_into_503_and_is_named(server: RegistryServer, clock: Clock) -> None:
    await put(server, pd_ttl_s=15)
    assert (await ask(server, "GET", RANK)).status_code == 200
    clock.now += 15
    assert text(await ask(server, "GET", RANK)) == (
        503,
        "Prefill server not fully registered yet (0 workers registered).",
    )
    assert (await ask(server, "GET", "/v1/registry")).json()["expired"] == [[0, 0, 0, 0]]
    await put(server, pd_ttl_s=15)
    assert (await ask(server, "GET", RANK)).status_code == 200


async def test_a_standalone_registry_may_expire_those_that_say_nothing(clock: Clock) -> None:
    server = RegistryServer(RegistryConfig(port=0, expire_s=30.0), clock)
    await server.start()
    await put(server)
    clock.now += 30
    assert (await ask(server, "GET", INFO)).status_code == 503
    await server.stop()


async def test_instances_come_and_go_behind_one_address(server: RegistryServer) -> None:
    for number in range(3):
        await put(server, pd_instance=f"p-{number}", rank_port=4000 + number, page_size=16 << number)
        assert (await ask(server, "GET", RANK)).json()["rank_port"] == 4000 + number
    assert (await put(server, pd_instance="p-0")).status_code == 409
    assert (await ask(server, "DELETE", "/v1/route", {"pd_instance": "p-1"})).json() == {"removed": 0}
    status = (await ask(server, "GET", "/v1/registry")).json()
    assert (status["instance"], status["ready"]) == ("p-2", True)


async def test_many_rooms_are_registered_in_one_call_or_none_of_them(server: RegistryServer) -> None:
    await put(server, attn_dp_size=2)
    good, bad = {"bootstrap_room": 7, "dp_rank": 1}, {"bootstrap_room": 8, "dp_rank": 2}
    assert (await ask(server, "POST", "/v1/dp_ranks", {"rooms": [good, bad]})).status_code == 400
    query = {"bootstrap_rooms": [7, 8]}
    assert (await ask(server, "POST", "/query_dp_ranks", query)).json() == {}
    assert text(await ask(server, "POST", "/v1/dp_ranks", {"rooms": [good]})) == (200, "OK")
    assert (await ask(server, "POST", "/query_dp_ranks", query)).json() == {"7": 1}


async def test_an_instance_deregisters(server: RegistryServer) -> None:
    await put(server, pd_instance="p-1")
    assert (await ask(server, "DELETE", "/v1/route", {"pd_instance": "p-1"})).json() == {"removed": 1}
    assert (await ask(server, "GET", RANK)).status_code == 503


async def test_with_a_write_token_only_its_bearer_writes_and_anyone_reads(clock: Clock) -> None:
    server = RegistryServer(RegistryConfig(port=0, write_token="s3cret"), clock)
    await server.start()
    body = wire.encode(registration())
    for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "s3cret"}):
        assert text(await ask(server, "PUT", "/route", body, **headers)) == (401, "Unauthorized")
    room = {"bootstrap_room": 1, "dp_rank": 0}
    assert (await ask(server, "POST", "/register_dp_rank", room)).status_code == 401
    assert (await ask(server, "POST", "/v1/dp_ranks", {"rooms": [room]})).status_code == 401
    assert (await ask(server, "DELETE", "/v1/route", {"pd_instance": "p"})).status_code == 401
    assert (await ask(server, "PUT", "/route", body, Authorization="Bearer s3cret")).status_code == 200
    assert (await ask(server, "GET", RANK)).status_code == 200
    await server.stop()
