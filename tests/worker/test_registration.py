"""A prefill's entry in a registry: every rank under one instance, kept alive, taken back; and its rooms."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from pdplane.core.ids import Rank, Room, Shape
from pdplane.core.topology import ranks_of
from pdplane.registry import client
from pdplane.registry.client import RegistryClient, RegistryRefused
from pdplane.registry.server import RegistryConfig, RegistryServer
from pdplane.registry.table import RouteTable
from pdplane.settings import BadSetting
from pdplane.wire.registry import RankEndpoint
from pdplane.worker import registration
from pdplane.worker.config import WorkerConfig
from pdplane.worker.registration import Registered, registered
from tests.registry.conftest import registration as registration_of_one
from tests.registry.conftest import spied

from .fleets import free_port, until

SHAPE = Shape(dp=2, tp=2)
PORTS = {rank: port for port, rank in enumerate(ranks_of(SHAPE), 5000)}
OWN_TIMES = {name: getattr(registration, name) for name in ("REGISTER_EVERY_S", "SILENT_ROUNDS")}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "REGISTER_EVERY_S", 0.02)
    monkeypatch.setattr(registration, "SILENT_ROUNDS", 10_000)
    monkeypatch.setattr(registration, "RETRY_S", 0.01)


@contextlib.asynccontextmanager
async def entry(
    url: str = "", said: list[str] | None = None, *, instance: str = "p-1", token: str = "", **settings: str
) -> AsyncIterator[Registered]:
    sizes = {"dp": SHAPE.dp, "tp": SHAPE.tp}
    given = {"registry": url, "registry_token": token, **settings}
    config = WorkerConfig(role="prefill", bootstrap_port=0, **sizes, **given)
    async with registered(
        config,
        instance=instance,
        page_size=16,
        kv_dtype="float32",
        control_ports=PORTS,
        waits_for=(said if said is not None else []).append,
    ) as entry:
        yield entry


async def test_an_embedded_registry_has_every_rank_before_it_is_spoken_of() -> None:
    async with entry() as it, RegistryClient(f"http://127.0.0.1:{it.bootstrap_port}") as client:
        status = await client.status()
        assert (status.ready, status.instance, status.expected) == (True, "p-1", 4)
        assert {each.rank: each.rank_port for each in status.registered} == PORTS
        assert {each.expires_in_s for each in status.registered} == {None}
        assert await client.rank_endpoint(Rank(dp=1, tp=1)) == RankEndpoint("127.0.0.1", 5003)


async def test_nobody_else_registers_at_an_embedded_registry() -> None:
    async with entry() as it, RegistryClient(f"http://127.0.0.1:{it.bootstrap_port}") as stranger:
        for attempt in (stranger.deregister("p-1"), stranger.register_dp_rank(Room(7), 0)):
            with pytest.raises(RegistryRefused, match="write token"):
                await attempt
        assert (await stranger.status()).ready


async def test_what_the_group_is_like_is_registered_with_it() -> None:
    async with (
        entry(decode_allocation_policy="prefill_complete", load_balance_method="total_requests") as it,
        RegistryClient(f"http://127.0.0.1:{it.bootstrap_port}") as client,
    ):
        info = await client.server_info()
    assert (info.dp_size, info.attn_tp_size, info.page_size, info.kv_cache_dtype) == (2, 2, 16, "float32")
    assert (info.decode_allocation_policy, info.follow_bootstrap_room) == ("prefill_complete", False)


async def test_a_registry_apart_is_told_by_every_rank_that_says_how_long_it_may_be_silent() -> None:
    said: list[str] = []
    async with spied() as server:
        async with entry(f"http://{server.address}", said) as it:
            assert it.bootstrap_port == 0
            assert said == [f"its registration at http://{server.address}"]
            await until(lambda: said[-1] == "")
            assert all(each.expires_in_s for each in server.table.status(0, 0.0).registered)
        assert server.table.registered == 0


async def test_a_registry_that_was_away_is_told_again() -> None:
    port = free_port()
    said: list[str] = []
    async with entry(f"http://127.0.0.1:{port}", said):
        for _ in range(2):
            server = RegistryServer(RegistryConfig(port=port))
            await server.start()
            await until(lambda server=server: server.table.ready)
            await server.stop()
    assert said[1:] == [""] * (len(said) - 1)


async def test_a_registry_that_refuses_us_is_what_readiness_waits_for() -> None:
    said: list[str] = []
    async with spied(write_token="s3cret") as server:
        async with entry(f"http://{server.address}", said):
            await until(lambda: "needs its write token" in said[-1])
        async with entry(f"http://{server.address}", said, token="s3cret"):
            await until(lambda: said[-1] == "")
            assert server.table.ready


async def test_a_prefill_that_was_replaced_says_so() -> None:
    said: list[str] = []
    async with spied() as server, entry(f"http://{server.address}", said):
        await until(lambda: server.table.ready)
        async with entry(f"http://{server.address}", instance="p-2"):
            await until(lambda: "p-1 was replaced by p-2" in said[-1])


async def test_a_taken_registry_port_is_named_with_its_setting() -> None:
    async with entry() as it:
        config = WorkerConfig(role="prefill", bootstrap_port=it.bootstrap_port)
        with pytest.raises(BadSetting, match="choose another --bootstrap-port, or 0"):
            async with registered(config, instance="p", page_size=16, kv_dtype="f", control_ports=PORTS):
                pass


def test_a_live_prefill_outlasts_two_lost_calls_and_a_loop_that_is_busy_for_seconds() -> None:
    lost_call_s, busy_s = OWN_TIMES["REGISTER_EVERY_S"] + client.TIMEOUT_S, 4.5
    lives_s = OWN_TIMES["REGISTER_EVERY_S"] * OWN_TIMES["SILENT_ROUNDS"]
    heard_again_s = 2 * lost_call_s + OWN_TIMES["REGISTER_EVERY_S"] + busy_s
    assert (lives_s, lost_call_s, heard_again_s) == (30.0, 10.0, 29.5)
    table = RouteTable()
    for now in (0.0, heard_again_s, 2 * heard_again_s):
        table.expire(now)
        assert table.ready == (now > 0.0)
        table.register(registration_of_one(pd_ttl_s=lives_s), now)
    table.expire(2 * heard_again_s + lives_s)
    assert not table.ready


# --- rooms -------------------------------------------------------------------------------------------------------


def known(server: RegistryServer, *rooms: int) -> dict[str, int]:
    return server.rooms.find(rooms, 0.0)


async def test_an_embedded_registry_knows_a_room_at_once() -> None:
    async with entry() as it:
        it.register_dp_rank(Room(7), 1)
        async with RegistryClient(f"http://127.0.0.1:{it.bootstrap_port}") as client:
            assert await client.query_dp_ranks([Room(7)]) == {Room(7): 1}


@pytest.mark.parametrize(
    ("sglang", "call", "times"), [(False, "POST /v1/dp_ranks", 1), (True, "POST /register_dp_rank", 50)]
)
async def test_rooms_of_the_same_moment_go_out_together_to_ours_and_each_alone_to_sglangs(
    sglang: bool, call: str, times: int
) -> None:
    async with spied(sglang=sglang) as server, entry(f"http://{server.address}") as it:
        await until(lambda: server.table.ready)
        for room in range(1, 51):
            it.register_dp_rank(Room(room), room % 2)
        await until(lambda: len(server.rooms) == 50)
        assert known(server, 1, 2, 50) == {"1": 1, "2": 0, "50": 0}
        assert server.asked.count(call) == times


async def test_rooms_taken_while_the_registry_is_away_are_told_when_it_is_back() -> None:
    port = free_port()
    async with entry(f"http://127.0.0.1:{port}") as it:
        it.register_dp_rank(Room(7), 1)
        await asyncio.sleep(0)
        it.register_dp_rank(Room(8), 0)
        server = RegistryServer(RegistryConfig(port=port))
        await server.start()
        await until(lambda: len(server.rooms) == 2)
        assert known(server, 7, 8) == {"7": 1, "8": 0}
        await server.stop()


async def test_a_room_that_a_registry_does_not_take_takes_no_other_along(caplog: pytest.LogCaptureFixture) -> None:
    async with spied() as server, entry(f"http://{server.address}") as it:
        await until(lambda: server.table.ready)
        for room, dp_rank in ((6, 0), (7, 9), (8, 1)):
            it.register_dp_rank(Room(room), dp_rank)
        await until(lambda: "dp_rank 9 is not a rank of dp_size 2" in caplog.text)
        assert known(server, 6, 7, 8) == {"6": 0, "8": 1}
        it.register_dp_rank(Room(9), 1)
        await until(lambda: len(server.rooms) == 3)
