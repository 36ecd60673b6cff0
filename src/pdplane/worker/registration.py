"""Prefill's entry in its registry, an embedded one by default or one that runs apart: all ranks of all its dp groups,
and which group took which room where a room's number does not say."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from typing import cast

from pdplane.core.ids import Rank, Room
from pdplane.core.topology import ranks_of
from pdplane.registry.client import (
    NotOurRegistry,
    RegistryClient,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
)
from pdplane.registry.server import RegistryConfig, RegistryServer
from pdplane.settings import BadSetting
from pdplane.wire.address import dialable, url_of
from pdplane.wire.registry import MAX_ROOMS_PER_CALL, Policy, PrefillRegistration, registration_of

from .background import task
from .config import WorkerConfig

log = logging.getLogger(__name__)

REGISTER_EVERY_S = 5.0
SILENT_ROUNDS = 6
"""Of registering, after which a registry that runs apart drops our ranks: 30 s. Long enough for a live prefill whose
calls are lost twice in a row (each costs a round and the client's 5 s) while its loop, or the registry's, is busy for
seconds; a dead one is known by its sessions long before."""
RETRY_S = 0.2
ROOM_PATIENCE_S = 60.0
MAX_CONCURRENT_POSTS = 8


@contextlib.asynccontextmanager
async def registered(
    config: WorkerConfig,
    *,
    instance: str,
    page_size: int,
    kv_dtype: str,
    control_ports: Mapping[Rank, int],
    waits_for: Callable[[str], None] = lambda _what: None,
) -> AsyncIterator[Registered]:
    """Registers every rank of this worker, at a registry apart now and again (it may restart), and leaves in the end.

    control_ports: of every rank; one without heads may share another's. instance: of the process, not of a dp group.
    waits_for: told what readiness waits for, "" once registered. After the first time the registry may be away (decodes
    that have met this prefill need none); that it refuses us is said again. Raises BadSetting where its port is taken.
    """
    async with contextlib.AsyncExitStack() as stack:
        server, client = await _registry(stack, config, config.registry_token or config.secret)
        told = functools.partial(
            registration_of,
            shape=config.shape,
            rank_ip=dialable(config.peer_host),
            page_size=page_size,
            kv_cache_dtype=kv_dtype,
            load_balance_method=config.load_balance_method,
            prefill_http_port=config.port or None,
            decode_allocation_policy=cast(Policy, config.decode_allocation_policy),
            pd_instance=instance,
            pd_ttl_s=REGISTER_EVERY_S * SILENT_ROUNDS if server is None else None,  # an embedded one ends with us
        )
        group = [told(rank, rank_port=control_ports[rank]) for rank in ranks_of(config.shape)]
        entry = Registered(client, group, server, waits_for)
        stack.push_async_callback(_leave, client, instance)
        if server is not None:
            await entry.register()
            waits_for("")
        else:
            waits_for(f"its registration at {client.base_url}")
            stack.enter_context(task(entry.keep_registered()))
            stack.enter_context(task(entry.keep_telling()))
        yield entry


class Registered:
    """`bootstrap_port`: the embedded registry's; 0 where it runs apart."""

    def __init__(
        self,
        client: RegistryClient,
        group: list[PrefillRegistration],
        embedded: RegistryServer | None,
        waits_for: Callable[[str], None],
    ) -> None:
        self.bootstrap_port = embedded.port if embedded else 0
        self._client = client
        self._group = group
        self._embedded = embedded
        self._waits_for = waits_for
        self._taken: dict[Room, tuple[int, float]] = {}  # room -> (dp rank, when it is too late to tell)
        self._some_taken = asyncio.Event()
        self._batches = True

    def register_dp_rank(self, room: Room, dp_rank: int) -> None:
        """The embedded registry knows at once; one apart is told soon, many rooms in a call, and again if need be."""
        if self._embedded is not None:
            self._embedded.take_room(room, dp_rank)
            return
        self._taken[room] = (dp_rank, asyncio.get_running_loop().time() + ROOM_PATIENCE_S)
        self._some_taken.set()

    async def register(self) -> None:
        """Every rank, once. Raises RegistryError, the first of them."""
        turns = asyncio.Semaphore(MAX_CONCURRENT_POSTS)

        async def put(rank: PrefillRegistration) -> None:
            async with turns:
                await self._client.register(rank)

        outcomes = await asyncio.gather(*(put(rank) for rank in self._group), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def keep_registered(self) -> None:
        said = ""
        while True:
            try:
                await self.register()
                self._waits_for("")
                said = ""
            except RegistryError as error:
                if str(error) != said:
                    log.warning("not registered: %s", error)
                said = str(error)
                if isinstance(error, RegistryRefused):  # waiting alone will not help, and decodes must not come
                    self._waits_for(said)
            await asyncio.sleep(REGISTER_EVERY_S)

    async def keep_telling(self) -> None:
        """Off every request's way: decode asks until it hears, and has patience for much longer than a call takes."""
        while True:
            await self._some_taken.wait()
            self._some_taken.clear()
            taken, self._taken = self._taken, {}
            try:
                await self._tell({room: dp_rank for room, (dp_rank, _) in taken.items()})
            except RegistryUnavailable as error:
                log.warning("%d rooms not registered yet: %s", len(taken), error)
                now = asyncio.get_running_loop().time()
                self._taken = {room: told for room, told in taken.items() if told[1] > now} | self._taken
                await asyncio.sleep(RETRY_S)
                if self._taken:
                    self._some_taken.set()
            except RegistryError as error:
                log.error("of %d rooms not all are registered: %s", len(taken), error)

    async def _tell(self, taken: dict[Room, int]) -> None:
        rooms = list(taken)
        for start in range(0, len(rooms), MAX_ROOMS_PER_CALL):
            part = {room: taken[room] for room in rooms[start : start + MAX_ROOMS_PER_CALL]}
            if not (self._batches and await self._tell_at_once(part)):
                await self._tell_one_by_one(part)

    async def _tell_at_once(self, taken: dict[Room, int]) -> bool:
        """False where the registry takes no batch (SGLang's), or not this one: one of its rooms, perhaps."""
        try:
            await self._client.register_dp_ranks(taken)
        except RegistryRefused as refused:
            self._batches = not isinstance(refused, NotOurRegistry)
            return False
        return True

    async def _tell_one_by_one(self, taken: dict[Room, int]) -> None:
        """As SGLang's registry wants it."""
        turns = asyncio.Semaphore(MAX_CONCURRENT_POSTS)

        async def post(room: Room, dp_rank: int) -> None:
            async with turns:
                await self._client.register_dp_rank(room, dp_rank)

        outcomes = await asyncio.gather(*(post(*each) for each in taken.items()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


async def _registry(
    stack: contextlib.AsyncExitStack, config: WorkerConfig, token: str
) -> tuple[RegistryServer | None, RegistryClient]:
    """(the embedded one, where there is none apart; a client of whichever it is)."""
    if config.registry:
        return None, await stack.enter_async_context(RegistryClient(config.registry, token=token))
    token = token or secrets.token_hex(16)  # nobody else registers at ours
    server = await stack.enter_async_context(_embedded(config, token))
    url = url_of(config.host, server.port)
    return server, await stack.enter_async_context(RegistryClient(url, token=token))


async def _leave(client: RegistryClient, instance: str) -> None:
    with contextlib.suppress(RegistryError):
        await client.deregister(instance)


@contextlib.asynccontextmanager
async def _embedded(config: WorkerConfig, token: str) -> AsyncIterator[RegistryServer]:
    server = RegistryServer(RegistryConfig(host=config.host, port=config.bootstrap_port, write_token=token))
    try:
        await server.start()
    except BadSetting as error:
        raise BadSetting(f"{str(error).partition(';')[0]}; choose another --bootstrap-port, or 0 for any") from None
    try:
        yield server
    finally:
        await server.stop()
