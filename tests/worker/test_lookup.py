"""What decode makes of a prefill's registry."""

from __future__ import annotations

from typing import Any

import pytest

from pdplane.core.errors import Refused
from pdplane.core.events import ControlEndpoint
from pdplane.core.ids import Rank
from pdplane.registry.client import RegistryClient
from pdplane.registry.server import RegistryConfig, RegistryServer
from pdplane.worker.lookup import find_ranks
from tests.registry.conftest import registration


async def look_up(ranks: int = 1, **more: Any) -> tuple[tuple[Rank, ControlEndpoint], ...]:
    server = RegistryServer(RegistryConfig(port=0))
    await server.start()
    try:
        async with RegistryClient(f"http://127.0.0.1:{server.port}") as client:
            for rank in range(ranks):
                await client.register(registration(attn_tp_size=ranks, attn_tp_rank=rank, **more))
        return await find_ranks(f"127.0.0.1:{server.port}")
    finally:
        await server.stop()


async def test_a_prefill_of_one_rank_is_found() -> None:
    assert await look_up() == ((Rank(), ControlEndpoint("10.0.0.1", 4000)),)


async def test_a_prefill_of_another_policy_is_refused_with_both_values() -> None:
    with pytest.raises(Refused, match=r"'prefill_complete', decode has 'early'"):
        await look_up(decode_allocation_policy="prefill_complete")


async def test_a_prefill_of_several_ranks_is_refused_with_their_number() -> None:
    with pytest.raises(Refused, match="has 2 ranks; this decode takes pages from one"):
        await look_up(ranks=2)
