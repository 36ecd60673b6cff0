"""Whatever happens in whatever order, everything ends, once, with the right pages, and is given back; and every cell of
the params tables is met on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pdplane.core.effects import MovePages
from pdplane.core.events import MoveDone, OperatorRelease, ReleaseHold
from pdplane.core.frames import Confirm, Read
from pdplane.core.ids import GrantNo, Rid
from pdplane.core.params.holder import Holder
from pdplane.core.params.reader import Reader
from pdplane.core.params.table import HOLDER, READER

from .chaos_params import ChaosParams
from .facing import limits, only
from .facing_params import FacingParams, cause
from .test_holds import named, says

Cell = tuple[object, object]


@settings(max_examples=150, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 120))
def test_everything_ends_once_with_the_right_pages_and_is_given_back(seed: int, steps: int) -> None:
    chaos = ChaosParams(Random(seed))
    chaos.run(steps)
    assert chaos.watch.verdicts() == []
    assert chaos.world.idle()


@contextmanager
def cells_met() -> Iterator[set[Cell]]:
    met: set[Cell] = set()

    def noting(machine: type, table: Mapping[Cell, object]) -> Callable[..., None]:
        apply = machine.apply  # type: ignore[attr-defined]

        def noted(self: Holder | Reader, event: object, **more: object) -> None:
            met.update({(self.state, event)} & table.keys())
            apply(self, event, **more)

        return noted

    with (
        patch.object(Holder, "apply", noting(Holder, HOLDER)),  # type: ignore[arg-type]
        patch.object(Reader, "apply", noting(Reader, READER)),  # type: ignore[arg-type]
    ):
        yield met


def a_head_is_asked_for(**more: object) -> FacingParams:
    """A read has failed behind its first page, which a confirmation would save."""
    world = FacingParams(recompute=True, **more)  # type: ignore[arg-type]
    world.hold(1)
    world.read(1)
    world.land_pages(1, 1)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "broken pipe"))
    world.pump(1)
    return world


def head_confirmed() -> None:
    world = a_head_is_asked_for()
    world.pump()


def head_refused() -> None:
    world = a_head_is_asked_for()
    world.p.take(ReleaseHold(Rid("p1"), cause()))
    world.pump()


def head_lost() -> None:
    world = a_head_is_asked_for()
    world.cut(reachable=False)
    world.wait(10.0)


def head_cancelled() -> None:
    world = a_head_is_asked_for()
    world.leave(world.d, "d1")


def head_asked_for_again() -> None:
    world = a_head_is_asked_for()
    world.cut()
    world.wait(1.0)


def freed_by_an_operator() -> None:
    world = FacingParams(auto_fence=False)
    world.hold(1)
    world.read(1)
    world.leave(world.d, "d1")
    world.wait(31.0)
    world.d.take(OperatorRelease(world.reader(1).grant))


def said_to_a_hold_that_is_over(end: Callable[[FacingParams], object]) -> None:
    """By its consumer, who had said so before; and by one who is none."""
    world = FacingParams()
    world.hold(1)
    world.read(1)
    again = only(world.d.sent(Read))
    confirm = Confirm(**named(world, 1, again.grant))
    end(world)
    for frame in (again, confirm, msgspec.structs.replace(again, grant=GrantNo(9)), Confirm(**named(world, 1, 9))):
        says(world, frame)


def over_well() -> None:
    said_to_a_hold_that_is_over(lambda world: (world.land_all(), world.pump()))


def over_ill() -> None:
    said_to_a_hold_that_is_over(lambda world: world.p.take(ReleaseHold(Rid("p1"), cause())))


def over_by_its_lease() -> None:
    """Its reader is there, and does not renew."""
    world = FacingParams(p_limits=limits(hold_term_s=3.0))
    world.hold(1)
    world.read(1)
    world.wait(3.0, pump=False)


def prefill_gone_before_its_word() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.land_all()
    world.cut(reachable=False)
    world.wait(10.0)


def another_asks() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    read = only(world.d.sent(Read))
    says(world, Confirm(**named(world, 1, 9)))
    says(world, msgspec.structs.replace(read, grant=GrantNo(9)))
    says(world, msgspec.structs.replace(read, dst_pages=read.dst_pages[1:]))


def asked_before_anybody_has_read() -> None:
    world = FacingParams()
    world.whole(2, 16)
    world.hold(1)
    says(world, Confirm(**named(world, 2, 9)))


def nothing_is_left_to_read() -> None:
    world = FacingParams()
    world.whole(1, 32, keys="ab")
    world.decoded(1, 33)
    world.let_go(1)
    world.whole(2, 33, keys="ab")


def parked_when_prefill_is_gone() -> None:
    world = FacingParams(d_limits=limits(pages=4))
    world.whole(2, 64)
    world.hold(1)
    world.read(1)
    world.cut(reachable=False)
    world.wait(10.0)


def everything_at_once_while_it_drains() -> None:
    """A failed read whose fence is open: its client leaves, its hold ends, its prefill dies."""
    world = FacingParams(auto_fence=False)
    world.hold(1)
    world.read(1)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "broken pipe"))
    world.p.take(ReleaseHold(Rid("p1"), cause()))
    world.wait(6.0)  # a renewal
    world.leave(world.d, "d1")
    world.cut(reachable=False)
    world.wait(10.0)


def refused_at_the_end() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.land_all()
    world.p.take(ReleaseHold(Rid("p1"), cause()))
    world.pump()


def asked_again_at_the_end() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.land_all()
    world.cut()
    world.wait(1.0)


SCRIPTED = [
    asked_before_anybody_has_read,
    nothing_is_left_to_read,
    parked_when_prefill_is_gone,
    everything_at_once_while_it_drains,
    refused_at_the_end,
    asked_again_at_the_end,
    head_confirmed,
    head_refused,
    head_lost,
    head_cancelled,
    head_asked_for_again,
    freed_by_an_operator,
    over_well,
    over_ill,
    over_by_its_lease,
    prefill_gone_before_its_word,
    another_asks,
]
"""What random hands seldom come to."""


def test_every_cell_is_met() -> None:
    with cells_met() as met:
        for seed in range(60):
            ChaosParams(Random(seed)).run(80)
        for scenario in SCRIPTED:
            scenario()
    assert set(HOLDER) - met == set()
    assert set(READER) - met == set()
