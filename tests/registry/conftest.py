"""A registration to vary, and a registry on a free port of loopback under a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdplane.registry.client import RegistryClient
from pdplane.registry.server import RegistryConfig, RegistryServer
from pdplane.wire.registry import PrefillRegistration

ALONE: dict[str, Any] = {
    "attn_tp_size": 1,
    "attn_tp_rank": 0,
    "attn_cp_size": 1,
    "attn_cp_rank": 0,
    "attn_dp_size": 1,
    "attn_dp_rank": 0,
    "pp_size": 1,
    "pp_rank": 0,
    "system_dp_size": 1,
    "system_dp_rank": 0,
    "rank_ip": "10.0.0.1",
    "rank_port": 4000,
    "page_size": 16,
    "kv_cache_dtype": "float32",
}


def registration(**change: Any) -> PrefillRegistration:
    return PrefillRegistration(**{**ALONE, **change})


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def server(clock: Clock) -> AsyncIterator[RegistryServer]:
    server = RegistryServer(RegistryConfig(port=0), clock)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server: RegistryServer) -> AsyncIterator[RegistryClient]:
    async with RegistryClient(f"http://127.0.0.1:{server.port}") as client:
        yield client
