"""A fabric inside one thread: the simulator's wire, and the reference for the conformance suite.

With `auto` a batch lands inside `move`. Without, batches wait in `pending`, and the owner says when and in which order
each is delivered or lost; a crashed mover's batches may be kept, to land later as ghost writes. Source pages are
read at delivery, so that a prefill that reuses a page too early is seen in decode's pool.

`fence=False` stands for RDMA: bytes land whatever the landing has revoked, and only the peer can say when no more come.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId

from .contract import Capabilities, Endpoint, LandedCallback, Pair, QuietCallback, WroteCallback
from .landing_table import Claim, LandingTable
from .pool import PagePool


class Batch(msgspec.Struct, eq=False):
    """One posted move. `begun`: it can no longer be cancelled. A ghost has lost its mover and carries its bytes."""

    number: MoveNo
    grant: GrantNo
    src: Instance
    dst: Instance
    pairs: tuple[Pair, ...]
    token: str
    begun: bool
    ghost: tuple[bytes, ...] | None = None


class MemoryFabric:
    """Joins the movers and landings of any number of instances."""

    def __init__(self, auto: bool = True, *, fence: bool = True) -> None:
        self.auto = auto
        self.capabilities = Capabilities(push=True, pull=False, fence=fence, one_sided=not fence)
        self.pending: list[Batch] = []
        self._landings: dict[Instance, MemoryLanding] = {}
        self._movers: dict[Instance, MemoryMover] = {}

    def landing(
        self, instance: Instance, pool: PagePool, on_landed: LandedCallback, on_quiet: QuietCallback, token: str = ""
    ) -> MemoryLanding:
        """`token`: for a reproducible run; by default a random one."""
        assert instance not in self._landings, f"{instance} has a landing"
        landing = MemoryLanding(self, instance, pool, on_landed, on_quiet, token or secrets.token_hex(16))
        self._landings[instance] = landing
        return landing

    def mover(self, instance: Instance, pool: PagePool, on_wrote: WroteCallback) -> MemoryMover:
        assert instance not in self._movers, f"{instance} has a mover"
        self._movers[instance] = mover = MemoryMover(self, instance, pool, on_wrote)
        return mover

    def begin(self, index: int) -> None:
        """The batch is on its way: a cancel leaves it alone."""
        self.pending[index].begun = True

    def deliver(self, index: int) -> None:
        """`pending[index]` arrives: lands or is discarded, and its mover, if it still lives, learns which."""
        batch = self.pending.pop(index)
        landing = self._landings.get(batch.dst)
        if landing is None:
            self._tell(batch, f"peer {batch.dst} is gone")
        elif batch.token != landing.token:
            self._tell(batch, f"peer {batch.dst} refused the token")
        else:
            self._tell(batch, landing._receive(batch, self._bytes_of(batch)))

    def drop(self, index: int, error: str = "connection lost") -> None:
        """`pending[index]` is lost, and its mover, if it still lives, is told `error`."""
        self._tell(self.pending.pop(index), error)

    def crash(self, instance: Instance, *, keep: bool) -> None:
        """The instance is no more and hears of nothing. `keep`: what it had posted may still land."""
        for batch in [batch for batch in self.pending if batch.src == instance]:
            if keep:
                self._make_ghost(batch)
            else:
                self.pending.remove(batch)
        self._movers.pop(instance, None)
        self._landings.pop(instance, None)

    def _post(self, batch: Batch) -> None:
        self.pending.append(batch)
        if self.auto:
            self.deliver(len(self.pending) - 1)

    def _abandon(self, batch: Batch, error: str) -> None:
        """Its mover gives it up: what has not begun never lands, what has may."""
        if batch.begun:
            self._make_ghost(batch)
        else:
            self.pending.remove(batch)
        self._movers[batch.src]._on_wrote(batch.number, error)

    def _make_ghost(self, batch: Batch) -> None:
        batch.ghost = tuple(bytes(view) for view in self._bytes_of(batch))

    def _bytes_of(self, batch: Batch) -> Sequence[bytes | memoryview]:
        if batch.ghost is not None:
            return batch.ghost
        pool = self._movers[batch.src]._pool
        return [pool.page(pair.src) for pair in batch.pairs]

    def _tell(self, batch: Batch, error: str) -> None:
        if batch.ghost is None:
            self._movers[batch.src]._on_wrote(batch.number, error)


class MemoryMover:
    """contract.Mover. Completions may come inside `move`."""

    def __init__(self, fabric: MemoryFabric, instance: Instance, pool: PagePool, on_wrote: WroteCallback) -> None:
        self.capabilities = fabric.capabilities
        self._fabric = fabric
        self._instance = instance
        self._pool = pool
        self._on_wrote = on_wrote
        self._tokens: dict[Instance, str] = {}

    def connect(self, peer: Instance, endpoint: Endpoint, token: str) -> None:
        self._tokens[peer] = token

    def move(self, number: MoveNo, grant: GrantNo, peer: Instance, pairs: Sequence[Pair]) -> None:
        for pair in pairs:
            self._pool.page(pair.src)
        token = self._tokens.get(peer)
        if token is None:
            self._on_wrote(number, f"peer {peer} is not connected")
            return
        begun = self.capabilities.one_sided
        self._fabric._post(Batch(number, grant, self._instance, peer, tuple(pairs), token, begun))

    def cancel(self, grant: GrantNo, peer: Instance) -> None:
        for batch in self._outstanding(peer):
            if batch.grant == grant and not batch.begun:
                self._fabric._abandon(batch, "cancelled")

    def teardown(self, peer: Instance) -> None:
        self._tokens.pop(peer, None)
        for batch in self._outstanding(peer):
            self._fabric._abandon(batch, "torn down")

    def close(self) -> None:
        for peer in list(self._tokens):
            self.teardown(peer)

    def _outstanding(self, peer: Instance) -> list[Batch]:
        mine = (batch for batch in self._fabric.pending if batch.src == self._instance and batch.ghost is None)
        return [batch for batch in mine if batch.dst == peer]


class MemoryLanding:
    """contract.Landing, and `table`, whose counters say what was discarded."""

    def __init__(
        self,
        fabric: MemoryFabric,
        instance: Instance,
        pool: PagePool,
        on_landed: LandedCallback,
        on_quiet: QuietCallback,
        token: str,
    ) -> None:
        self.capabilities = fabric.capabilities
        self.endpoint = Endpoint(f"memory/{instance}", 0)
        self.token = token
        self.table = LandingTable(pool.pages, on_landed, on_quiet)
        self._fabric = fabric
        self._instance = instance
        self._pool = pool

    def arm(self, grant: GrantNo, peer: Instance, pages: Sequence[PageId]) -> None:
        self.table.arm(grant, peer, pages)

    def revoke(self, grant: GrantNo) -> bool:
        return self.table.revoke(grant) and (self.capabilities.fence or not self.table.knows(grant))

    def disarm(self, grant: GrantNo) -> None:
        self.table.disarm(grant)

    def teardown(self, peer: Instance) -> None:
        """Peer-level: also what `peer` has posted and lost control of."""
        self.table.cut(peer)
        pending = self._fabric.pending
        for batch in [batch for batch in pending if batch.src == peer and batch.dst == self._instance]:
            pending.remove(batch)
            self._fabric._tell(batch, f"peer {self._instance} closed the connection")

    def close(self) -> None:
        self._fabric._landings.pop(self._instance, None)

    def _receive(self, batch: Batch, source: Sequence[bytes | memoryview]) -> str:
        """What the mover is told. Without a fence the bytes land first, and nobody asks the table."""
        pages = [pair.dst for pair in batch.pairs]
        if self.capabilities.one_sided:
            self._place(pages, source)
        claim = self.table.claim(batch.grant, batch.src, pages)
        if not isinstance(claim, Claim):
            return "" if self.capabilities.one_sided else f"discarded: {claim}"
        entered = self.table.enter(claim)
        assert entered, "single-threaded: nothing comes between claim and enter"
        self._place(pages, source)
        self.table.finish(claim)
        return ""

    def _place(self, pages: Sequence[PageId], source: Sequence[bytes | memoryview]) -> None:
        for page, content in zip(pages, source, strict=True):
            if 0 <= page < self._pool.pages:
                self._pool.page(page)[:] = content
