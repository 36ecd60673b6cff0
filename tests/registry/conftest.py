"""A registration to vary, and a registry on a free port of loopback under a clock that the test moves."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdplane.registry.client import RegistryClient
from pdplane.registry.http import HttpConnection, Request, Response
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


class Spied(RegistryServer):
    """Notes what it was asked; with `sglang`, it has SGLang's routes alone."""

    def __init__(self, *, sglang: bool = False, write_token: str = "") -> None:
        super().__init__(RegistryConfig(port=0, write_token=write_token))
        self.asked: list[str] = []
        self.clients = 0
        self._sglang = sglang

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _connection(self) -> HttpConnection:
        self.clients += 1
        return HttpConnection(self._spied, self._connections, self._clock)

    def _spied(self, request: Request) -> Response:
        path = request.url.partition(b"?")[0]
        self.asked.append(f"{request.method.decode()} {path.decode()}")
        if self._sglang and path.startswith(b"/v1/"):
            return Response(404, b"404: Not Found")
        return self._routes(request)


@contextlib.asynccontextmanager
async def spied(*, sglang: bool = False, write_token: str = "") -> AsyncIterator[Spied]:
    server = Spied(sglang=sglang, write_token=write_token)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


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
