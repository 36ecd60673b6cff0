"""A load that fails, in each way that it can, under either failure policy."""

from __future__ import annotations

import pytest

from pdplane.core.effects import AbortEngine, AnswerFailed, MovePages, RestoreEngine, RetractEngine, RunWhole, Ungate
from pdplane.core.events import MoveDone, ReleaseHold
from pdplane.core.frames import Confirm, Confirmed, ReadFailed
from pdplane.core.ids import Rid
from pdplane.core.pages import Page
from pdplane.core.params.table import H, L, RequestStatus

from .facing import limits, only
from .facing_params import FacingParams, answers, cause

POLICIES = pytest.mark.parametrize("recompute", [False, True], ids=["fail", "recompute"])


def breaks(world: FacingParams, error: str = "broken pipe") -> None:
    """Prefill's mover gives the oldest move up that is still out, and says so."""
    world.p.take(MoveDone(world.p.all(MovePages)[-1].move, error))
    world.pump()


def refused(*, recompute: bool, max_new: int = 4, max_running: int = 16, busy: bool = False) -> FacingParams:
    """All pages have come, the engine has begun or waits, and prefill does not hold them any more."""
    world = FacingParams(recompute=recompute, d_limits=limits(max_running=max_running))
    if busy:
        world.whole(2, 16)
    world.hold(1)
    world.read(1, max_new=max_new)
    world.land_all()
    world.p.take(ReleaseHold(Rid("p1"), cause("gone")))
    return world


@POLICIES
def test_a_read_that_failed_with_nothing_good(recompute: bool) -> None:
    world = FacingParams(recompute=recompute)
    world.hold(1)
    world.read(1)
    breaks(world)
    assert world.holder(1).state is H.RELEASED
    if recompute:
        run = world.run_of(1)
        assert (run.computed, run.shared, run.gated) == (0, 0, False)
        assert world.d.counted("recompute") == ["transfer_failed"]
        assert answers(world.d, "d1") == []
        world.let_go(1)
    else:
        failed = world.d.failed("d1")
        assert (failed.code, failed.status, failed.retryable) == ("transfer_failed", 502, True)
        assert world.d.all(RunWhole) == []
    assert world.d.sent(Confirm) == []
    assert world.idle()


@pytest.mark.parametrize("good", [1, 2])
def test_from_the_first_bad_page_on_it_is_computed_here_once_the_head_is_confirmed(good: int) -> None:
    world = FacingParams(recompute=True)
    world.hold(1)
    world.read(1)
    world.land_pages(1, good)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "broken pipe"))
    world.deliver(ReadFailed)
    assert world.states(1)[1] is L.SALVAGING
    assert world.d.all(RunWhole) == []
    world.pump()
    run = world.run_of(1)
    assert (run.computed, run.gated) == (good * 16, False)
    assert world.holder(1).state is H.RELEASED
    assert len(world.p.sent(Confirmed)) == 1
    world.let_go(1)
    assert world.idle()


def test_a_bad_page_before_good_ones_leaves_only_what_is_before_it() -> None:
    world = FacingParams(recompute=True, tp=(2, 1))
    world.hold(1)
    world.read(1)
    world.land_pages(1, 3, link=0)
    world.land_pages(1, 1, link=1)
    breaks(world)
    assert world.run_of(1).computed == 16


def test_a_head_that_cannot_be_confirmed_is_not_used() -> None:
    world = FacingParams(recompute=True)
    world.hold(1)
    world.read(1)
    world.land_pages(1, 2)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "broken pipe"))
    world.p.take(ReleaseHold(Rid("p1"), cause("expired")))
    world.pump()
    assert world.run_of(1).computed == 0
    assert world.d.counted("recompute") == ["transfer_failed"]  # the first cause stays


def test_a_head_whose_prefill_is_gone_is_not_used() -> None:
    world = FacingParams(recompute=True)
    world.hold(1)
    world.read(1)
    world.land_pages(1, 2)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "broken pipe"))
    world.deliver(ReadFailed)
    assert world.states(1)[1] is L.SALVAGING
    world.boxes.remove(world.p)
    world.cut(reachable=False)
    world.wait(3.0)
    assert world.run_of(1).computed == 0


def test_who_leaves_while_a_head_is_confirmed_is_over_at_once() -> None:
    world = FacingParams(recompute=True)
    world.hold(1)
    world.read(1)
    world.land_pages(1, 2)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "broken pipe"))
    world.deliver(ReadFailed)
    world.leave(world.d, "d1")
    assert world.d.free == 16
    world.pump()
    assert world.holder(1).state is H.RELEASED
    assert world.d.all(RunWhole) == []
    assert world.idle()


def test_what_decode_shares_stays_when_the_rest_could_not_be_read() -> None:
    world = FacingParams(recompute=True)
    world.whole(1, 40, keys="ab")
    world.decoded(1, 41)
    world.let_go(1)
    world.hold(2, 50, keys="abc")
    world.read(2, keys="abc")
    breaks(world)
    assert (world.run_of(2).computed, world.run_of(2).shared) == (32, 2)
    world.let_go(2)
    assert world.idle()


@POLICIES
def test_refused_late_with_the_engine_at_work(recompute: bool) -> None:
    """Nothing has left, so that it can be taken back: it begins anew, or it fails."""
    world = refused(recompute=recompute)
    world.pump()
    assert world.d.all(AbortEngine) != []
    assert not world.may_leave(1)
    assert world.decode.ledger.counts[Page.ACTIVE] == 3
    if not recompute:
        assert world.d.failed("d1").code == "gone"
    world.let_go(1)
    if recompute:
        assert [(run.computed, run.gated) for run in world.d.all(RunWhole)] == [(40, True), (0, False)]
        assert answers(world.d, "d1") == []
        assert world.may_leave(1)
        world.let_go(1)
    assert world.status(1) is None
    assert world.d.all(Ungate) == []
    assert world.idle()


@POLICIES
def test_refused_when_the_engine_had_finished(recompute: bool) -> None:
    world = refused(recompute=recompute, max_new=1)
    world.let_go(1)
    assert world.status(1) is RequestStatus.FINISHED_STOPPED
    assert world.decode.ledger.counts[Page.CACHED] == 0
    world.pump()
    if recompute:
        assert (world.run_of(1).computed, world.run_of(1).gated) == (0, False)
        world.let_go(1)
    else:
        assert world.d.failed("d1").code == "gone"
    assert world.d.all(Ungate) == []
    assert world.idle()


@POLICIES
def test_refused_while_it_waits_for_its_place(recompute: bool) -> None:
    world = refused(recompute=recompute, max_running=1, busy=True)
    assert world.status(1) is RequestStatus.WAITING
    world.pump()
    world.let_go(2)
    if recompute:
        assert (world.run_of(1).computed, world.run_of(1).gated) == (0, False)
        world.let_go(1)
    else:
        assert world.d.failed("d1").code == "gone"
        assert [run.rid for run in world.d.all(RunWhole)] == ["d2"]
    assert world.idle()


@POLICIES
def test_refused_while_it_is_laid_aside(recompute: bool) -> None:
    """Retracted while nothing of it may leave yet."""
    world = FacingParams(recompute=recompute, d_limits=limits(pages=7, reserve_tokens=0))
    world.whole(2, 32, max_new=60)
    world.hold(1, 40)
    world.read(1, max_new=20)
    world.land_all()
    world.decoded(1, 41)
    world.decoded(2, 33)
    world.decoded(2, 48)
    assert [effect.rid for effect in world.d.all(RetractEngine)] == ["d1"]
    world.laid_aside(1, 41)
    world.p.take(ReleaseHold(Rid("p1"), cause("gone")))
    world.pump()
    world.let_go(1)
    world.let_go(2)
    if recompute:
        assert (world.run_of(1).computed, world.run_of(1).gated) == (0, False)
        world.let_go(1)
    else:
        assert world.d.failed("d1").code == "gone"
    assert [effect.rid for effect in world.d.all(Ungate)] == ["d2"]
    assert world.idle()


def test_confirmed_while_it_is_laid_aside_its_answer_may_leave() -> None:
    world = FacingParams(d_limits=limits(pages=7, reserve_tokens=0))
    world.whole(2, 32, max_new=60)
    world.hold(1, 40)
    world.read(1, max_new=20)
    world.land_all()
    world.decoded(1, 41)
    world.decoded(2, 33)
    world.decoded(2, 48)
    world.laid_aside(1, 41)
    world.pump()
    assert world.may_leave(1)
    world.let_go(2)
    assert [effect.rid for effect in world.d.all(RestoreEngine)] == ["d1"]
    world.let_go(1)
    assert world.idle()


def test_who_leaves_while_its_engine_is_taken_back_is_answered_and_does_not_begin_anew() -> None:
    world = refused(recompute=True)
    world.pump()
    world.leave(world.d, "d1")
    assert world.d.failed("d1").code == "client_left"
    world.let_go(1)
    assert len(world.d.all(RunWhole)) == 1
    assert world.idle()


def test_the_deadline_goes_on_while_the_engine_is_taken_back() -> None:
    world = refused(recompute=True)
    world.pump()
    world.wait(300.0)
    assert world.d.failed("d1").code == "deadline"
    world.let_go(1)
    assert world.idle()


def test_an_engine_that_fails_before_the_confirmation_ends_the_request() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.land_all()
    world.let_go(1, error="out of memory")
    assert world.d.failed("d1").code == "engine_error"
    world.pump()
    assert world.holder(1).state is H.RELEASED
    assert not world.may_leave(1)
    assert world.idle()


def test_an_engine_that_fails_while_it_is_taken_back_begins_anew_all_the_same() -> None:
    world = refused(recompute=True)
    world.pump()
    world.let_go(1, error="it was interrupted")
    assert answers(world.d, "d1") == []
    assert world.run_of(1).computed == 0


def test_one_that_begins_anew_waits_for_pages_as_a_newcomer_does() -> None:
    world = FacingParams(recompute=True, d_limits=limits(pages=4))
    world.hold(1)
    world.hold(2)
    world.read(1)
    world.second(2)
    world.land_all()
    world.p.take(ReleaseHold(Rid("p1"), cause("gone")))
    world.pump()
    world.let_go(1)
    world.pump()
    assert world.status(1) is RequestStatus.WAITING
    assert world.states(2)[1] is L.READING
    world.land_all()
    world.pump()
    world.let_go(2)
    assert (world.run_of(1).computed, world.run_of(1).gated) == (0, False)
    world.let_go(1)
    assert world.idle()


@pytest.mark.parametrize("code", ["spent", "unknown_hold", "prompt_mismatch", "invalid_params"])
def test_a_refusal_that_speaks_of_the_request_is_not_computed_away(code: str) -> None:
    world = FacingParams(recompute=True)
    world.hold(1)
    world.read(1)
    world.p.take(ReleaseHold(Rid("p1"), cause(code)))
    world.land_all()
    world.pump()
    assert world.d.failed("d1").code == code
    world.let_go(1)
    assert len([a for a in world.d.all(AnswerFailed) if a.rid == "d1"]) == 1
    assert world.idle()
