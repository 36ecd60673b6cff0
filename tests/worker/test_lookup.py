"""What decode makes of a prefill's registry, ours or SGLang's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pdplane.core.errors import Refused
from pdplane.core.events import ControlEndpoint, RouteKnown
from pdplane.core.ids import Rank, Room, Shape
from pdplane.core.topology import ranks_of
from pdplane.registry.client import RegistryClient
from pdplane.registry.table import RouteTable
from pdplane.wire.registry import RegistryStatus, registration_of
from pdplane.worker.lookup import Lookups
from tests.registry.conftest import Spied, registration, spied

ONE = Shape()


@pytest.fixture
async def lookups() -> AsyncIterator[Lookups]:
    lookups = Lookups(policy="early", page_size=16, kv_dtype="float32")
    yield lookups
    await lookups.close()


@pytest.fixture(params=[False, True], ids=["ours", "sglangs"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Spied]:
    async with spied(sglang=request.param) as server:
        yield server


async def register(server: Spied, shape: Shape = ONE, **more: Any) -> tuple[tuple[Rank, ControlEndpoint], ...]:
    """All ranks of a group, from port 4000 up; what a route to it must name."""
    facts = {"page_size": 16, "kv_cache_dtype": "float32", **more}
    async with RegistryClient(f"http://{server.address}") as client:
        for port, rank in enumerate(ranks_of(shape), 4000):
            await client.register(registration_of(rank, shape, "10.0.0.1", port, **facts))
    return tuple((rank, ControlEndpoint("10.0.0.1", port)) for port, rank in enumerate(ranks_of(shape), 4000))


async def refusal(lookups: Lookups, server: Spied) -> str:
    with pytest.raises(Refused) as refused:
        await lookups.route(server.address)
    assert server.address in str(refused.value)
    return str(refused.value)


# --- routes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [ONE, Shape(tp=2), Shape(dp=2), Shape(dp=3, tp=4)], ids=str)
async def test_every_rank_of_a_group_is_found(lookups: Lookups, server: Spied, shape: Shape) -> None:
    ranks = await register(server, shape)
    assert await lookups.route(server.address) == RouteKnown(server.address, ranks, shape, True)


async def test_a_prefill_that_chooses_its_dp_ranks_is_told_from_one_that_follows_rooms(
    lookups: Lookups, server: Spied
) -> None:
    await register(server, Shape(dp=2), load_balance_method="total_requests")
    assert not (await lookups.route(server.address)).follow_room


async def test_our_registry_is_asked_once_and_over_one_connection(lookups: Lookups) -> None:
    async with spied() as server:
        await register(server, Shape(dp=2, tp=2))
        server.asked.clear()
        before = server.clients
        for _ in range(3):
            await lookups.route(server.address)
        assert server.asked == ["GET /v1/registry"] * 3
        assert server.clients == before + 1


async def test_nobody_has_registered_is_a_matter_of_waiting(lookups: Lookups, server: Spied) -> None:
    text = await refusal(lookups, server)
    assert text.startswith("prefill_not_ready (prefill)")


async def test_who_is_missing_is_named_and_why(lookups: Lookups) -> None:
    async with spied() as server:
        async with RegistryClient(f"http://{server.address}") as client:
            await client.register(registration(attn_tp_size=3))
            await client.register(registration(attn_tp_size=3, attn_tp_rank=1, pd_ttl_s=1e-9))
            with pytest.raises(Exception, match="page_size"):
                await client.register(registration(attn_tp_size=3, attn_tp_rank=2, page_size=32))
        text = await refusal(lookups, server)
        assert "1 of 3 ranks, dp0cp0tp1pp0, dp0cp0tp2pp0 missing; dp0cp0tp1pp0 fell silent" in text
        assert "dp0cp0tp2pp0 was refused: page_size of rank dp0cp0tp2pp0 is 32, the group registered 16" in text


async def test_many_missing_ranks_are_counted(lookups: Lookups) -> None:
    async with spied() as server:
        async with RegistryClient(f"http://{server.address}") as client:
            await client.register(registration(attn_tp_size=20))
        assert "dp0cp0tp8pp0 and 11 more missing" in await refusal(lookups, server)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (
            {"decode_allocation_policy": "prefill_complete"},
            "decode_allocation_policy differs: prefill at {} has 'prefill_complete', decode has 'early'",
        ),
        ({"page_size": 32}, "page_size differs: prefill at {} has 32, decode has 16"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype differs: prefill at {} has 'bfloat16', decode has 'float32'"),
    ],
)
async def test_a_prefill_of_another_kind_is_refused_with_both_values_or_met_to_hear_it(
    lookups: Lookups, more: dict[str, Any], named: str
) -> None:
    async with spied(sglang=True) as sglangs, spied() as ours:
        await register(sglangs, **more)
        assert named.format(sglangs.address) in await refusal(lookups, sglangs)
        ranks = await register(ours, **more)
        assert (await lookups.route(ours.address)).ranks == ranks


@pytest.mark.parametrize("shape", [ONE, Shape(dp=2, tp=2)])
async def test_a_registry_of_ours_that_tells_no_group_is_asked_rank_by_rank(
    lookups: Lookups, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = RouteTable.status

    def older(self: RouteTable, rooms: int, now: float) -> RegistryStatus:
        return msgspec.structs.replace(status(self, rooms, now), group=None)

    monkeypatch.setattr(RouteTable, "status", older)
    async with spied() as server:
        assert "no prefill has registered" in await refusal(lookups, server)
        ranks = await register(server, shape, load_balance_method="total_requests", pd_instance="p-1")
        server.asked.clear()
        assert await lookups.route(server.address) == RouteKnown(server.address, ranks, shape, False)
        assert server.asked == ["GET /v1/registry", *["GET /route"] * (1 + len(ranks))]
        await register(server, shape, page_size=32, pd_instance="p-2")
        assert "page_size differs" in await refusal(lookups, server)


async def test_what_a_decode_does_not_know_of_itself_is_not_compared(server: Spied) -> None:
    lookups = Lookups(policy="early")
    ranks = await register(server, page_size=64, kv_cache_dtype=None)
    assert (await lookups.route(server.address)).ranks == ranks
    await lookups.close()


@pytest.mark.parametrize(
    ("shape", "named"), [(Shape(cp=2), "2 context parallel ranks"), (Shape(pp=3), "3 pipeline parallel ranks")]
)
async def test_ranks_of_kinds_that_workers_here_do_not_run_are_refused(
    lookups: Lookups, server: Spied, shape: Shape, named: str
) -> None:
    await register(server, shape)
    assert named in await refusal(lookups, server)


@pytest.mark.parametrize("flag", ["enable_kv_cache_sharding", "enable_dsa_cache_layer_split"])
async def test_pages_that_are_split_over_ranks_are_refused(lookups: Lookups, server: Spied, flag: str) -> None:
    async with RegistryClient(f"http://{server.address}") as client:
        await client.register(registration(**{flag: True}))
    assert "splits pages over its ranks" in await refusal(lookups, server)


async def test_no_registry_is_unreachable_and_named(lookups: Lookups, server: Spied) -> None:
    address = server.address
    await server.stop()
    with pytest.raises(Refused, match=f"registry_unreachable .*{address}"):
        await lookups.route(address)
    with pytest.raises(Refused, match=f"registry_unreachable .*{address}"):
        await lookups.dp_rank(address, Room(7))


async def test_an_instance_that_is_swapped_behind_its_address_is_found(lookups: Lookups) -> None:
    async with spied() as server:
        await register(server, pd_instance="p-1")
        await lookups.route(server.address)
        await register(server, Shape(tp=2), pd_instance="p-2")
        assert (await lookups.route(server.address)).shape == Shape(tp=2)


# --- rooms -------------------------------------------------------------------------------------------------------


async def take(server: Spied, rooms: dict[int, int]) -> None:
    for room, dp_rank in rooms.items():
        server.take_room(Room(room), dp_rank)
    server.asked.clear()


async def test_the_dp_rank_of_a_room_is_what_prefill_said(lookups: Lookups, server: Spied) -> None:
    await take(server, {7: 1})
    assert await lookups.dp_rank(server.address, Room(7)) == 1
    assert await lookups.dp_rank(server.address, Room(8)) is None


async def test_rooms_asked_for_at_once_travel_in_one_call(lookups: Lookups, server: Spied) -> None:
    await take(server, {room: room % 3 for room in range(1, 100)})
    found = await asyncio.gather(*(lookups.dp_rank(server.address, Room(room)) for room in range(1, 120)))
    assert found == [room % 3 for room in range(1, 100)] + [None] * 20
    assert server.asked == ["POST /query_dp_ranks"]


async def test_a_room_that_two_ask_for_is_asked_once_and_one_may_leave(lookups: Lookups, server: Spied) -> None:
    await take(server, {7: 1})
    leaves, stays = (asyncio.create_task(lookups.dp_rank(server.address, Room(7))) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    assert await stays == 1
    assert leaves.cancelled()


async def test_closing_ends_who_still_waits() -> None:
    accepted = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    lookups = Lookups(policy="early")
    sent = asyncio.create_task(lookups.dp_rank(address, Room(7)))
    await accepted.wait()
    unsent = asyncio.create_task(lookups.dp_rank(address, Room(8)))
    await asyncio.sleep(0)
    await lookups.close()
    await asyncio.gather(sent, unsent, return_exceptions=True)
    assert sent.cancelled()
    assert unsent.cancelled()
    listener.close()
    await listener.wait_closed()
