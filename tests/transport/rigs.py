"""One prefill, one decode and a transport between them, with what they were told, waited for by condition."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId
from pdplane.transport.contract import Landing, Mover, Pair
from pdplane.transport.landing_table import LandingTable
from pdplane.transport.memory import MemoryFabric
from pdplane.transport.pool import PagePool
from pdplane.transport.tcp_landing import TcpLanding
from pdplane.transport.tcp_mover import TcpMover

P, D, STRANGER = Instance("p-1"), Instance("d-1"), Instance("p-2")
PAGE_BYTES = 4096
PATIENCE_S = 30.0  # only a failing test ever waits as long


class Told:
    """Every callback of both ends, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.wrote: list[tuple[MoveNo, str]] = []
        self.landed: list[tuple[GrantNo, PageId]] = []
        self.quiet: list[GrantNo] = []

    def on_wrote(self, number: MoveNo, error: str) -> None:
        with self._changed:
            self.wrote.append((number, error))
            self._changed.notify_all()

    def on_landed(self, grant: GrantNo, pages: Sequence[PageId]) -> None:
        with self._changed:
            self.landed += [(grant, page) for page in pages]
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


class Rig:
    """`kind`: "memory" or "tcp". Source page i is filled with bytes that name it; the target pool with 0xEE."""

    mover: Mover
    landing: Landing
    table: LandingTable

    def __init__(self, kind: str, pages: int = 256, page_bytes: int = PAGE_BYTES) -> None:
        self.told = Told()
        self.source = PagePool(pages, page_bytes)
        self.target = PagePool(pages, page_bytes)
        for page in range(pages):
            self.source.page(PageId(page))[:] = content(page, page_bytes)
        self.target.memory[:] = b"\xee" * len(self.target.memory)
        self.kind = kind
        self.page_bytes = page_bytes
        self.others: list[tuple[Mover, PagePool]] = []
        if kind == "memory":
            self.fabric = MemoryFabric()
            memory = self.fabric.landing(D, self.target, self.told.on_landed, self.told.on_quiet)
            self.landing, self.table = memory, memory.table
        else:
            tcp = TcpLanding(D, self.target, self.told.on_landed, self.told.on_quiet)
            self.landing, self.table, self.tcp = tcp, tcp.table, tcp
        self.mover = self.new_mover(P)
        self.mover.connect(D, self.landing.endpoint, self.landing.token)

    def new_mover(self, instance: Instance) -> Mover:
        if self.kind == "memory":
            return self.fabric.mover(instance, self.source, self.told.on_wrote)
        return TcpMover(instance, self.source, self.told.on_wrote)

    def stranger(self) -> Mover:
        """Another prefill with the right token."""
        mover = self.new_mover(STRANGER)
        mover.connect(D, self.landing.endpoint, self.landing.token)
        self.others.append((mover, self.source))
        return mover

    def arm(self, grant: int, pages: Sequence[int]) -> None:
        self.landing.arm(GrantNo(grant), P, [PageId(page) for page in pages])

    def move(self, number: int, grant: int, pairs: Sequence[tuple[int, int]], mover: Mover | None = None) -> None:
        cut = [Pair(PageId(src), PageId(dst)) for src, dst in pairs]
        (mover or self.mover).move(MoveNo(number), GrantNo(grant), D, cut)

    def has(self, dst: int, src: int) -> bool:
        return bytes(self.target.page(PageId(dst))) == content(src, self.page_bytes)

    def untouched(self, dst: int) -> bool:
        return bytes(self.target.page(PageId(dst))) == b"\xee" * self.page_bytes

    def close(self) -> None:
        for mover, _ in self.others:
            mover.close()
        self.mover.close()
        self.landing.close()
        self.source.close()
        self.target.close()


def content(page: int, page_bytes: int) -> bytes:
    unit = page.to_bytes(4, "little") + b"page"
    return (unit * (page_bytes // len(unit) + 1))[:page_bytes]
