"""SGLang's prefill and decode managers, senders and receivers at our registry."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from peer_process import Peer
from report import Checks, Row
from resolving import BALANCED, BOOTSTRAPPING, FAILED, SHAPES, WAITING_FOR_INPUT, all_resolve

from pdplane.core.ids import Rank, Shape
from pdplane.core.topology import ranks_of
from pdplane.registry.server import RegistryConfig, RegistryServer


async def sglangs_at_ours(peer: Peer) -> list[Row]:
    checks = Checks()
    for shape in SHAPES:
        async with _our_registry() as server:
            await _group_at_ours(peer, checks, server, shape)
    async with _our_registry() as server:
        await _rooms_at_ours(peer, checks, server)
    for policy in ("early", "prefill_complete"):
        async with _our_registry() as server:
            await _policy_at_ours(peer, checks, server, policy)
    return checks.rows


async def _group_at_ours(peer: Peer, checks: Checks, server: RegistryServer, shape: Shape) -> None:
    part, ranks = f"prefill of {shape}", sorted(ranks_of(shape))
    nobody = await peer.resolve(server.port, Shape(), Rank(), 0)
    checks.check(part, "resolved while nobody is there", {"known": False, "raised": ""}, nobody)
    ports = await peer.register(server.port, shape, ranks[:-1])
    if ports:
        partly = await peer.resolve(server.port, Shape(), Rank(), 0)
        checks.check(part, "resolved while one is missing", {"known": False, "raised": ""}, partly)
        checks.check(part, "the missing rank", ranks[-1:], server.table.status(0, 0.0).missing)
    ports |= await peer.register(server.port, shape, ranks[-1:])
    there = {each.rank: each.rank_port for each in server.table.status(0, 0.0).registered}
    checks.check(part, "registered by its managers", ports, there)
    await all_resolve(peer, checks, part, server.port, shape, ports)
    moved = await peer.register(server.port, shape, ranks[:1])
    checks.check(part, "still whole after one registers again", (True, len(ranks)), (server.table.ready, len(there)))
    await all_resolve(peer, checks, f"{part}, one moved", server.port, shape, ports | moved)
    unknown = await peer.resolve(server.port, Shape(), Rank(), 7)
    checks.check(part, "a receiver of dp rank 7", FAILED, unknown.get("status"))


async def _rooms_at_ours(peer: Peer, checks: Checks, server: RegistryServer) -> None:
    part, shape = "rooms of dp 2", Shape(dp=2)
    ranks = sorted(ranks_of(shape))
    await peer.register(server.port, shape, ranks, load_balance_method=BALANCED)
    found = await peer.resolve(server.port, Shape(), Rank(), 1)
    checks.check(part, "decode sees that rooms do not tell", False, found.get("follow_bootstrap_room"))
    for dp, rooms in enumerate(([101, 103], [102, 2**63 - 1])):
        taken = await peer.take(server.port, shape, Rank(dp), rooms, load_balance_method=BALANCED)
        checks.check(part, f"senders of dp rank {dp}", [BOOTSTRAPPING] * 2, taken)
    asked = await peer.do("ask_rooms", port=server.port, rooms=[101, 102, 103, 2**63 - 1, 5])
    checks.check(part, "receivers ask", {"101": 0, "102": 1, "103": 0, str(2**63 - 1): 1}, asked["ranks"])


async def _policy_at_ours(peer: Peer, checks: Checks, server: RegistryServer, policy: str) -> None:
    part, other = f"policy {policy}", {"early": "prefill_complete", "prefill_complete": "early"}[policy]
    ports = await peer.register(server.port, Shape(), [Rank()], policy=policy)
    same = await peer.resolve(server.port, Shape(), Rank(), 0, policy=policy)
    waits_in = WAITING_FOR_INPUT if policy == "early" else BOOTSTRAPPING
    checks.check(
        part,
        "decode of the same",
        (waits_in, [["127.0.0.1", ports[Rank()]]]),
        (same.get("status"), same.get("endpoints")),
    )
    unlike = await peer.resolve(server.port, Shape(), Rank(), 0, policy=other)
    checks.check(
        part,
        f"decode of {other}",
        (FAILED, True),
        (unlike.get("status"), f"decode={other}" in str(unlike.get("reason"))),
    )
    for name, value in (("page_size", 32), ("kv_dtype", "bfloat16")):
        unlike = await peer.resolve(server.port, Shape(), Rank(), 0, policy=policy, **{name: value})
        checks.check(part, f"decode of {name} {value}", True, str(value) in unlike.get("raised", ""))


@contextlib.asynccontextmanager
async def _our_registry() -> AsyncIterator[RegistryServer]:
    server = RegistryServer(RegistryConfig(port=0))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
