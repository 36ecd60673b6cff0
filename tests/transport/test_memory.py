"""The memory fabric where its owner decides what arrives, when, and whether."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdplane.core.ids import GrantNo, MoveNo, PageId
from pdplane.core.slices import Slice, Span, whole_page
from pdplane.transport.memory import MemoryFabric
from pdplane.transport.pool import PagePool

from .rigs import D, P, Told, content, paired, seat


class World:
    def __init__(self, *, fence: bool = True, teardown_proves: bool = True, checksum: bool = False) -> None:
        self.told = Told()
        self.source, self.target = PagePool(8, 64), PagePool(8, 64)
        for page in range(8):
            self.source.page(PageId(page))[:] = content(page, 64)
        self.fabric = MemoryFabric(auto=False, fence=fence, teardown_proves=teardown_proves)
        self.landing = self.fabric.landing(D, self.target, self.told.on_landed, self.told.on_quiet, token="t")
        self.mover = self.fabric.mover(P, self.source, self.told.on_wrote, checksum=checksum)
        self.mover.connect(D, self.landing.endpoint, WHOLE)
        self.landing.arm(GrantNo(1), P, [PageId(page) for page in range(4)], WHOLE)

    def move(self, number: int, pairs: Sequence[tuple[int, int]], grant: int = 1) -> None:
        self.mover.move(MoveNo(number), GrantNo(grant), D, paired(pairs))

    def holds(self, dst: int) -> bytes:
        return bytes(self.target.page(PageId(dst)))


ZERO = bytes(64)
WHOLE = whole_page(64)


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
    world.landing.arm(GrantNo(2), P, [PageId(7)], WHOLE)
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
    world.fabric.crash(P.instance, keep=True)
    world.source.page(PageId(5))[:] = ZERO
    world.fabric.deliver(0)
    assert world.holds(0) == content(5, 64)
    assert world.told.pages_of(1) == [0]
    assert world.told.wrote == []


def test_a_crash_can_take_its_batches_along() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.fabric.crash(P.instance, keep=False)
    assert world.fabric.pending == []


def test_a_ghost_meets_the_fence() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.fabric.crash(P.instance, keep=True)
    assert world.landing.revoke(GrantNo(1))
    world.fabric.deliver(0)
    assert world.holds(0) == ZERO


def test_a_batch_to_a_crashed_decode_fails() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.fabric.crash(D.instance, keep=False)
    world.fabric.deliver(0)
    assert world.told.wrote == [(1, f"peer {D} is gone")]


def test_a_torn_down_move_that_had_begun_may_still_land_but_completes_once() -> None:
    world = World()
    world.move(1, [(5, 0)])
    world.move(2, [(6, 1)])
    world.fabric.begin(0)
    world.mover.teardown(D.instance)
    assert world.told.wrote == [(1, "torn down"), (2, "torn down")]
    world.fabric.deliver(0)
    assert world.holds(0) == content(5, 64)
    assert len(world.told.wrote) == 2


@pytest.mark.parametrize("fence", [True, False])
def test_the_landings_teardown_takes_even_ghosts(fence: bool) -> None:
    world = World(fence=fence)
    world.move(1, [(5, 0)])
    world.fabric.crash(P.instance, keep=True)
    assert world.landing.teardown(P.instance)
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


def test_a_fabric_whose_teardown_proves_nothing_leaves_ghosts_on_their_way() -> None:
    world = World(fence=False, teardown_proves=False)
    assert not world.fabric.capabilities.teardown_proves
    world.move(1, [(5, 0)])
    world.fabric.crash(P.instance, keep=True)
    assert not world.landing.teardown(P.instance)
    world.fabric.deliver(0)
    assert world.holds(0) == content(5, 64)


# --- ranks and slices --------------------------------------------------------------------------------------------


def test_a_crash_takes_every_rank_of_its_instance() -> None:
    world = World()
    rank = seat("p-1", 1)
    mover = world.fabric.mover(rank, world.source, world.told.on_wrote)
    mover.connect(D, world.landing.endpoint, WHOLE)
    mover.move(MoveNo(9), GrantNo(1), D, paired([(5, 0)]))
    world.move(1, [(5, 0)])
    world.fabric.crash(P.instance, keep=False)
    assert world.fabric.pending == []
    assert world.fabric.mover(rank, world.source, world.told.on_wrote)


LOWER = Slice(64, 64, (Span(0, 0, 8, 16, 16, 4),))
"""The first 8 of every 16 bytes."""


def test_a_ghost_carries_no_more_than_its_slice() -> None:
    world = World()
    world.mover.connect(D, world.landing.endpoint, LOWER)
    world.landing.arm(GrantNo(2), P, [PageId(7)], LOWER)
    world.move(1, [(5, 7)], grant=2)
    world.fabric.crash(P.instance, keep=True)
    assert world.fabric.pending[0].ghost == content(5, 64)[:32]
    world.fabric.deliver(0)
    assert world.holds(7) == (content(5, 8) + bytes(8)) * 4


def test_a_length_that_does_not_fit_the_slice_of_the_grant_is_refused() -> None:
    world = World()
    world.mover.connect(D, world.landing.endpoint, LOWER)
    world.move(1, [(5, 0)])
    world.fabric.deliver(0)
    assert world.told.wrote == [(1, "discarded: misfit")]
    assert world.holds(0) == ZERO


def test_a_slice_of_another_layout_is_refused_with_a_fence_and_without() -> None:
    for fence in (True, False):
        world = World(fence=fence)
        world.mover.connect(D, world.landing.endpoint, Slice(64, 32, (Span(0, 0, 32, 64, 32, 1),)))
        world.move(1, [(5, 0)])
        world.fabric.deliver(0)
        assert world.told.wrote == [(1, "peer d-1/dp0cp0tp0pp0 has no pages of 32 bytes")]
        assert world.holds(0) == ZERO


@pytest.mark.parametrize("fence", [True, False])
def test_a_checksum_is_of_the_pages_as_they_were_posted(fence: bool) -> None:
    """A prefill that reuses a page while it is on its way is found out."""
    world = World(fence=fence, checksum=True)
    world.move(1, [(5, 0)])
    world.source.page(PageId(5))[:] = content(99, 64)
    world.fabric.deliver(0)
    assert world.told.wrote == [(1, "discarded: corrupt")]
    assert world.told.landed == []
