"""Prefills, decodes and a transport between them, with what they were told, waited for by condition.

FABRICS lists the transports under test. A new one is a class with `landing`, `mover` and what it can do, and a line in
that list.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId, Rank, Seat
from pdplane.core.layout import LayoutGroup
from pdplane.core.slices import Slice, shard_bytes, slice_between, whole_page
from pdplane.transport.checksum import Verifier
from pdplane.transport.contract import LandedCallback, Landing, Mover, Pair, QuietCallback, WroteCallback
from pdplane.transport.faulty import ALL, FaultyLanding, FaultyMover, LandingFaults, MoverFaults
from pdplane.transport.landing import PageLanding
from pdplane.transport.memory import MemoryFabric
from pdplane.transport.mover import PageMover
from pdplane.transport.pool import PagePool
from pdplane.transport.shm_landing import LocalLanding, ShmLanding
from pdplane.transport.shm_mover import ShmMover
from pdplane.transport.shm_push_landing import ShmPushLanding
from pdplane.transport.shm_push_mover import ShmPushMover
from pdplane.transport.tcp_landing import TcpLanding
from pdplane.transport.tcp_mover import TcpMover


def seat(instance: str, tp: int = 0) -> Seat:
    return Seat(Instance(instance), Rank(tp=tp))


P, D, STRANGER = seat("p-1"), seat("d-1"), seat("p-2")
PAGE_BYTES = 4096
PATIENCE_S = 30.0  # only a failing test ever waits as long


class Told:
    """Every callback of both ends, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.wrote: list[tuple[MoveNo, str]] = []
        self.landed: list[tuple[GrantNo, PageId]] = []
        self.landed_from: list[tuple[GrantNo, Seat, PageId]] = []
        self.quiet: list[GrantNo] = []

    def on_wrote(self, number: MoveNo, error: str) -> None:
        with self._changed:
            self.wrote.append((number, error))
            self._changed.notify_all()

    def on_landed(self, grant: GrantNo, peer: Seat, pages: Sequence[PageId]) -> None:
        with self._changed:
            self.landed += [(grant, page) for page in pages]
            self.landed_from += [(grant, peer, page) for page in pages]
            self._changed.notify_all()

    def on_quiet(self, grant: GrantNo) -> None:
        with self._changed:
            self.quiet.append(grant)
            self._changed.notify_all()

    def wait(self, happened: Callable[[Told], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: happened(self), PATIENCE_S), f"waited in vain: {vars(self)}"

    def end_of(self, number: int) -> str:
        """The error of one move ("" for none), which came exactly once."""
        self.wait(lambda told: any(move == number for move, _ in told.wrote))
        (error,) = [error for move, error in self.wrote if move == number]
        return error

    def pages_of(self, grant: int) -> list[int]:
        return [page for landed, page in self.landed if landed == grant]


# --- transports --------------------------------------------------------------------------------------------------


class Fabric:
    """One kind of transport. `fenced`: a revoke is a proof, and nothing lands that was not granted. `checksums`: its
    movers can carry them."""

    name = ""
    fenced = True
    checksums = True

    def landing(
        self, where: Seat, pool: PagePool, on_landed: LandedCallback, on_quiet: QuietCallback, verifier: Verifier | None
    ) -> Landing:
        raise NotImplementedError

    def mover(self, where: Seat, pool: PagePool, on_wrote: WroteCallback, checksum: bool) -> Mover:
        raise NotImplementedError


class Memory(Fabric):
    name = "memory"

    def __init__(self) -> None:
        self.fabric = MemoryFabric(fence=self.fenced)

    def landing(
        self, where: Seat, pool: PagePool, on_landed: LandedCallback, on_quiet: QuietCallback, verifier: Verifier | None
    ) -> Landing:
        return self.fabric.landing(where, pool, on_landed, on_quiet, verifier=verifier)

    def mover(self, where: Seat, pool: PagePool, on_wrote: WroteCallback, checksum: bool) -> Mover:
        return self.fabric.mover(where, pool, on_wrote, checksum=checksum)


class MemoryWithoutFence(Memory):
    name = "memory, no fence"
    fenced = False


class OnThreads(Fabric):
    """A kind with threads and sockets of its own."""

    ends: tuple[type[PageMover], type[TcpLanding] | type[LocalLanding]]

    def landing(
        self, where: Seat, pool: PagePool, on_landed: LandedCallback, on_quiet: QuietCallback, verifier: Verifier | None
    ) -> PageLanding:
        return self.ends[1](where, pool, on_landed, on_quiet, verifier=verifier)

    def mover(self, where: Seat, pool: PagePool, on_wrote: WroteCallback, checksum: bool) -> Mover:
        return self.ends[0](where, pool, on_wrote, checksum=checksum)


class Tcp(OnThreads):
    name = "tcp"
    ends = TcpMover, TcpLanding


class Shm(OnThreads):
    name = "shm"
    ends = ShmMover, ShmLanding


class ShmPush(OnThreads):
    name = "shm_push"
    fenced = False
    ends = ShmPushMover, ShmPushLanding


class Faulty(Fabric):
    """`inner` with the faults that no user may notice: every move is sent twice."""

    def __init__(self, inner: Fabric) -> None:
        self.inner = inner
        self.checksums = inner.checksums

    def landing(
        self, where: Seat, pool: PagePool, on_landed: LandedCallback, on_quiet: QuietCallback, verifier: Verifier | None
    ) -> Landing:
        if verifier is not None:
            return self.inner.landing(where, pool, on_landed, on_quiet, verifier)
        return FaultyLanding(
            lambda landed, quiet, tampering: self.inner.landing(where, pool, landed, quiet, tampering),
            pool,
            on_landed,
            on_quiet,
            LandingFaults(),
        )

    def mover(self, where: Seat, pool: PagePool, on_wrote: WroteCallback, checksum: bool) -> Mover:
        return FaultyMover(
            lambda wrote: self.inner.mover(where, pool, wrote, checksum), on_wrote, MoverFaults(repeat=ALL)
        )


class FaultyMemory(Faulty):
    name = "faulty memory"

    def __init__(self) -> None:
        super().__init__(Memory())


class FaultyTcp(Faulty):
    name = "faulty tcp"

    def __init__(self) -> None:
        super().__init__(Tcp())


class FaultyShm(Faulty):
    name = "faulty shm"

    def __init__(self) -> None:
        super().__init__(Shm())


class FaultyShmPush(Faulty):
    name = "faulty shm_push"
    fenced = False

    def __init__(self) -> None:
        super().__init__(ShmPush())


FABRICS: list[type[Fabric]] = [
    *(Memory, MemoryWithoutFence, Tcp, Shm, ShmPush),
    *(FaultyMemory, FaultyTcp, FaultyShm, FaultyShmPush),
]
FENCED = [fabric for fabric in FABRICS if fabric.fenced]


# --- one pair that moves whole pages -----------------------------------------------------------------------------


class Rig:
    """Source page i is filled with bytes that name it; the target pool with 0xEE."""

    def __init__(
        self,
        fabric: Fabric,
        pages: int = 256,
        page_bytes: int = PAGE_BYTES,
        *,
        checksum: bool = False,
        faults: LandingFaults | None = None,
    ) -> None:
        self.fabric = fabric
        self.told = Told()
        self.source = PagePool(pages, page_bytes)
        self.target = PagePool(pages, page_bytes)
        for page in range(pages):
            self.source.page(PageId(page))[:] = content(page, page_bytes)
        self.target.memory[:] = b"\xee" * len(self.target.memory)
        self.page_bytes = page_bytes
        self.slice = whole_page(page_bytes)
        self.others: list[Mover] = []
        self.landing = self._landing(faults)
        self.mover = fabric.mover(P, self.source, self.told.on_wrote, checksum)
        self.connect()

    def _landing(self, faults: LandingFaults | None) -> Landing:
        told, pool = self.told, self.target
        if faults is None:
            return self.fabric.landing(D, pool, told.on_landed, told.on_quiet, None)
        return FaultyLanding(
            lambda landed, quiet, verifier: self.fabric.landing(D, pool, landed, quiet, verifier),
            pool,
            told.on_landed,
            told.on_quiet,
            faults,
        )

    def connect(self, mover: Mover | None = None) -> None:
        (mover or self.mover).connect(D, self.landing.endpoint, self.slice)

    def stranger(self) -> Mover:
        """Another prefill with the right token."""
        mover = self.fabric.mover(STRANGER, self.source, self.told.on_wrote, False)
        self.others.append(mover)
        self.connect(mover)
        return mover

    def arm(self, grant: int, pages: Sequence[int], peer: Seat = P) -> None:
        self.landing.arm(GrantNo(grant), peer, [PageId(page) for page in pages], self.slice)

    def move(self, number: int, grant: int, pairs: Sequence[tuple[int, int]], mover: Mover | None = None) -> None:
        (mover or self.mover).move(MoveNo(number), GrantNo(grant), D, paired(pairs))

    def has(self, dst: int, src: int) -> bool:
        return bytes(self.target.page(PageId(dst))) == content(src, self.page_bytes)

    def untouched(self, dst: int) -> bool:
        return bytes(self.target.page(PageId(dst))) == b"\xee" * self.page_bytes

    def close(self) -> None:
        for mover in (*self.others, self.mover):
            mover.close()
        self.landing.close()
        self.source.close()
        self.target.close()


def content(page: int, page_bytes: int) -> bytes:
    unit = page.to_bytes(4, "little") + b"page"
    return (unit * (page_bytes // len(unit) + 1))[:page_bytes]


def paired(pairs: Sequence[tuple[int, int]]) -> list[Pair]:
    return [Pair(PageId(src), PageId(dst)) for src, dst in pairs]


# --- tensor parallel ranks on both sides -------------------------------------------------------------------------

HEADS = LayoutGroup("kv", 2 * 3 * 8, (0, 1, 2), "bf16", parts=2, heads=3)
LATENT = LayoutGroup("latent", 656, (0, 1, 2), "fp8_ds_mla")
INDEX = LayoutGroup("index", 132, (1,), "u8")
TOKENS = 4  # of a page


class SplitRig:
    """`prefill` and `decode` tensor parallel ranks of one instance each, every one with a pool, a mover or a landing,
    and connected where heads are shared. Page i of prefill is its ranks' part of `full_page(groups, i)`."""

    def __init__(
        self,
        fabric: Fabric,
        prefill: int,
        decode: int,
        groups: Sequence[LayoutGroup] = (HEADS,),
        pages: int = 160,
        *,
        checksum: bool = False,
    ) -> None:
        self.groups, self.prefill, self.decode, self.pages = groups, prefill, decode, pages
        self.told: dict[Seat, Told] = {}
        self.sources: dict[Seat, PagePool] = {}
        self.targets: dict[Seat, PagePool] = {}
        self.movers: dict[Seat, Mover] = {}
        self.landings: dict[Seat, Landing] = {}
        self.links: dict[tuple[Seat, Seat], Slice] = {}
        for rank in range(prefill):
            self._add_prefill(fabric, seat("p-1", rank), checksum)
        for rank in range(decode):
            self._add_decode(fabric, seat("d-1", rank))
        for src in self.movers:
            for dst in self.landings:
                self._join(src, dst)

    def _add_prefill(self, fabric: Fabric, where: Seat, checksum: bool) -> None:
        size = shard_bytes(self.groups, TOKENS, where.rank.tp, self.prefill)
        if size:
            self.told[where] = Told()
            self.sources[where] = pool = PagePool(self.pages, size)
            for page in range(self.pages):
                pool.page(PageId(page))[:] = self.shard(page, where.rank.tp, self.prefill)
            self.movers[where] = fabric.mover(where, pool, self.told[where].on_wrote, checksum)

    def _add_decode(self, fabric: Fabric, where: Seat) -> None:
        size = shard_bytes(self.groups, TOKENS, where.rank.tp, self.decode)
        if size:
            self.told[where] = told = Told()
            self.targets[where] = pool = PagePool(self.pages, size)
            pool.memory[:] = b"\xee" * len(pool.memory)
            self.landings[where] = fabric.landing(where, pool, told.on_landed, told.on_quiet, None)

    def _join(self, src: Seat, dst: Seat) -> None:
        ranks = (src.rank.tp, self.prefill), (dst.rank.tp, self.decode)
        slice_ = slice_between(self.groups, TOKENS, *ranks)
        if slice_ is not None:
            self.links[src, dst] = slice_
            self.movers[src].connect(dst, self.landings[dst].endpoint, slice_)

    def shard(self, page: int, rank: int, ranks: int) -> bytes:
        return shard_of(self.groups, full_page(self.groups, page), rank, ranks)

    def arm(self, grant: int, pages: Sequence[int]) -> None:
        for (src, dst), slice_ in self.links.items():
            self.landings[dst].arm(GrantNo(grant), src, [PageId(page) for page in pages], slice_)

    def move(self, number: int, grant: int, pairs: Sequence[tuple[int, int]]) -> None:
        """On every link; move numbers go up from `number`, which is the first link's."""
        for at, (src, dst) in enumerate(self.links):
            self.movers[src].move(MoveNo(number + at), GrantNo(grant), dst, paired(pairs))

    def ends(self, number: int) -> list[str]:
        """The errors of such a move, link by link."""
        return [self.told[src].end_of(number + at) for at, (src, _dst) in enumerate(self.links)]

    def page(self, where: Seat, page: int) -> bytes:
        return bytes(self.targets[where].page(PageId(page)))

    def close(self) -> None:
        for end in (*self.movers.values(), *self.landings.values()):
            end.close()
        for pool in (*self.sources.values(), *self.targets.values()):
            pool.close()


def full_page(groups: Sequence[LayoutGroup], page: int) -> bytes:
    """What one rank alone would hold."""
    rows = sum(len(group.layers) * group.row_bytes for group in groups)
    return random.Random(page).randbytes(rows * TOKENS)


def shard_of(groups: Sequence[LayoutGroup], full: bytes, rank: int, ranks: int) -> bytes:
    """One rank's part of a full page, head by head."""
    out, at = bytearray(), 0
    for group in groups:
        part = group.row_bytes // group.parts
        for _row in range(len(group.layers) * group.parts * TOKENS):
            row, at = full[at : at + part], at + part
            if group.heads:
                head = part // group.heads
                first, last = rank * group.heads // ranks, (rank + 1) * group.heads // ranks
                row = b"".join(row[number * head : (number + 1) * head] for number in range(first, last))
            out += row
    return bytes(out)
