"""A fabric inside one thread: the simulator's wire, and the reference for the conformance suite.

With `auto` a batch lands inside `move`. Without, batches wait in `pending`, and the owner says when and in which order
each is delivered or lost; a crashed mover's batches may be kept, to land later as ghost writes. Source pages are
read at delivery, so that a prefill that reuses a page too early is seen in decode's pool. A mover's checksum is of
the pages as they were posted.

`fence=False` stands for RDMA: bytes land whatever the landing has revoked, and only the peer can say when no more come.
`teardown_proves=False`: nor does cutting the peer off, which leaves what was posted on its way.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId, Seat
from pdplane.core.slices import Slice

from . import checksum as checksums
from . import slicing
from .checksum import Verifier
from .contract import Capabilities, LandedCallback, Pair, QuietCallback, WroteCallback
from .landing_table import Claim, LandingTable, Verdict
from .pool import PagePool


class Batch(msgspec.Struct, eq=False):
    """One posted move. `begun`: it can no longer be cancelled. `join`: the connection that it goes over. A ghost has
    lost its mover and carries its bytes: the slices of its pages, one after the other."""

    number: MoveNo
    grant: GrantNo
    src: Seat
    dst: Seat
    pairs: tuple[Pair, ...]
    token: str
    slice: Slice
    begun: bool
    join: int
    checksum: int | None = None
    ghost: bytes | None = None


class MemoryFabric:
    """Joins the movers and landings of any number of seats."""

    def __init__(self, auto: bool = True, *, fence: bool = True, teardown_proves: bool = True) -> None:
        self.auto = auto
        self.capabilities = Capabilities(
            push=True, pull=False, fence=fence, one_sided=not fence, teardown_proves=teardown_proves
        )
        self.pending: list[Batch] = []
        self._landings: dict[Seat, MemoryLanding] = {}
        self._movers: dict[Seat, MemoryMover] = {}
        self._joins: dict[tuple[Seat, Seat], int] = {}  # the connection of each pair that stands
        self._made = 0

    def landing(
        self,
        seat: Seat,
        pool: PagePool,
        on_landed: LandedCallback,
        on_quiet: QuietCallback,
        token: str = "",
        verifier: Verifier | None = None,
    ) -> MemoryLanding:
        """`token`: for a reproducible run; by default a random one."""
        assert seat not in self._landings, f"{seat} has a landing"
        landing = MemoryLanding(
            self, seat, pool, on_landed, on_quiet, token or secrets.token_hex(16), verifier or Verifier(pool)
        )
        self._landings[seat] = landing
        return landing

    def mover(self, seat: Seat, pool: PagePool, on_wrote: WroteCallback, *, checksum: bool = False) -> MemoryMover:
        assert seat not in self._movers, f"{seat} has a mover"
        self._movers[seat] = mover = MemoryMover(self, seat, pool, on_wrote, checksum)
        return mover

    def begin(self, index: int) -> None:
        """The batch is on its way: a cancel leaves it alone."""
        self.pending[index].begun = True

    def join(self, src: Seat, dst: Seat) -> int:
        """A new connection of this pair; 0 is none."""
        self._made += 1
        self._joins[src, dst] = self._made
        return self._made

    def part(self, src: Instance, dst: Seat) -> None:
        """`dst` cuts off every rank of `src`: nothing posted over what stands now can land."""
        for pair in [pair for pair in self._joins if pair[0].instance == src and pair[1] == dst]:
            del self._joins[pair]

    def joined(self, batch: Batch) -> bool:
        """The connection that the batch goes over still stands."""
        return self._joins.get((batch.src, batch.dst)) == batch.join

    def deliver(self, index: int) -> None:
        """`pending[index]` arrives: lands or is discarded, and its mover, if it still lives, learns which."""
        batch = self.pending.pop(index)
        landing = self._landings.get(batch.dst)
        if landing is None:
            self._tell(batch, f"peer {batch.dst} is gone")
        elif not self.joined(batch):
            self._tell(batch, f"peer {batch.dst} has closed the connection")
        elif batch.token != landing.endpoint.token:
            self._tell(batch, f"peer {batch.dst} refused the token")
        elif batch.slice.dst_page != landing._pool.page_bytes:
            self._tell(batch, f"peer {batch.dst} has no pages of {batch.slice.dst_page} bytes")
        else:
            self._tell(batch, landing._receive(batch, self.bytes_of(batch)))

    def drop(self, index: int, error: str = "connection lost") -> None:
        """`pending[index]` is lost, and its mover, if it still lives, is told `error`."""
        self._tell(self.pending.pop(index), error)

    def crash(self, instance: Instance, *, keep: bool) -> None:
        """The instance is no more, none of its ranks, and hears of nothing. `keep`: what it had posted may still
        land."""
        for batch in [batch for batch in self.pending if batch.src.instance == instance]:
            if not keep:
                self.pending.remove(batch)
            elif batch.ghost is None:
                self._make_ghost(batch)
        for seat in [seat for seat in self._movers if seat.instance == instance]:
            del self._movers[seat]
        for seat in [seat for seat in self._landings if seat.instance == instance]:
            del self._landings[seat]

    def _post(self, batch: Batch) -> None:
        self.pending.append(batch)
        if self.auto:
            self.deliver(len(self.pending) - 1)

    def _abandon(self, batch: Batch, error: str) -> None:
        """Its mover gives it up: what has not begun never lands, what has may."""
        mover = self._movers[batch.src]
        if batch.begun:
            self._make_ghost(batch)
        else:
            self.pending.remove(batch)
        mover._on_wrote(batch.number, error)

    def _make_ghost(self, batch: Batch) -> None:
        batch.ghost = self.bytes_of(batch)

    def bytes_of(self, batch: Batch) -> bytes:
        if batch.ghost is not None:
            return batch.ghost
        data = bytearray(len(batch.pairs) * batch.slice.size_bytes)
        pool = self._movers[batch.src]._pool
        slicing.gather(pool.memory, batch.slice, [pair.src for pair in batch.pairs], memoryview(data))
        return bytes(data)

    def _tell(self, batch: Batch, error: str) -> None:
        if batch.ghost is None:
            self._movers[batch.src]._on_wrote(batch.number, error)


class MemoryMover:
    """contract.Mover. Completions may come inside `move`."""

    def __init__(
        self, fabric: MemoryFabric, seat: Seat, pool: PagePool, on_wrote: WroteCallback, checksum: bool
    ) -> None:
        """NoChecksum where that is wanted and the extra is not installed."""
        if checksum:
            checksums.require()
        self.capabilities = fabric.capabilities
        self._fabric = fabric
        self._seat = seat
        self._pool = pool
        self._on_wrote = on_wrote
        self._checksum = checksum
        self._peers: dict[Seat, tuple[str, Slice, int]] = {}

    def connect(self, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        """ValueError for a slice of other pages than this pool's."""
        slicing.check_source(slice_, peer, self._pool.page_bytes)
        self._peers[peer] = endpoint.token, slice_, self._fabric.join(self._seat, peer)

    def move(self, number: MoveNo, grant: GrantNo, peer: Seat, pairs: Sequence[Pair]) -> None:
        """IndexError for a source page outside the pool, before anything is posted."""
        for pair in pairs:
            self._pool.page(pair.src)
        if peer not in self._peers:
            self._on_wrote(number, f"peer {peer} is not connected")
            return
        token, slice_, join = self._peers[peer]
        batch = Batch(number, grant, self._seat, peer, tuple(pairs), token, slice_, self.capabilities.one_sided, join)
        if self._checksum:
            batch.checksum = checksums.of_source(self._pool.memory, slice_, [pair.src for pair in pairs])
        self._fabric._post(batch)

    def cancel(self, grant: GrantNo, peer: Seat) -> None:
        for batch in self._outstanding():
            if batch.dst == peer and batch.grant == grant and not batch.begun:
                self._fabric._abandon(batch, "cancelled")

    def teardown(self, peer: Instance) -> None:
        for seat in [seat for seat in self._peers if seat.instance == peer]:
            del self._peers[seat]
        for batch in self._outstanding():
            if batch.dst.instance == peer:
                self._fabric._abandon(batch, "torn down")

    def close(self) -> None:
        for peer in {seat.instance: None for seat in self._peers}:
            self.teardown(peer)

    def _outstanding(self) -> list[Batch]:
        return [batch for batch in self._fabric.pending if batch.src == self._seat and batch.ghost is None]


class MemoryLanding:
    """contract.Landing, and `table`, whose counters say what was discarded."""

    def __init__(
        self,
        fabric: MemoryFabric,
        seat: Seat,
        pool: PagePool,
        on_landed: LandedCallback,
        on_quiet: QuietCallback,
        token: str,
        verifier: Verifier,
    ) -> None:
        self.capabilities = fabric.capabilities
        self.endpoint = DataEndpoint("memory", host=f"memory/{seat}", token=token)
        self.table = LandingTable(pool.pages, pool.page_bytes, on_landed, on_quiet)
        self.verifier = verifier
        self._fabric = fabric
        self._seat = seat
        self._pool = pool

    def arm(self, grant: GrantNo, peer: Seat, pages: Sequence[PageId], slice_: Slice) -> None:
        self.table.arm(grant, peer, pages, slice_)

    def revoke(self, grant: GrantNo) -> bool:
        return self.table.revoke(grant) and (self.capabilities.fence or not self.table.knows(grant))

    def disarm(self, grant: GrantNo) -> None:
        self.table.disarm(grant)

    def teardown(self, peer: Instance) -> bool:
        """Where it proves: also what `peer` has posted and lost control of is no more."""
        self.table.cut(peer)
        if self.capabilities.teardown_proves:
            if self.capabilities.one_sided:  # nobody asks the table: only a connection made anew is heard again
                self._fabric.part(peer, self._seat)
            self._purge(peer)
        return self.capabilities.teardown_proves

    def _purge(self, peer: Instance) -> None:
        pending = self._fabric.pending
        for batch in [batch for batch in pending if batch.src.instance == peer and batch.dst == self._seat]:
            pending.remove(batch)
            self._fabric._tell(batch, f"peer {self._seat} closed the connection")

    def close(self) -> None:
        self._fabric._landings.pop(self._seat, None)

    def _receive(self, batch: Batch, data: bytes) -> str:
        """What the mover is told. Without a fence the bytes land first, and nobody asks the table."""
        pages = [pair.dst for pair in batch.pairs]
        if self.capabilities.one_sided:
            return self._struck(batch, pages, data)
        claim = self.table.claim(batch.grant, batch.src, pages, len(data))
        if not isinstance(claim, Claim):
            return f"discarded: {claim}"
        entered = self.table.enter(claim)
        assert entered, "single-threaded: nothing comes between claim and enter"
        slicing.scatter(memoryview(data), claim.slice, pages, self._pool.memory)
        verdict = self.table.finish(claim, self.verifier.verdict(claim, batch.checksum))
        return _error(verdict)

    def _struck(self, batch: Batch, pages: Sequence[PageId], data: bytes) -> str:
        self._strike(batch.slice, pages, data)
        claim = self.table.claim(batch.grant, batch.src, pages)
        if not isinstance(claim, Claim):
            return ""
        if not self.table.enter(claim):
            return ""
        return _error(self.table.finish(claim, self.verifier.verdict(claim, batch.checksum)))

    def _strike(self, slice_: Slice, pages: Sequence[PageId], data: bytes) -> None:
        """Into any page that there is, by the writer's idea of it."""
        size = slice_.size_bytes
        for at, page in enumerate(pages):
            if 0 <= page < self._pool.pages:
                one = memoryview(data)[at * size : (at + 1) * size]
                slicing.scatter(one, slice_, [page], self._pool.memory)


def _error(verdict: Verdict) -> str:
    return "" if verdict is Verdict.LANDED else f"discarded: {verdict}"
