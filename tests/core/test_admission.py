"""What a request may come to need, who is turned away at the door, and that it costs nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.admission import demand
from pdplane.core.frames import Announce
from pdplane.core.layout import pages_for
from pdplane.core.node import Limits
from pdplane.core.pages import Page
from pdplane.core.rooms.table import R

from .facing import Facing, limits


@given(st.integers(1, 20), st.integers(1, 32), st.data())
def test_a_demand_always_fits_the_pool_alone(pages: int, size: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, pages * size))
    max_new = data.draw(st.integers(1, 1000))
    need = demand(tokens, max_new, Limits(pages=pages, page_size=size))
    assert need.pages == pages_for(tokens, size)
    assert need.pages <= need.most <= pages
    assert 1 <= need.max_new <= max_new
    assert need.max_new == max_new or tokens + need.max_new - 1 == pages * size


@pytest.mark.parametrize("side", ["d", "p"])
def test_a_prompt_over_a_sides_pool_is_a_400_naming_limit_length_and_side(side: str) -> None:
    world = Facing(**{f"{side}_limits": limits(pages=2)})
    world.meet(5, tokens=33)
    cause = getattr(world, side).failed("r5")
    assert (cause.status, cause.code) == (400, "context_length_exceeded")
    for word in ("33", "32", getattr(world, side).node.side):
        assert word in cause.message
    assert world.d.node.ledger.counts[Page.GRANTED] == 0


def test_prefills_refusal_reaches_decode_verbatim() -> None:
    world = Facing(p_limits=limits(pages=2))
    world.meet(5, tokens=33)
    assert world.d.failed("r5") == world.p.failed("r5")
    assert world.idle()


def test_a_full_queue_is_busy_at_once_and_nobody_is_asked() -> None:
    world = Facing(d_limits=limits(pages=3, max_queue=1))
    for number in (1, 2, 3):
        world.meet(number)
    assert world.d_state(2) is R.ALLOCATING
    assert world.d.failed("r3").status == 429
    assert len(world.d.sent(Announce)) == 2


def test_a_large_head_is_overtaken_a_bounded_number_of_times() -> None:
    world = Facing(d_limits=limits(pages=8, max_overtakes=2))
    world.meet(1, tokens=80, max_new=1)
    world.meet(2, tokens=128, max_new=1)
    for number in (3, 4, 5):
        world.meet(number, tokens=16, max_new=1)
    assert [world.d_state(number) for number in (2, 3, 4, 5)] == [R.ALLOCATING, R.GRANTED, R.GRANTED, R.ALLOCATING]


def test_priority_goes_first() -> None:
    world = Facing(d_limits=limits(pages=3))
    world.meet(1)
    world.meet(2)
    world.meet(3, priority=5)
    world.cancel(world.d, 1)
    assert [world.d_state(number) for number in (2, 3)] == [R.ALLOCATING, R.GRANTED]


def test_waiting_is_counted_while_it_lasts() -> None:
    world = Facing(d_limits=limits(pages=3))
    world.meet(1)
    world.meet(2)
    assert world.decode.waiting == 1
    world.cancel(world.d, 2)
    assert world.decode.waiting == 0
    world.pump()
    assert world.prefill.waiting == 0
    world.cancel(world.d, 1)
    world.pump()
    assert world.prefill.computing == 1
    world.release(1)
    assert world.prefill.computing == 0
