"""One deadline, and clocks of their own for waiting, for progress, for draining; none of them guards a page."""

from __future__ import annotations

import pytest

from pdplane.core.effects import Alarm, DisarmGrant, MovePages, RunWhole
from pdplane.core.events import GrantQuiet, MoveDone, OperatorRelease, PagesLanded
from pdplane.core.frames import Release, Renew
from pdplane.core.ids import GrantNo, Rank
from pdplane.core.pages import Page
from pdplane.core.params.table import H, RequestStatus

from .facing import limits, only
from .facing_params import FacingParams


def stuck(**more: object) -> FacingParams:
    """A client has left while its read was under way, and the fence does not close."""
    world = FacingParams(auto_fence=False, **more)  # type: ignore[arg-type]
    world.hold(1)
    world.read(1)
    world.leave(world.d, "d1")
    return world


def test_the_deadline_ends_a_request_wherever_it_is() -> None:
    world = FacingParams(d_limits=limits(pages=8, max_running=2, progress_limit_s=1e6, queue_limit_s=1e6))
    numbers = (1, 2, 3, 4, 5)
    for number, tokens in zip(numbers, (40, 10, 10, 40, 40), strict=True):
        world.hold(number, tokens)
        world.read(number, deadline=20.0)
        if number < 4:
            world.land_all()
            world.pump()
    assert [world.status(number) for number in numbers] == [
        RequestStatus.RUNNING,
        RequestStatus.RUNNING,
        RequestStatus.WAITING,  # for its place
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING,  # for pages
    ]
    world.wait(20.0)
    assert [world.d.failed(f"d{number}").code for number in numbers] == ["deadline"] * 5
    world.let_go(2)
    world.let_go(1)
    world.pump()
    assert world.idle()


def test_the_deadline_of_an_answer_that_waits_for_its_confirmation() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1, deadline=4.0)
    world.land_all()
    world.let_go(1)
    world.wait(4.0, pump=False)
    assert world.d.failed("d1").code == "deadline"
    world.pump()
    assert not world.may_leave(1)
    assert world.idle()


def test_prefills_deadline_ends_what_is_computed_and_not_what_is_held() -> None:
    world = FacingParams()
    world.ask(1, deadline=5.0)
    world.hold(2, deadline=5.0)
    world.wait(6.0)
    assert world.p.failed("p1").code == "deadline"
    assert world.holder(1).state is H.HELD


def test_who_waits_too_long_for_pages_is_told_to_come_later() -> None:
    world = FacingParams(d_limits=limits(pages=4, queue_limit_s=10.0), p_limits=limits(pages=4, queue_limit_s=10.0))
    world.hold(1)
    world.ask(2)
    world.wait(10.0)
    assert (world.p.failed("p2").code, world.p.failed("p2").status) == ("overloaded", 429)
    world.read(1)
    world.land_all()
    world.pump()
    world.hold(3)
    world.read(3)
    world.wait(10.0)
    assert (world.d.failed("d3").code, world.d.failed("d3").retry_after_s) == ("overloaded", 1)
    assert world.holder(2).state is H.RELEASED


def test_a_load_without_a_sign_of_work_is_given_up() -> None:
    world = FacingParams(d_limits=limits(progress_limit_s=10.0))
    world.hold(1, 64)
    world.read(1)
    for pages in (1, 2, 3):
        world.wait(9.0)
        world.land_pages(1, pages)
    world.wait(9.9)
    assert world.status(1) is RequestStatus.WAITING_FOR_REMOTE_KVS
    world.wait(0.2)
    assert (world.d.failed("d1").code, world.d.failed("d1").status) == ("no_progress", 504)
    assert world.holder(1).state is H.RELEASED
    assert world.idle()


def test_no_sign_of_work_is_wanted_of_what_runs() -> None:
    """Pages that are said to have landed again start no clock."""
    world = FacingParams(d_limits=limits(progress_limit_s=10.0))
    world.hold(1)
    world.read(1)
    reader = world.reader(1)
    world.land_all()
    world.d.take(PagesLanded(reader.grant, reader.links[0], reader.blocks))
    world.pump()
    world.wait(100.0)
    assert world.status(1) is RequestStatus.RUNNING


def test_a_fence_that_does_not_close_puts_the_pages_into_quarantine() -> None:
    world = stuck()
    world.wait(29.9)
    assert world.decode.ledger.counts[Page.DRAINING] == 3
    world.wait(0.2)
    assert world.decode.ledger.counts[Page.QUARANTINED] == 3
    assert "d1" in only(world.d.all(Alarm)).text
    assert "quarantined" in only(world.d.all(Alarm)).text
    assert "grant 1 of prefill P1, by memory at dp0" in only(world.d.all(Alarm)).text


def test_a_late_proof_frees_what_is_in_quarantine() -> None:
    world = stuck()
    world.wait(31.0)
    world.close_fences(1)
    assert world.d.free == 16
    assert "free again" in world.d.last(Alarm).text
    world.pump()
    assert world.holder(1).state is H.RELEASED
    assert world.idle()


def test_an_operator_frees_it_without_a_proof_and_the_lease_goes_too() -> None:
    world = stuck()
    world.wait(31.0)
    grant = world.reader(1).grant
    world.d.take(OperatorRelease(grant))
    assert world.d.free == 16
    assert "unproven" in world.d.last(Alarm).text
    world.pump()
    assert world.holder(1).state is H.RELEASED
    assert [release.hold for release in world.d.sent(Release)] == [1]
    world.d.log.clear()
    world.wait(20.0)
    assert world.d.sent(Renew) == []
    world.d.take(GrantQuiet(grant, Rank(), "memory"))
    assert world.d.counted("late") == ["quiet"]
    assert world.idle()


@pytest.mark.parametrize("grant", [1, 77])
def test_an_operator_frees_nothing_that_is_not_in_quarantine(grant: int) -> None:
    world = stuck()
    world.d.take(OperatorRelease(GrantNo(grant)))
    assert "operator_release" in world.d.counted("late")
    assert world.decode.ledger.counts[Page.DRAINING] == 3


def test_a_failed_read_whose_fence_does_not_close_is_answered_by_the_deadline_at_the_latest() -> None:
    world = FacingParams(auto_fence=False)
    world.hold(1)
    world.read(1, deadline=5.0)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "broken pipe"))
    world.pump()
    assert world.status(1) is RequestStatus.WAITING_FOR_REMOTE_KVS
    world.wait(5.0)
    assert world.d.failed("d1").code == "deadline"
    assert world.decode.ledger.counts[Page.DRAINING] == 3
    world.close_fences(1)
    world.pump()
    assert world.idle()


def test_quarantined_pages_are_not_waited_for_by_whoever_could_run_without_them() -> None:
    world = stuck(d_limits=limits(pages=6))
    world.wait(31.0)
    world.hold(2)
    world.read(2)
    world.land_all()
    world.pump()
    assert world.may_leave(2)
    assert len(world.d.all(DisarmGrant)) == 1
    assert [run.rid for run in world.d.all(RunWhole)] == ["d2"]
