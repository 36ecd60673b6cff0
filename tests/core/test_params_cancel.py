"""Who leaves, when, and what is given back at once, what on proof; prefill is told wherever it cannot know."""

from __future__ import annotations

import pytest

from pdplane.core.effects import AbortEngine, AnswerFailed, ArmGrant, RevokeGrant, RunPrefill, RunWhole
from pdplane.core.events import HandleRefused, Released, Sampled
from pdplane.core.frames import Confirm, Read, Release
from pdplane.core.ids import Rid
from pdplane.core.pages import Page
from pdplane.core.params.table import H, L, RequestStatus

from .facing import limits, only
from .facing_params import FacingParams, answers, cause

# --- before decode lets it in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"name": b"another"}, "prompt_mismatch"),
        ({"tokens": 4}, "prompt_mismatch"),
        ({"tokens": 400}, "context_length_exceeded"),
    ],
)
def test_a_handle_that_decode_refuses_is_released_at_once(more: dict[str, object], code: str) -> None:
    world = FacingParams()
    world.hold(1)
    world.second(1, **more)  # type: ignore[arg-type]
    assert world.d.failed("d1").code == code
    world.pump()
    assert world.holder(1).state is H.RELEASED
    assert only(world.d.sent(Release)).cause.code == code
    assert world.idle()


def test_a_handle_that_the_edge_turned_away_is_released_at_once() -> None:
    world = FacingParams()
    handle = world.hold(1)
    world.d.take(HandleRefused(handle, cause("unauthorized")))
    world.pump()
    assert world.holder(1).state is H.RELEASED
    assert world.idle()


def test_a_full_queue_releases_too() -> None:
    world = FacingParams(d_limits=limits(pages=3, max_queue=1))
    world.whole(1)
    for number in (2, 3):
        world.hold(number)
        world.read(number)
    assert world.d.failed("d3").code == "overloaded"
    assert world.holder(3).state is H.RELEASED
    assert world.holder(2).state is H.HELD


def test_a_rid_in_use_is_refused_its_hold_released_and_the_first_goes_on() -> None:
    world = FacingParams()
    world.hold(1)
    world.hold(2)
    world.read(1)
    world.read(2, rid="d1")
    assert world.d.failed("d1").code == "duplicate_rid"
    assert (world.holder(1).state, world.holder(2).state) == (H.BOUND, H.RELEASED)
    world.land_all()
    world.pump()
    assert world.may_leave(1)


def test_a_replayed_handle_that_is_refused_releases_nothing() -> None:
    world = FacingParams()
    handle = world.hold(1)
    world.read(1)
    world.second(1, rid="d1")
    world.second(1, rid="d2", name=b"another")
    world.d.take(HandleRefused(handle, cause()))
    world.pump()
    assert world.holder(1).state is H.BOUND
    assert world.d.sent(Release) == []


# --- decode ----------------------------------------------------------------------------------------------------------


def test_who_leaves_before_a_session_is_up_is_released_when_it_is() -> None:
    world = FacingParams()
    world.hold(1)
    world.second(1)
    world.leave(world.d, "d1")
    assert world.d.failed("d1").code == "client_left"
    assert world.d.free == 16
    world.pump()
    assert world.holder(1).state is H.RELEASED
    assert world.idle()


def test_a_release_that_is_owed_to_an_unreachable_prefill_is_given_up_and_the_lease_ends_it() -> None:
    world = FacingParams()
    world.hold(1)
    world.reachable = False
    world.second(1, name=b"another")
    world.wait(11.0)
    assert world.decode.pull._owed == {}
    world.wait(20.0)
    assert world.holder(1).state is H.REVOKED
    assert world.idle()


def test_a_release_that_is_owed_goes_with_the_next_session_whoever_wanted_it() -> None:
    world = FacingParams()
    world.hold(1)
    world.hold(2)
    world.reachable = False
    world.second(1, name=b"another")
    world.reachable = True
    world.wait(1.0)
    assert world.holder(1).state is H.HELD
    world.read(2)
    assert world.holder(1).state is H.RELEASED


def test_who_leaves_while_it_waits_for_pages_is_released_at_once() -> None:
    world = FacingParams(d_limits=limits(pages=4))
    world.whole(1)
    world.hold(2)
    world.read(2)
    assert world.states(2) == (H.HELD, L.PARKED)
    world.leave(world.d, "d2")
    world.pump()
    assert world.holder(2).state is H.RELEASED
    assert world.status(2) is None
    world.let_go(1)
    assert [run.rid for run in world.d.all(RunWhole)] == ["d1"]
    assert world.idle()


def test_who_leaves_while_it_reads_is_answered_now_and_its_pages_go_when_its_fence_closes() -> None:
    world = FacingParams(auto_fence=False)
    world.hold(1)
    world.read(1)
    world.leave(world.d, "d1")
    assert world.d.failed("d1").code == "client_left"
    assert (world.status(1), world.states(1)[1]) == (RequestStatus.FINISHED_ABORTED, L.DRAINING)
    assert world.decode.ledger.counts[Page.DRAINING] == 3
    assert len(world.d.all(RevokeGrant)) == 1
    assert world.d.sent(Release) == []
    world.close_fences(1)
    assert world.d.free == 16
    world.pump()
    assert world.holder(1).state is H.RELEASED
    assert world.idle()


def test_pages_that_land_after_the_fence_was_asked_for_are_late_and_nobodys() -> None:
    world = FacingParams(auto_fence=False)
    world.hold(1)
    world.read(1)
    world.leave(world.d, "d1")
    world.land_pages(1, 3)
    assert world.d.sent(Confirm) == []
    assert "landed" in world.d.counted("late")
    world.close_fences(1)
    assert world.d.free == 16


def test_who_leaves_before_the_read_could_be_asked_for_is_released_all_the_same() -> None:
    world = FacingParams(d_limits=limits(pages=4))
    world.whole(1)
    world.hold(2)
    world.read(2)
    world.cut()
    world.let_go(1)  # its pages are the second one's, whose prefill is not there just now
    assert world.states(2) == (H.HELD, L.READING)
    world.leave(world.d, "d2")
    world.wait(1.0)
    assert world.holder(2).state is H.RELEASED
    assert [read.hold for read in world.d.sent(Read)] == [1]
    assert world.idle()


@pytest.mark.parametrize("ended", [False, True])
def test_who_leaves_before_the_confirmation_is_answered_once(ended: bool) -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.land_all()
    if ended:
        world.let_go(1)
    world.leave(world.d, "d1")
    assert world.d.failed("d1").code == "client_left"
    if not ended:
        assert [abort.rid for abort in world.d.all(AbortEngine)] == ["d1"]
        world.let_go(1)
    assert world.status(1) is None
    world.pump()
    assert world.holder(1).state is H.RELEASED
    assert not world.may_leave(1)
    assert world.idle()


def test_who_leaves_while_it_runs_is_given_back_by_the_engine() -> None:
    world = FacingParams()
    world.whole(1)
    world.leave(world.d, "d1")
    assert world.d.free == 13
    world.leave(world.d, "d1")
    assert world.d.counted("late") == ["cancel"]
    world.let_go(1)
    assert [type(answer) for answer in answers(world.d, "d1")] == [AnswerFailed]
    assert world.idle()


def test_who_leaves_in_the_very_moment_in_which_the_read_is_whole_has_one_verdict() -> None:
    """I04: every order of the two ends in one verdict, and one free."""
    for first in ("leave", "land"):
        world = FacingParams(auto_fence=False)
        world.hold(1)
        world.read(1)
        if first == "leave":
            world.leave(world.d, "d1")
            world.land_pages(1, 3)
            world.close_fences(1)
        else:
            world.land_pages(1, 3)
            world.leave(world.d, "d1")
            world.let_go(1)
        world.pump()
        assert world.d.failed("d1").code == "client_left"
        assert world.holder(1).state is H.RELEASED
        assert world.idle()


def test_an_end_said_again_is_late() -> None:
    world = FacingParams()
    world.whole(1)
    world.let_go(1)
    world.let_go(1)
    world.leave(world.d, "d1")
    assert world.d.counted("late") == ["released", "cancel"]


# --- prefill ---------------------------------------------------------------------------------------------------------


def test_who_leaves_prefill_before_it_is_computed_takes_nothing_along() -> None:
    world = FacingParams(p_limits=limits(max_running=1))
    world.ask(1)
    world.ask(2)
    world.leave(world.p, "p2")
    assert world.p.failed("p2").code == "client_left"
    world.leave(world.p, "p1")
    assert world.p.failed("p1").code == "client_left"
    assert world.prefill.ledger.counts[Page.DRAINING] == 3
    world.p.take(Released(rid=Rid("p1")))
    assert [run.rid for run in world.p.all(RunPrefill)] == ["p1"]
    assert world.idle()


def test_a_prompt_that_was_aborted_is_not_held_though_it_was_sampled() -> None:
    world = FacingParams()
    rid = world.ask(1)
    world.leave(world.p, "p1")
    world.p.take(Sampled(rid=rid, token=7))
    world.leave(world.p, "p1")
    world.p.take(Released(rid=rid))
    assert [type(answer) for answer in answers(world.p, "p1")] == [AnswerFailed]
    assert world.p.counted("late") == ["sampled", "cancel"]
    assert world.idle()


@pytest.mark.parametrize("sampled", [False, True])
def test_a_prompt_that_the_engine_gave_up_is_not_held(sampled: bool) -> None:
    world = FacingParams()
    rid = world.ask(1, keys="ab")
    if sampled:
        world.p.take(Sampled(rid=rid, token=7))
    world.p.take(Released(rid=rid, error="out of memory"))
    assert (world.p.failed("p1").code, world.p.failed("p1").message) == ("engine_error", "out of memory")
    assert world.prefill.ledger.counts[Page.CACHED] == 0
    world.p.take(Released(rid=rid))
    assert world.p.counted("late") == ["released"]
    assert world.idle()


def test_an_abort_call_at_prefill_ends_a_hold_that_was_answered() -> None:
    world = FacingParams()
    world.hold(1)
    world.leave(world.p, "p1")
    assert world.holder(1).state is H.REVOKED
    assert len(answers(world.p, "p1")) == 1
    world.leave(world.p, "p1")
    assert world.p.counted("late") == ["cancel"]
    world.read(1)
    assert world.d.failed("d1").code == "client_left"
    assert world.idle()


def test_nothing_was_armed_for_whoever_left_early() -> None:
    world = FacingParams()
    world.hold(1)
    world.second(1)
    world.leave(world.d, "d1")
    world.pump()
    assert world.d.all(ArmGrant) == []
