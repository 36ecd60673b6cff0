"""The faults, one by one, and what holds in spite of them: each move completes exactly once."""

from __future__ import annotations

import random
import threading

import pytest

from pdplane.core.ids import GrantNo, MoveNo, PageId
from pdplane.core.slices import whole_page
from pdplane.transport.checksum import Verifier
from pdplane.transport.contract import LandedCallback, Landing, QuietCallback
from pdplane.transport.faulty import (
    ALL,
    LOST,
    REFUSED,
    FaultyLanding,
    FaultyMover,
    LandingFaults,
    MoverFaults,
    Picks,
)
from pdplane.transport.memory import MemoryFabric
from pdplane.transport.pool import PagePool

from .rigs import STRANGER, D, P, Told, content, paired, seat

WHOLE = whole_page(64)


class Desk:
    """Source page i goes to target page i under grant 1."""

    def __init__(
        self, mover: MoverFaults | None = None, landing: LandingFaults | None = None, *, auto: bool = True
    ) -> None:
        self.told = Told()
        self.source, self.target = PagePool(16, 64), PagePool(16, 64)
        for page in range(16):
            self.source.page(PageId(page))[:] = content(page, 64)
        self.fabric = MemoryFabric(auto=auto)

        def build(landed: LandedCallback, quiet: QuietCallback, verifier: Verifier) -> Landing:
            return self.fabric.landing(D, self.target, landed, quiet, "t", verifier)

        self.landing = FaultyLanding(
            build, self.target, self.told.on_landed, self.told.on_quiet, landing or LandingFaults()
        )
        self.mover = FaultyMover(
            lambda wrote: self.fabric.mover(P, self.source, wrote), self.told.on_wrote, mover or MoverFaults()
        )
        self.mover.connect(D, self.landing.endpoint, WHOLE)
        self.landing.arm(GrantNo(1), P, [PageId(page) for page in range(16)], WHOLE)

    def move(self, *numbers: int) -> None:
        for number in numbers:
            self.mover.move(MoveNo(number), GrantNo(1), D, paired([(number, number)]))

    def has(self, page: int) -> bool:
        return bytes(self.target.page(PageId(page))) == content(page, 64)


def test_without_faults_nothing_changes() -> None:
    desk = Desk()
    desk.move(1, 2)
    assert desk.told.wrote == [(1, ""), (2, "")]
    assert desk.told.pages_of(1) == [1, 2]


def test_a_held_move_begins_when_it_is_released() -> None:
    desk = Desk(MoverFaults(hold=Picks(at=(0, 1))))
    desk.move(1, 2, 3)
    assert desk.told.wrote == [(3, "")]
    assert not desk.has(1)
    desk.mover.release_moves(1)
    assert desk.told.wrote == [(3, ""), (1, "")]
    assert desk.mover.held == 1
    desk.mover.release_moves()
    assert desk.told.wrote == [(3, ""), (1, ""), (2, "")]
    assert all(desk.has(page) for page in (1, 2, 3))


def test_a_refused_move_sends_nothing() -> None:
    desk = Desk(MoverFaults(refuse=Picks(at=(1,))))
    desk.move(1, 2, 3)
    assert desk.told.wrote == [(1, ""), (2, REFUSED), (3, "")]
    assert not desk.has(2)


def test_a_lost_answer_comes_after_the_bytes() -> None:
    desk = Desk(MoverFaults(lose=Picks(at=(0,))))
    desk.move(1)
    assert desk.told.wrote == [(1, LOST)]
    assert desk.told.pages_of(1) == [1]
    assert desk.has(1)


def test_a_repeated_move_lands_once_and_completes_when_nothing_reads_its_pages_any_more() -> None:
    desk = Desk(MoverFaults(repeat=ALL), auto=False)
    desk.move(1)
    assert len(desk.fabric.pending) == 2
    desk.fabric.deliver(0)
    assert desk.told.wrote == []
    desk.fabric.deliver(0)
    assert desk.told.wrote == [(1, "")]
    assert desk.told.pages_of(1) == [1]


def test_a_late_completion_waits_for_its_release() -> None:
    desk = Desk(MoverFaults(delay=Picks(at=(0,))))
    desk.move(1, 2)
    assert desk.told.wrote == [(2, "")]
    assert desk.has(1)
    desk.mover.release_completions()
    assert desk.told.wrote == [(2, ""), (1, "")]


def test_swapped_completions_come_in_the_other_order() -> None:
    desk = Desk(MoverFaults(swap=Picks(at=(0, 3))))
    desk.move(1, 2, 3, 4)
    assert desk.told.wrote == [(2, ""), (1, ""), (3, "")]
    desk.mover.release_completions()
    assert desk.told.wrote[3:] == [(4, "")]


def test_a_held_move_can_be_cancelled() -> None:
    desk = Desk(MoverFaults(hold=ALL))
    desk.move(1)
    desk.mover.move(MoveNo(2), GrantNo(2), D, paired([(2, 2)]))
    desk.mover.cancel(GrantNo(1), STRANGER)
    desk.mover.cancel(GrantNo(1), D)
    assert desk.told.wrote == [(1, "cancelled")]
    desk.mover.release_moves()
    assert desk.told.wrote == [(1, "cancelled"), (2, "discarded: unknown grant")]


def test_a_teardown_ends_what_is_held_and_what_is_late_and_is_prompt_from_then_on() -> None:
    desk = Desk(MoverFaults(hold=Picks(at=(0,)), delay=ALL), auto=False)
    desk.move(1, 2, 3)
    desk.fabric.deliver(0)
    assert desk.told.wrote == []
    desk.mover.teardown(seat("d-2").instance)
    assert desk.told.wrote == []
    desk.mover.teardown(D.instance)
    assert sorted(desk.told.wrote) == [(1, "torn down"), (2, "torn down"), (3, "torn down")]
    desk.mover.release_moves()
    desk.mover.release_completions()
    assert len(desk.told.wrote) == 3


def test_closing_ends_what_is_held() -> None:
    desk = Desk(MoverFaults(hold=ALL))
    desk.move(1)
    desk.mover.close()
    assert desk.told.wrote == [(1, "the mover was closed")]


def test_a_source_page_outside_the_pool_is_refused_as_ever() -> None:
    desk = Desk(MoverFaults(repeat=ALL))
    with pytest.raises(IndexError, match="page 16"):
        desk.move(16)
    held = Desk(MoverFaults(hold=ALL))
    held.move(16)
    held.mover.release_moves()
    assert held.told.end_of(16) == "page 16 is outside the pool of 16 pages"


def everything(seed: int) -> list[tuple[MoveNo, str]]:
    """A run with all faults at once, and random releases, cancels and teardowns."""
    some = Picks(odds=0.3)
    faults = MoverFaults(seed=seed, hold=some, refuse=some, repeat=some, lose=some, delay=some, swap=some)
    desk, rng = Desk(faults, auto=False), random.Random(seed)
    for number in range(200):
        desk.mover.move(MoveNo(number), GrantNo(1), D, paired([(number % 16, rng.randrange(16))]))
        for _ in range(rng.randrange(3)):
            if desk.fabric.pending:
                desk.fabric.deliver(rng.randrange(len(desk.fabric.pending)))
        rng.choice(
            [
                lambda: None,
                desk.mover.release_completions,
                lambda: desk.mover.release_moves(2),
                lambda: desk.mover.cancel(GrantNo(1), D),
            ]
        )()
        if rng.random() < 0.02:
            desk.mover.teardown(D.instance)
            desk.mover.connect(D, desk.landing.endpoint, WHOLE)
    desk.mover.close()
    return desk.told.wrote


@pytest.mark.parametrize("seed", range(20))
def test_each_move_completes_exactly_once_whatever_happens(seed: int) -> None:
    wrote = everything(seed)
    assert sorted(number for number, _ in wrote) == list(range(200))
    assert {REFUSED, LOST, "cancelled", ""} <= {error for _, error in wrote}


def test_the_same_seed_is_the_same_run_and_another_is_another() -> None:
    assert everything(1) == everything(1)
    assert everything(1) != everything(2)


def test_one_faults_odds_do_not_move_anothers() -> None:
    def refused(**others: Picks) -> list[int]:
        desk = Desk(MoverFaults(seed=3, refuse=Picks(odds=0.5), **others))
        desk.move(*range(16))
        return sorted(number for number, error in desk.told.wrote if error == REFUSED)

    assert refused() == refused(lose=ALL) == refused(repeat=Picks(odds=0.5))
    assert 0 < len(refused()) < 16


# --- decode's end ------------------------------------------------------------------------------------------------


def test_a_corrupt_frame_has_one_wrong_bit() -> None:
    desk = Desk(landing=LandingFaults(seed=2, corrupt=Picks(at=(1,))))
    desk.move(1, 2, 3)
    assert [desk.has(page) for page in (1, 2, 3)] == [True, False, True]
    wrong = [ours ^ theirs for ours, theirs in zip(content(2, 64), bytes(desk.target.page(PageId(2))), strict=True)]
    assert sum(byte.bit_count() for byte in wrong) == 1


def test_a_late_report_of_pages_waits_for_its_release() -> None:
    desk = Desk(landing=LandingFaults(delay_landed=Picks(at=(0,))))
    desk.move(1, 2)
    assert desk.told.wrote == [(1, ""), (2, "")]
    assert desk.told.landed_from == [(1, P, 2)]
    desk.landing.release_landed()
    assert desk.told.landed_from == [(1, P, 2), (1, P, 1)]


def test_a_late_quiet_is_told_once_after_its_release() -> None:
    desk = Desk(landing=LandingFaults(delay_quiet=ALL))
    assert not desk.landing.revoke(GrantNo(1))
    assert not desk.landing.revoke(GrantNo(1))
    assert desk.told.quiet == []
    desk.landing.release_quiet()
    desk.landing.release_quiet()
    assert desk.told.quiet == [1]
    assert desk.landing.revoke(GrantNo(1))


def test_a_grant_that_is_not_armed_is_quiet_and_no_ordinal() -> None:
    desk = Desk(landing=LandingFaults(delay_quiet=Picks(at=(0,))))
    assert desk.landing.revoke(GrantNo(9))
    assert not desk.landing.revoke(GrantNo(1))


def test_a_released_quiet_that_is_not_true_yet_comes_when_it_is() -> None:
    desk = Desk(landing=LandingFaults(delay_quiet=ALL))
    inner = desk.landing.inner
    claim = inner.table.claim(GrantNo(1), P, [PageId(0)])  # type: ignore[attr-defined]
    assert inner.table.enter(claim)  # type: ignore[attr-defined]
    assert not desk.landing.revoke(GrantNo(1))
    desk.landing.release_quiet()
    assert desk.told.quiet == []
    inner.table.leave(claim)  # type: ignore[attr-defined]
    assert desk.told.quiet == [1]


def test_completions_from_a_thread_of_the_transport_meet_releases_from_another() -> None:
    desk = Desk(MoverFaults(seed=1, delay=Picks(odds=0.5), repeat=Picks(odds=0.5)), auto=False)
    desk.move(*range(16))

    def deliver() -> None:
        while desk.fabric.pending:
            desk.fabric.deliver(0)

    transport = threading.Thread(target=deliver)
    transport.start()
    while len(desk.told.wrote) < 16:
        desk.mover.release_completions()
    transport.join()
    assert sorted(desk.told.wrote) == [(number, "") for number in range(16)]
