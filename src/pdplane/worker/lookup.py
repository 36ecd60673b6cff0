"""Decode's questions to prefills' registries: is it one to pair with, where do its ranks listen, who took this room.

One client a registry, kept alive: asking is on the way of the first request of each prefill, and of every request where
its prefill chooses the dp rank. Rooms that are asked for in one turn of the loop travel in one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from pdplane.core.errors import Cause, Refused, unavailable
from pdplane.core.events import ControlEndpoint, RouteKnown
from pdplane.core.ids import Rank, Room, Shape
from pdplane.core.topology import ranks_of
from pdplane.registry.client import (
    NotOurRegistry,
    NotRegisteredYet,
    RegistryClient,
    RegistryError,
    RegistryUnavailable,
)
from pdplane.registry.clients import Clients
from pdplane.wire.registry import MAX_RANKS, MAX_ROOMS_PER_CALL, PrefillServerInfo, RegistryStatus

LOOKUP_TIMEOUT_S = 3.0
MAX_CONCURRENT_GETS = 8
MAX_NAMED = 8

T = TypeVar("T")

Waiting = dict[Room, asyncio.Future[int | None]]


class Lookups:
    """`policy`, and `page_size` and `kv_dtype` where given, are what this decode must have in common with a prefill at
    SGLang's registry; one at ours is met all the same, so that both sides say what differs. Used on one loop; close it
    in the end."""

    def __init__(
        self,
        *,
        policy: str,
        page_size: int | None = None,
        kv_dtype: str | None = None,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> None:
        self._policy = policy
        self._page_size = page_size
        self._kv_dtype = kv_dtype
        self._clients = Clients(lambda address: RegistryClient(f"http://{address}", timeout_s=timeout_s))
        self._waiting: dict[str, Waiting] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Who still waits is cancelled."""
        for task in self._asking:
            task.cancel()
        for waiting in self._waiting.values():
            for future in waiting.values():
                future.cancel()
        self._waiting.clear()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._clients.close()

    async def route(self, address: str) -> RouteKnown:
        """Every rank of the group whose registry is at `address`, from our registry in one call, from SGLang's rank by
        rank. Raises Refused, naming what differs, who is missing, or the remedy."""
        with self._clients.of(address) as registry:
            try:
                found = await _answered(registry.status())
            except NotOurRegistry:
                return await self._route_by_ranks(address, registry)
        if not found.ready:
            raise Refused(unavailable("prefill_not_ready", _not_whole(address, found), side="prefill"))
        if found.group is None:  # an older release of ours
            with self._clients.of(address) as registry:
                return await self._route_by_ranks(address, registry)
        shape = _shape(address, found.group)
        ranks = tuple((each.rank, ControlEndpoint(each.rank_ip, each.rank_port)) for each in found.registered)
        return RouteKnown(address, ranks, shape, found.group.follow_bootstrap_room)

    async def dp_rank(self, address: str, room: Room) -> int | None:
        """The prefill's dp rank that took this room; None where the registry does not know (yet). Raises Refused."""
        waiting = self._waiting.setdefault(address, {})
        if not waiting:
            asyncio.get_running_loop().call_soon(self._ask_later, address)
        future = waiting.get(room)
        if future is None:
            future = waiting[room] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(future)

    async def _route_by_ranks(self, address: str, registry: RegistryClient) -> RouteKnown:
        info = await _answered(registry.server_info())
        self._check_alike(address, info)
        shape = _shape(address, info)
        turns = asyncio.Semaphore(MAX_CONCURRENT_GETS)

        async def endpoint(rank: Rank) -> tuple[Rank, ControlEndpoint]:
            async with turns:
                found = await _answered(registry.rank_endpoint(rank))
            return rank, ControlEndpoint(found.rank_ip, found.rank_port)

        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(endpoint(rank)) for rank in ranks_of(shape)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return RouteKnown(address, tuple(task.result() for task in asked), shape, info.follow_bootstrap_room)

    def _ask_later(self, address: str) -> None:
        """A turn after the first room was asked for: whoever else asks in that turn comes along."""
        task = asyncio.get_running_loop().create_task(self._ask(address))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, address: str) -> None:
        waiting = self._waiting.pop(address, {})
        rooms = list(waiting)
        for start in range(0, len(rooms), MAX_ROOMS_PER_CALL):
            part = rooms[start : start + MAX_ROOMS_PER_CALL]
            await self._ask_of(address, {room: waiting[room] for room in part})

    async def _ask_of(self, address: str, waiting: Waiting) -> None:
        try:
            with self._clients.of(address) as registry:
                known = await _answered(registry.query_dp_ranks(waiting))
        except Exception as error:
            for future in waiting.values():
                _settle(future, error)
        except asyncio.CancelledError:
            for future in waiting.values():
                future.cancel()
            raise
        else:
            for room, future in waiting.items():
                _settle(future, known.get(room))

    def _check_alike(self, address: str, info: PrefillServerInfo) -> None:
        """Raises Refused where this decode cannot take pages from it, naming both values."""
        for name, theirs, ours in (
            ("decode_allocation_policy", info.decode_allocation_policy, self._policy),
            ("page_size", info.page_size, self._page_size),
            ("kv_cache_dtype", info.kv_cache_dtype, self._kv_dtype),
        ):
            if None not in (theirs, ours) and theirs != ours:
                text = f"{name} differs: prefill at {address} has {theirs!r}, decode has {ours!r}"
                raise _incompatible(f"{text}; start both with the same")


def _shape(address: str, info: PrefillServerInfo) -> Shape:
    """The group's. Raises Refused where it is of a kind that this decode has no sessions with."""
    for axis, size in (("context", info.attn_cp_size), ("pipeline", info.pp_size)):
        if size != 1:
            text = f"the prefill at {address} has {size} {axis} parallel ranks"
            raise _incompatible(f"{text}; this decode takes pages from 1 only")
    if info.enable_kv_cache_sharding or info.enable_dsa_cache_layer_split:
        raise _incompatible(f"the prefill at {address} splits pages over its ranks; this decode takes whole ones")
    shape = Shape(dp=info.dp_size, tp=info.attn_tp_size)
    if min(shape.dp, shape.tp) < 1 or shape.dp * shape.tp > MAX_RANKS:
        raise _incompatible(f"the prefill at {address} has {shape}; this decode takes 1 to {MAX_RANKS} ranks")
    return shape


async def _answered(question: Awaitable[T]) -> T:
    """The registry's answer, with its errors as Refused; only NotOurRegistry passes."""
    try:
        return await question
    except NotOurRegistry:
        raise
    except NotRegisteredYet as error:
        raise Refused(unavailable("prefill_not_ready", str(error), side="prefill")) from None
    except RegistryUnavailable as error:
        raise Refused(unavailable("registry_unreachable", str(error), side="prefill")) from None
    except RegistryError as error:
        raise Refused(Cause("registry_refused", str(error), 502, retryable=True, side="prefill")) from None


def _settle(future: asyncio.Future[int | None], outcome: int | Exception | None) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _not_whole(address: str, found: RegistryStatus) -> str:
    if not found.expected:
        return f"no prefill has registered at {address} yet; start it, or wait for it"
    missing, silent = _named(found.missing), [rank for rank in found.missing if rank in set(found.expired)]
    text = (
        f"the prefill at {address} is not whole: {len(found.registered)} of {found.expected} ranks, {missing} missing"
    )
    if silent:
        text += f"; {'all of these' if silent == found.missing else _named(silent)} fell silent"
    if found.refused:
        text += f"; {found.refused[0].rank} was refused: {found.refused[0].reason}"
    return text


def _named(ranks: list[Rank]) -> str:
    names = ", ".join(str(rank) for rank in ranks[:MAX_NAMED])
    return f"{names} and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else names


def _incompatible(text: str) -> Refused:
    return Refused(Cause("incompatible", text, 503, retryable=True, side="decode"))
