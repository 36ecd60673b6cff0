"""The client against the real server, and against what is none."""

from __future__ import annotations

import asyncio

import pytest

from pdplane.core.ids import Rank, Room
from pdplane.registry.client import (
    NoSuchRank,
    NotOurRegistry,
    NotRegisteredYet,
    RegistryClient,
    RegistryRefused,
    RegistryUnavailable,
)
from pdplane.registry.clients import Clients
from pdplane.registry.server import RegistryConfig, RegistryServer
from pdplane.wire.registry import RankEndpoint

from .conftest import registration, spied


async def test_prefill_registers_and_decode_finds_it(client: RegistryClient) -> None:
    await client.register(registration(pd_instance="p-1"))
    info = await client.server_info()
    assert (info.attn_tp_size, info.page_size, info.kv_cache_dtype) == (1, 16, "float32")
    assert await client.rank_endpoint(Rank()) == RankEndpoint("10.0.0.1", 4000)
    assert (await client.status()).instance == "p-1"


async def test_rooms_cross_the_registry(client: RegistryClient) -> None:
    await client.register_dp_rank(Room(7), 1)
    assert await client.query_dp_ranks([Room(7), Room(8)]) == {Room(7): 1}


async def test_many_rooms_cross_in_one_call(client: RegistryClient) -> None:
    await client.register_dp_ranks({Room(7): 1, Room(8): 0})
    assert await client.query_dp_ranks([Room(7), Room(8)]) == {Room(7): 1, Room(8): 0}


async def test_sglangs_registry_is_told_from_ours() -> None:
    async with spied(sglang=True) as server, RegistryClient(f"http://{server.address}") as client:
        for question in (client.status(), client.deregister("p-1"), client.register_dp_ranks({Room(7): 1})):
            with pytest.raises(NotOurRegistry, match="SGLang's routes alone"):
                await question


async def test_clients_of_many_registries_are_kept_and_bounded() -> None:
    made: list[str] = []

    def make(address: str) -> RegistryClient:
        made.append(address)
        return RegistryClient(f"http://{address}")

    clients = Clients(make, most=2)
    with clients.of("a"):
        for address in ("b", "c", "d", "d"):
            with clients.of(address):
                pass
        assert len(clients) == 2
        with clients.of("a"):
            pass
    assert made == ["a", "b", "c", "d"]
    with clients.of("c"):
        pass
    assert made[4:] == ["c"]
    await clients.close()
    assert len(clients) == 0


async def test_a_prefill_that_has_left_is_not_registered(client: RegistryClient) -> None:
    await client.register(registration(pd_instance="p-1"))
    assert await client.deregister("p-1") == 1
    with pytest.raises(NotRegisteredYet, match=r"0 workers registered"):
        await client.server_info()


async def test_a_group_that_is_not_whole_is_a_matter_of_waiting(client: RegistryClient) -> None:
    await client.register(registration(attn_tp_size=2))
    with pytest.raises(NotRegisteredYet, match=client.base_url):
        await client.rank_endpoint(Rank())


async def test_a_rank_that_will_never_come_is_another_error(client: RegistryClient) -> None:
    await client.register(registration())
    with pytest.raises(NoSuchRank, match=r"tp_rank=3.*compare its sizes"):
        await client.rank_endpoint(Rank(tp=3))


async def test_what_the_registry_refuses_comes_with_its_reason(client: RegistryClient) -> None:
    await client.register(registration(attn_tp_size=2))
    with pytest.raises(RegistryRefused, match="page_size of rank dp0cp0tp1pp0 is 32, the group registered 16"):
        await client.register(registration(attn_tp_size=2, attn_tp_rank=1, page_size=32))


async def test_the_write_token_is_sent_and_its_lack_is_explained() -> None:
    server = RegistryServer(RegistryConfig(port=0, write_token="s3cret"))
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    async with RegistryClient(url, token="s3cret") as bearer, RegistryClient(url) as stranger:
        with pytest.raises(RegistryRefused, match="needs its write token"):
            await stranger.register(registration())
        await bearer.register(registration())
        assert await stranger.rank_endpoint(Rank()) == RankEndpoint("10.0.0.1", 4000)
    await server.stop()


async def test_nobody_there_is_unavailable_with_address_and_remedy(server: RegistryServer) -> None:
    port = server.port
    await server.stop()
    async with RegistryClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(RegistryUnavailable, match=rf"http://127\.0\.0\.1:{port}: .*is the prefill up"):
            await client.server_info()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n<html",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
    ],
)
async def test_what_is_no_registry_is_unavailable(answer: bytes) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    listener = await asyncio.start_server(impostor, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with RegistryClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(RegistryUnavailable, match=client.base_url):
            await client.server_info()
    listener.close()
    await listener.wait_closed()
