"""What runs: growth within the reserve, places, and release."""

from __future__ import annotations

from pdplane.core.effects import ExtendPages, RunDecode
from pdplane.core.events import Computed, Released
from pdplane.core.pages import Page
from pdplane.core.table import R

from .facing import Facing, limits


def running(world: Facing, number: int, tokens: int, max_new: int) -> None:
    world.meet(number, tokens=tokens, max_new=max_new)
    world.send_all(number)
    world.pump()


def test_a_request_grows_before_it_stands_at_the_edge() -> None:
    world = Facing()
    running(world, 5, tokens=36, max_new=100)
    assert world.d.all(ExtendPages) == []
    world.d.take(Computed(rid=world.rid(5), tokens=40))
    assert len(world.d.all(ExtendPages)) == 1
    world.d.take(Computed(rid=world.rid(5), tokens=41))
    assert len(world.d.all(ExtendPages)) == 1
    assert world.decode.ledger.counts[Page.ACTIVE] == 4


def test_it_never_grows_past_what_it_can_need() -> None:
    world = Facing()
    running(world, 5, tokens=40, max_new=9)
    world.d.take(Computed(rid=world.rid(5), tokens=48))
    assert world.d.all(ExtendPages) == []


def test_one_that_may_not_grow_waits_and_is_fed_by_the_next_release() -> None:
    world = Facing(d_limits=limits(pages=6))
    running(world, 1, tokens=32, max_new=17)  # 2 pages, 3 at most
    running(world, 2, tokens=32, max_new=33)  # 2 pages, 4 at most
    world.d.take(Computed(rid=world.rid(2), tokens=34))
    assert [extend.rid for extend in world.d.all(ExtendPages)] == ["r1", "r2"]
    world.d.take(Computed(rid=world.rid(2), tokens=40))
    assert len(world.d.all(ExtendPages)) == 2
    world.d.take(Computed(rid=world.rid(2), tokens=41))
    assert len(world.d.all(ExtendPages)) == 2
    world.d.take(Released(rid=world.rid(1)))
    assert [extend.rid for extend in world.d.all(ExtendPages)] == ["r1", "r2", "r2"]


def test_nobody_waits_for_pages_of_one_that_waits_for_his_place() -> None:
    """One place, ten pages: the holder of the place must be able to end on its own (I13)."""
    world = Facing(d_limits=limits(pages=10, max_running=1))
    running(world, 1, tokens=64, max_new=65)  # 4 pages, 8 at most
    running(world, 2, tokens=64, max_new=1)  # 4 pages
    assert world.d_state(2) is R.ALLOCATING
    for tokens in range(64, 129):
        world.d.take(Computed(rid=world.rid(1), tokens=tokens))
    assert world.decode.ledger.counts[Page.ACTIVE] == 8
    world.d.take(Released(rid=world.rid(1)))
    assert world.d_state(2) is R.GRANTED


def test_a_release_of_nobody_is_late() -> None:
    world = Facing()
    world.meet(5)
    world.d.take(Released(rid=world.rid(5)))
    assert world.d.counted("late") == ["released"]
    assert world.d.all(RunDecode) == []


def test_computed_after_an_abort_asks_for_nothing() -> None:
    world = Facing()
    running(world, 5, tokens=36, max_new=100)
    world.cancel(world.d, 5)
    world.d.take(Computed(rid=world.rid(5), tokens=40))
    assert world.d.all(ExtendPages) == []
