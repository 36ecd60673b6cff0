"""Prefill's entry in its registry: an embedded one by default, or one that runs apart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from pdplane.registry.client import RegistryClient, RegistryError
from pdplane.registry.server import RegistryConfig, RegistryServer
from pdplane.settings import BadSetting
from pdplane.wire.address import dialable, url_of
from pdplane.wire.registry import PrefillRegistration, one_rank

from .background import task
from .config import WorkerConfig
from .prefill import PrefillShell

log = logging.getLogger(__name__)

REGISTER_EVERY_S = 5.0


@contextlib.asynccontextmanager
async def registered(config: WorkerConfig, shell: PrefillShell, control_port: int) -> AsyncIterator[int]:
    """Registers now and again (a registry may restart), and leaves in the end. Yields the embedded registry's port,
    or 0. Raises BadSetting where its port is taken."""
    async with contextlib.AsyncExitStack() as stack:
        url, port = config.registry, 0
        if not url:
            server = await stack.enter_async_context(_embedded(config))
            port = shell.default_bootstrap_port = server.port
            url = url_of(config.host, port)
        client = await stack.enter_async_context(RegistryClient(url))
        registration = registration_of(config, shell, control_port)
        if port:
            await client.register(registration)
        else:
            shell.waits_for = f"its registration at {url}"
        stack.enter_context(task(_keep_registered(client, registration, shell)))
        yield port
        with contextlib.suppress(RegistryError):
            await client.deregister(shell.instance)


def registration_of(config: WorkerConfig, shell: PrefillShell, control_port: int) -> PrefillRegistration:
    return one_rank(
        dialable(config.peer_host),
        control_port,
        page_size=shell.model.page_size,
        kv_cache_dtype=shell.model.kv_dtype,
        prefill_http_port=config.port or None,
        pd_instance=shell.instance,
    )


@contextlib.asynccontextmanager
async def _embedded(config: WorkerConfig) -> AsyncIterator[RegistryServer]:
    server = RegistryServer(RegistryConfig(host=config.host, port=config.bootstrap_port))
    try:
        await server.start()
    except BadSetting as error:
        raise BadSetting(f"{error} (here: --bootstrap-port)") from None
    try:
        yield server
    finally:
        await server.stop()


async def _keep_registered(client: RegistryClient, registration: PrefillRegistration, shell: PrefillShell) -> None:
    """Not ready before the first time; after it, decodes that have met this prefill need no registry."""
    reachable = True
    while True:
        try:
            await client.register(registration)
            shell.waits_for, reachable = "", True
        except RegistryError as error:
            if reachable:
                log.warning("not registered: %s", error)
            reachable = False
        await asyncio.sleep(REGISTER_EVERY_S)
