"""A cancel in every phase, on both sides: who is told, what is free at once, what waits for whose proof."""

from __future__ import annotations

import msgspec
import pytest

from pdplane.core.effects import AbortEngine, AnswerFailed, CancelMoves, MovePages, RunPrefill
from pdplane.core.errors import unavailable
from pdplane.core.events import MoveDone, Released, RouteFailed, RouteKnown
from pdplane.core.frames import Abort, Drained, Failed, Grant, Received, Success
from pdplane.core.pages import Page
from pdplane.core.rooms.table import R, S

from .facing import Facing, limits, only, prompt

FENCE = pytest.mark.parametrize("fence", [True, False])


def cancelled_at_decode(world: Facing, number: int = 5) -> None:
    world.cancel(world.d, number)
    assert world.d.failed(f"r{number}").code == "client_left"
    world.pump()


# --- decode ---------------------------------------------------------------------------------------------------------


@FENCE
def test_queued_at_decode_everything_is_free_and_the_abort_is_owed(fence: bool) -> None:
    world = Facing(fence=fence)
    world.p.take(world.leg(5))
    world.route_cause = unavailable("x", "later", side="decode")
    node = world.decode
    node.members.groups.clear()
    effects = node.handle(world.legs[5], world.now)  # the look-up is not answered yet
    world.d.log += effects
    world.cancel(world.d, 5)
    assert world.d_state(5) is R.DRAINING
    assert world.d.failed("r5").code == "client_left"
    ranks = [(rank, at) for at, (_, rank) in world.listeners.items()]
    world.d.take(RouteKnown("registry", tuple(ranks)))
    world.pump()
    assert world.p_state(5) is S.GONE
    assert world.p.failed("r5").code == "client_left"
    assert world.idle()


def test_an_owed_abort_is_given_up_at_its_own_limit() -> None:
    world = Facing()
    world.decode.handle(world.leg(5), world.now)
    world.cancel(world.d, 5)
    world.wait(9.9)
    assert world.d_state(5) is R.DRAINING
    world.wait(0.2)
    assert world.d_state(5) is R.GONE
    assert world.idle()


def test_an_owed_abort_ends_where_there_is_no_route() -> None:
    world = Facing()
    world.decode.handle(world.leg(5), world.now)
    world.cancel(world.d, 5)
    world.d.take(RouteFailed("registry", unavailable("no_route", "404", side="decode")))
    assert world.d_state(5) is R.GONE
    assert len(world.d.answers("r5")) == 1


@FENCE
def test_waiting_for_pages_at_decode_nothing_is_owed_but_the_word(fence: bool) -> None:
    world = Facing(fence=fence, d_limits=limits(pages=3))
    world.meet(1)
    world.meet(2)
    assert world.d_state(2) is R.ALLOCATING
    cancelled_at_decode(world, 2)
    assert world.states(2) == (R.GONE, S.GONE)
    assert world.p.failed("r2").code == "client_left"
    assert world.d_state(1) is R.GRANTED


def test_granted_with_a_fence_pages_are_free_before_prefill_has_heard() -> None:
    world = Facing(fence=True)
    world.meet(5)
    world.cancel(world.d, 5)
    assert world.d_state(5) is R.GONE
    assert world.d.free == world.d.node.limits.pages
    assert isinstance(only(world.under_way()), Abort)
    world.pump()
    assert world.p_state(5) is S.DRAINING
    assert [effect.rid for effect in world.p.all(AbortEngine)] == ["r5"]
    world.release(5)
    world.pump()
    assert world.idle()


def test_with_a_landing_under_way_the_fence_takes_its_time() -> None:
    world = Facing(fence=True, auto_fence=False)
    world.meet(5)
    world.cancel(world.d, 5)
    assert world.d_state(5) is R.DRAINING
    assert world.decode.ledger.counts[Page.DRAINING] == 3
    world.quiet(5)
    assert world.d_state(5) is R.GONE


def test_with_a_fence_prefills_word_frees_nothing_while_a_landing_is_under_way() -> None:
    """Bytes that prefill wrote before its connection failed may still be on their way when it says DRAINED."""
    world = Facing(fence=True, auto_fence=False)
    world.meet(5)
    world.cancel(world.d, 5)
    world.pump()
    world.release(5)
    world.pump()
    assert world.states(5) == (R.DRAINING, S.GONE)
    assert world.decode.ledger.counts[Page.DRAINING] == 3
    world.quiet(5)
    assert world.idle()


def test_granted_without_a_fence_pages_wait_for_drained() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.sample(5)
    cancelled_at_decode(world)
    assert world.states(5) == (R.DRAINING, S.DRAINING)
    world.release(5)
    world.pump()
    assert world.d_state(5) is R.DRAINING  # one write is still outstanding
    world.land_all()
    world.pump()
    assert world.states(5) == (R.GONE, S.GONE)
    assert world.idle()


def test_success_that_crosses_the_abort_is_the_proof() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.send_all(5)
    world.cancel(world.d, 5)
    world.deliver(Success)
    assert world.d_state(5) is R.GONE
    assert world.d.free == world.d.node.limits.pages
    world.pump()
    assert world.idle()
    assert len(world.d.answers("r5")) == 1


@FENCE
def test_a_cancel_while_filled_and_queued_for_the_batch_frees_at_once(fence: bool) -> None:
    world = Facing(fence=fence, d_limits=limits(max_running=1))
    world.run_to_batch(1)
    world.run_to_batch(2)
    assert world.d_state(2) is R.SUCCESS
    cancelled_at_decode(world, 2)
    assert world.d_state(2) is R.GONE
    assert world.decode.ledger.counts[Page.ACTIVE] == 3
    assert world.d.free == world.d.node.limits.pages - 3
    assert len(world.decode.reserve) == 1


def test_running_pages_are_free_when_the_engine_lets_go() -> None:
    world = Facing()
    world.run_to_batch(5)
    cancelled_at_decode(world)
    assert [effect.rid for effect in world.d.all(AbortEngine)] == ["r5"]
    assert world.decode.ledger.counts[Page.ACTIVE] == 3
    world.cancel(world.d, 5)
    world.d.take(Released(rid=world.rid(5), error="late fault"))
    assert len(world.d.answers("r5")) == 1
    assert world.idle()


@FENCE
def test_two_ranks_are_both_told_and_pages_wait_for_both(fence: bool) -> None:
    world = Facing(fence=fence, tp=(2, 1))
    world.meet(5)
    cancelled_at_decode(world)
    assert len(world.d.sent(Abort)) == 2
    assert world.d_state(5) is (R.GONE if fence else R.DRAINING)
    world.release(5)
    assert len(world.p.sent(Drained)) == 2
    world.pump()
    assert world.idle()


def test_a_rank_that_has_sent_is_told_that_its_row_is_not_wanted() -> None:
    world = Facing(tp=(2, 1))
    world.meet(5)
    world.send_all(5)
    world.deliver(Success)
    world.cancel(world.d, 5)
    assert len(world.d.sent(Received)) == len(world.d.sent(Abort)) == 1
    world.pump()
    assert world.p.node.live == 0  # not kept until its clock runs out
    assert world.idle()


# --- prefill --------------------------------------------------------------------------------------------------------


def test_waiting_at_prefill_decode_is_told_and_everything_is_free() -> None:
    world = Facing(d_limits=limits(pages=3))
    world.meet(1)
    world.meet(2)
    world.cancel(world.p, 2)
    world.pump()
    assert world.states(2) == (R.GONE, S.GONE)
    assert world.d.failed("r2").code == "client_left"


def test_waiting_at_prefill_before_decode_spoke_the_tombstone_answers_it() -> None:
    world = Facing()
    world.p.take(world.leg(5))
    world.cancel(world.p, 5)
    assert world.p_state(5) is S.GONE
    world.d.take(world.legs[5])
    world.pump()
    assert world.d.failed("r5").code == "client_left"
    assert world.idle()


@FENCE
def test_armed_at_prefill_failed_and_drained_go_together(fence: bool) -> None:
    world = Facing(fence=fence, p_limits=limits(max_running=1))
    world.meet(1)
    world.meet(2)
    world.cancel(world.p, 2)
    assert [type(frame) for frame in world.under_way()] == [Failed, Drained]
    world.pump()
    assert world.states(2) == (R.GONE, S.GONE)
    assert world.p.all(RunPrefill)[-1].rid == "r1"


@FENCE
def test_computing_at_prefill_decode_is_told_at_once_and_pages_wait_for_step_and_writes(fence: bool) -> None:
    world = Facing(fence=fence)
    world.meet(5)
    world.compute(5, 20)
    world.cancel(world.p, 5)
    assert isinstance(only(world.under_way()), Failed)
    assert [effect.rid for effect in world.p.all(AbortEngine)] == ["r5"]
    assert len(world.p.all(CancelMoves)) == 1
    world.pump()
    assert world.d.failed("r5").code == "client_left"
    assert world.d_state(5) is (R.GONE if fence else R.DRAINING)
    move = only(world.p.all(MovePages))
    world.p.take(MoveDone(move.move, "cancelled"))
    assert world.p_state(5) is S.DRAINING
    assert world.decode.ledger.counts[Page.DRAINING] == (0 if fence else 3)
    world.release(5)
    world.pump()
    assert world.states(5) == (R.GONE, S.GONE)
    assert world.idle()


def test_a_cancel_after_sent_changes_nothing() -> None:
    world = Facing()
    world.meet(5)
    world.send_all(5)
    world.cancel(world.p, 5)
    assert world.p_state(5) is S.SENT
    world.pump()
    assert world.d.counted("late") == []
    assert world.d_state(5) is R.GONE
    assert not any(isinstance(answer, AnswerFailed) for answer in world.p.answers("r5"))


def test_cancelled_before_the_leg_arrives_the_leg_gets_the_verdict() -> None:
    world = Facing(fence=False)
    world.d.take(world.leg(5))
    world.pump()
    assert world.p_state(5) is S.ORPHAN
    cancelled_at_decode(world)
    assert world.d_state(5) is R.GONE  # DRAINED came at once
    world.p.take(world.legs[5])
    assert world.p.failed("r5").code == "client_left"
    assert world.p.all(RunPrefill) == []


def test_drained_names_the_grant_that_the_abort_named() -> None:
    world = Facing(fence=False)
    world.d.take(world.leg(5))
    world.pump()
    world.p.node.rooms.live.clear()  # type: ignore[attr-defined]
    cancelled_at_decode(world)
    assert world.p.sent(Drained)[-1].grant == world.d.sent(Grant)[-1].grant
    assert world.idle()


def test_late_bytes_of_a_cancelled_grant_are_counted_and_ignored() -> None:
    world = Facing(fence=False)
    world.meet(5)
    receiver = world.receiver(5)
    pages = receiver.pages
    cancelled_at_decode(world)
    world.landed(5, pages)
    assert world.d.counted("late")[-1] == "landed"
    assert world.d_state(5) is R.DRAINING


@FENCE
def test_both_sides_cancel_at_once_and_each_answers_once(fence: bool) -> None:
    world = Facing(fence=fence)
    world.meet(5)
    world.cancel(world.d, 5)
    world.cancel(world.p, 5)
    world.pump()
    world.release(5)
    world.pump()
    assert len(world.d.answers("r5")) == len(world.p.answers("r5")) == 1
    assert world.idle()


def test_a_mismatched_row_fails_the_room_and_frees_prefills_row() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.sender(5).leg = msgspec.structs.replace(world.legs[5], prompt=prompt(40, b"other"))
    world.send_all(5)
    world.pump()
    cause = world.d.failed("r5")
    assert cause.code == "prompt_mismatch"
    assert b"other".hex() in cause.message
    assert world.legs[5].prompt.digest.hex() in cause.message
    assert len(world.d.sent(Received)) == 1
    assert world.idle()


def test_a_mismatched_row_for_a_room_already_cancelled_is_a_proof_all_the_same() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.sender(5).leg = msgspec.structs.replace(world.legs[5], prompt=prompt(40, b"other"))
    world.send_all(5)
    world.cancel(world.d, 5)
    world.deliver(Success)
    assert world.d_state(5) is R.GONE
    assert world.d.failed("r5").code == "client_left"


def test_an_engine_fault_at_prefill_crosses_to_decode() -> None:
    world = Facing()
    world.meet(5)
    world.release(5, error="NaN in the logits")
    world.pump()
    assert world.d.failed("r5").code == "engine_error"
    assert "NaN" in world.p.failed("r5").message
    assert world.idle()


def test_an_engine_fault_at_decode_is_answered_once() -> None:
    world = Facing()
    world.run_to_batch(5)
    world.d.take(Released(rid=world.rid(5), error="out of memory"))
    assert world.d.failed("r5").code == "engine_error"
    assert world.idle()


def test_a_failed_write_fails_the_room_on_both_sides() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.sample(5)
    world.release(5)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "broken pipe"))
    world.pump()
    assert world.d.failed("r5").code == "transfer_failed"
    assert world.idle()
