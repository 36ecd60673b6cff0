"""A registry that runs apart: ready means registered, and a registry that comes back is told again."""

from __future__ import annotations

import pytest

from pdplane.registry.server import RegistryConfig, RegistryServer
from pdplane.worker import registration

from .fleets import HOST, free_port, member, until


async def test_a_prefill_is_not_ready_before_its_registry_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "REGISTER_EVERY_S", 0.01)
    port = free_port()
    async with member("prefill", registry=f"http://{HOST}:{port}") as it:
        healthy, facts = it.group.health()
        assert not healthy
        assert str(port) in facts["waits_for"]
        server = RegistryServer(RegistryConfig(host=HOST, port=port))
        await server.start()
        await until(lambda: it.group.health()[0])
        assert server.table.ready
        await server.stop()
        assert it.group.health()[0], "who has met it needs no registry"


async def test_a_registry_that_was_away_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "REGISTER_EVERY_S", 0.01)
    port = free_port()
    async with member("prefill", registry=f"http://{HOST}:{port}"):
        for _ in range(2):
            server = RegistryServer(RegistryConfig(host=HOST, port=port))
            await server.start()
            await until(lambda server=server: server.table.ready)
            await server.stop()
