"""The memory fabric where its owner decides what arrives, when, and whether."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdplane.core.ids import GrantNo, MoveNo, PageId
from pdplane.transport.contract import Pair
from pdplane.transport.memory import MemoryFabric
from pdplane.transport.pool import PagePool

from .rigs import D, P, Told, content


class World:
    def __init__(self, *, fence: bool = True) -> None:
        self.told = Told()
        self.source, self.target = PagePool(8, 64), PagePool(8, 64)
        for page in range(8):
            self.source.page(PageId(page))[:] = content(page, 64)
        self.fabric = MemoryFabric(auto=False, fence=fence)
        self.landing = self.fabric.landing(D, self.target, self.told.on_landed, self.told.on_quiet, token="t")
        self.mover = self.fabric.mover(P, self.source, self.told.on_wrote)
        self.mover.connect(D, self.landing.endpoint, "t")
        self.landing.arm(GrantNo(1), P, [PageId(page) for page in range(4)])

    def move(self, number: int, pairs: Sequence[tuple[int, int]], grant: int = 1) -> None:
        self.mover.move(MoveNo(number), GrantNo(grant), D, [Pair(PageId(src), PageId(dst)) for src, dst in pairs])

    def holds(self, dst: int) -> bytes:
        return bytes(self.target.page(PageId(dst)))


ZERO = bytes(64)


def test_batches_wait_and_arrive_in_the_order_that_the_owner_chooses() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.move(2, [(6, 1)])
    assert world.told.wrote == []
    world.fabric.deliver(1)
    assert world.told.wrote == [(2, "")]
    assert world.holds(0) == ZERO
    world.fabric.deliver(0)
    assert world.holds(0) == content(5, 64)
    assert world.told.wrote == [(2, ""), (1, "")]
    assert world.fabric.pending == []


def test_a_dropped_batch_completes_with_an_error() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.fabric.drop(0)
    assert world.told.wrote == [(1, "connection lost")]
    assert world.holds(0) == ZERO


def test_bytes_are_read_at_delivery() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.source.page(PageId(5))[:] = content(99, 64)
    world.fabric.deliver(0)
    assert world.holds(0) == content(99, 64)


def test_cancel_drops_what_has_not_begun() -> None:
    world = World()
    world.landing.arm(GrantNo(2), P, [PageId(7)])
    world.move(1, [(5, 0)])
    world.move(2, [(6, 1)])
    world.move(3, [(6, 7)], grant=2)
    world.fabric.begin(0)
    world.mover.cancel(GrantNo(1), D)
    assert world.told.wrote == [(2, "cancelled")]
    assert [batch.number for batch in world.fabric.pending] == [1, 3]


def test_a_crashed_movers_batch_lands_as_a_ghost_and_tells_nobody() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.fabric.crash(P, keep=True)
    world.source.page(PageId(5))[:] = ZERO
    world.fabric.deliver(0)
    assert world.holds(0) == content(5, 64)
    assert world.told.pages_of(1) == [0]
    assert world.told.wrote == []


def test_a_crash_can_take_its_batches_along() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.fabric.crash(P, keep=False)
    assert world.fabric.pending == []


def test_a_ghost_meets_the_fence() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.fabric.crash(P, keep=True)
    assert world.landing.revoke(GrantNo(1))
    world.fabric.deliver(0)
    assert world.holds(0) == ZERO


def test_a_batch_to_a_crashed_decode_fails() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.fabric.crash(D, keep=False)
    world.fabric.deliver(0)
    assert world.told.wrote == [(1, "peer d-1 is gone")]


def test_a_torn_down_move_that_had_begun_may_still_land_but_completes_once() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.move(2, [(6, 1)])
    world.fabric.begin(0)
    world.mover.teardown(D)
    assert world.told.wrote == [(1, "torn down"), (2, "torn down")]
    world.fabric.deliver(0)
    assert world.holds(0) == content(5, 64)
    assert len(world.told.wrote) == 2


@pytest.mark.parametrize("fence", [True, False])
def test_the_landings_teardown_takes_even_ghosts(fence: bool) -> None:
    world = World(fence=fence)
    world.move(1, [(5, 0)])
    world.fabric.crash(P, keep=True)
    world.landing.teardown(P)
    assert world.fabric.pending == []


# --- without a fence: the stand-in for RDMA ----------------------------------------------------------------------


def test_without_a_fence_a_write_lands_after_the_revoke() -> None:
    world = World(fence=False)
    world.move(1, [(5, 0)])
    assert not world.landing.revoke(GrantNo(1))
    world.fabric.deliver(0)
    assert world.holds(0) == content(5, 64)
    assert world.told.wrote == [(1, "")]
    assert world.told.landed == []
    assert world.told.quiet == []


def test_without_a_fence_a_posted_write_cannot_be_cancelled() -> None:
    world = World(fence=False)
    world.move(1, [(5, 0)])
    world.mover.cancel(GrantNo(1), D)
    assert world.told.wrote == []
    world.fabric.deliver(0)
    assert world.holds(0) == content(5, 64)


def test_without_a_fence_landed_pages_are_reported_once() -> None:
    world = World(fence=False)
    world.move(1, [(5, 0)])
    world.move(2, [(6, 0)])
    world.fabric.deliver(0)
    world.fabric.deliver(0)
    assert world.told.pages_of(1) == [0]
    assert world.holds(0) == content(6, 64)


def test_capabilities_tell_the_two_apart() -> None:
    assert MemoryFabric().capabilities.fence
    rdma = MemoryFabric(fence=False).capabilities
    assert rdma.one_sided
    assert not rdma.fence
