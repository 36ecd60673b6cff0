"""The worker's half of a connector that is not ours, on every rank of a dp group: work goes in, results are posted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from pdplane.core.connector import KVConnector, WorkerConnector
from pdplane.core.events import ConnectorOutput, Event
from pdplane.core.ids import Rank
from pdplane.core.node import Node

from .shell import Parts

POLL_S = 0.005
N = TypeVar("N", bound=Node)


class Plugged(NamedTuple, Generic[N]):
    """Another connector than ours: its scheduler's half, made for a node, and its worker's half for each rank."""

    scheduler: Callable[[N], KVConnector]
    workers: Sequence[WorkerConnector]


class Connectors:
    """All calls on the loop's thread. `connectors[tp]` is rank tp's, registered here with the pools of the group."""

    def __init__(
        self, connectors: Sequence[WorkerConnector], parts: Parts, node: Node, post: Callable[[Event], None]
    ) -> None:
        self._connectors = {Rank(dp=parts.dp, tp=tp): one for tp, one in enumerate(connectors)}
        self._node, self._post = node, post
        self._poll: asyncio.TimerHandle | None = None
        pools = [pool.memory if pool else None for pool in parts.pools]
        sizes = [pool.page_bytes if pool else 0 for pool in parts.pools]
        for one in self._connectors.values():
            one.register_kv_caches(pools, parts.pages, sizes)

    def start(self, work: object) -> None:
        """On every rank. Without connectors nobody understands it: a fault of ours."""
        assert self._connectors, f"there is no connector for {type(work).__name__}"
        for one in self._connectors.values():
            one.start_load_kv(work)
        self._wait()

    def close(self) -> None:
        if self._poll is not None:
            self._poll.cancel()

    def _wait(self) -> None:
        if self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(POLL_S, self._look)

    def _look(self) -> None:
        """What has finished goes to the core; again, while anything lives there."""
        self._poll = None
        for rank, one in self._connectors.items():
            output = one.get_transfer_results()
            if any(msgspec.structs.astuple(output)):
                self._post(ConnectorOutput(rank, output))
        if self._node.live:
            self._wait()
