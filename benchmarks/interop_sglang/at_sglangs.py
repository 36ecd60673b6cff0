"""Our registration and lookup at SGLang's registry, with SGLang's classes on the other side of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from peer_process import Peer, Ports, free_port
from report import Checks, Row
from resolving import BALANCED, SHAPES, all_resolve

from pdplane.core.errors import Refused
from pdplane.core.ids import Rank, Room, Shape
from pdplane.core.topology import ranks_of
from pdplane.registry.client import NoSuchRank, NotOurRegistry, RegistryClient
from pdplane.worker import registration
from pdplane.worker.config import WorkerConfig
from pdplane.worker.lookup import Lookups
from pdplane.worker.registration import Registered, registered

PATIENCE_S = 10.0


async def ours_at_sglangs(peer: Peer) -> list[Row]:
    checks = Checks()
    registration.REGISTER_EVERY_S = 0.05  # so that everyone registers again while this looks
    for shape in SHAPES:
        await _ours_at_theirs(peer, checks, shape)
        await _theirs_looked_up(peer, checks, shape)
    await _rooms_at_theirs(peer, checks)
    await _refusals_at_theirs(peer, checks)
    return checks.rows


async def _ours_at_theirs(peer: Peer, checks: Checks, shape: Shape) -> None:
    part, port = f"our prefill of {shape}", await peer.serve()
    async with _lookups() as lookups:
        checks.check(part, "looked up too early", "prefill_not_ready", await _refusal(lookups, port))
        async with _prefill(port, shape) as (_, ports):
            route = await lookups.route(f"127.0.0.1:{port}")
            found = {rank: endpoint.port for rank, endpoint in route.ranks}
            checks.check(part, "looked up by ours", (shape, True, ports), (route.shape, route.follow_room, found))
            await all_resolve(peer, checks, f"{part}, by SGLang's decode", port, shape, ports)
        async with RegistryClient(f"http://127.0.0.1:{port}") as client:
            checks.check(part, "a rank that it has not", "NoSuchRank", await _raised(client.rank_endpoint(Rank(tp=9))))
            checks.check(part, "our own routes", "NotOurRegistry", await _raised(client.status()))


async def _theirs_looked_up(peer: Peer, checks: Checks, shape: Shape) -> None:
    part, port, ranks = f"SGLang's prefill of {shape}", await peer.serve(), sorted(ranks_of(shape))
    async with _lookups() as lookups:
        ports = await peer.register(port, shape, ranks[:-1])
        checks.check(part, "looked up too early", "prefill_not_ready", await _refusal(lookups, port))
        ports |= await peer.register(port, shape, ranks[-1:])
        route = await lookups.route(f"127.0.0.1:{port}")
        found = {rank: endpoint.port for rank, endpoint in route.ranks}
        checks.check(part, "looked up by ours", (shape, True, ports), (route.shape, route.follow_room, found))


async def _rooms_at_theirs(peer: Peer, checks: Checks) -> None:
    part, port = "rooms of dp 2", await peer.serve()
    address = f"127.0.0.1:{port}"
    async with _lookups() as lookups, _prefill(port, Shape(dp=2), BALANCED) as (entry, _):
        checks.check(part, "rooms do not tell", False, (await lookups.route(address)).follow_room)
        checks.check(part, "a room before it is taken", None, await lookups.dp_rank(address, Room(101)))
        for room in (101, 102):
            entry.register_dp_rank(Room(room), 1)
        for room in (101, 102):
            checks.check(part, f"room {room}, asked by ours", 1, await _patiently(lookups, address, Room(room)))
        asked = await peer.do("ask_rooms", port=port, rooms=[101, 102, 103])
        checks.check(part, "asked by SGLang's receiver", {"101": 1, "102": 1}, asked["ranks"])


async def _refusals_at_theirs(peer: Peer, checks: Checks) -> None:
    part, port = "refusals", await peer.serve()
    await peer.register(port, Shape(), [Rank()], policy="prefill_complete", page_size=32, kv_dtype="bfloat16")
    for facts, named in (
        ({"policy": "early"}, "'prefill_complete', decode has 'early'"),
        ({"policy": "prefill_complete", "page_size": 16}, "has 32, decode has 16"),
        ({"policy": "prefill_complete", "kv_dtype": "float32"}, "'bfloat16', decode has 'float32'"),
    ):
        async with _lookups(**facts) as lookups:
            checks.check(part, named, True, named in await _refusal(lookups, port, whole=True))
    async with _lookups(policy="prefill_complete") as lookups:
        found = await lookups.route(f"127.0.0.1:{port}")
        checks.check(part, "none where all is the same", Shape(), found.shape)
        checks.check(part, "nobody listens", "registry_unreachable", await _refusal(lookups, free_port()))


@contextlib.asynccontextmanager
async def _lookups(policy: str = "early", **facts: Any) -> AsyncIterator[Lookups]:
    lookups = Lookups(policy=policy, **facts)
    try:
        yield lookups
    finally:
        await lookups.close()


@contextlib.asynccontextmanager
async def _prefill(
    port: int, shape: Shape, method: str = "follow_bootstrap_room"
) -> AsyncIterator[tuple[Registered, Ports]]:
    """Our prefill's registration, once SGLang's registry has all of it."""
    ports = {rank: 5000 + number for number, rank in enumerate(ranks_of(shape))}
    config = WorkerConfig(
        role="prefill",
        registry=f"http://127.0.0.1:{port}",
        dp=shape.dp,
        tp=shape.tp,
        load_balance_method=method,
    )
    whole = asyncio.Event()
    async with registered(
        config,
        instance="p-1",
        page_size=16,
        kv_dtype="float32",
        control_ports=ports,
        waits_for=lambda what: None if what else whole.set(),
    ) as entry:
        await asyncio.wait_for(whole.wait(), PATIENCE_S)
        yield entry, ports


async def _patiently(lookups: Lookups, address: str, room: Room) -> int | None:
    """As a decode asks: until it hears."""
    async with asyncio.timeout(PATIENCE_S):
        while (found := await lookups.dp_rank(address, room)) is None:  # noqa: ASYNC110  (as a decode does)
            await asyncio.sleep(0.01)
    return found


async def _refusal(lookups: Lookups, port: int, *, whole: bool = False) -> str:
    try:
        await lookups.route(f"127.0.0.1:{port}")
    except Refused as refused:
        return str(refused) if whole else refused.cause.code
    return "none"


async def _raised(question: Awaitable[object]) -> str:
    try:
        await question
    except (NoSuchRank, NotOurRegistry) as error:
        return type(error).__name__
    return "none"
