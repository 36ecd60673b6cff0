"""Sessions lost and back, peers that die, freeze and return: what fails, what waits, and for whose proof."""

from __future__ import annotations

import msgspec
import pytest

from pdplane.core.effects import Alarm, MovePages, RunDecode, Teardown
from pdplane.core.events import MoveDone, OperatorRelease, Released
from pdplane.core.frames import Abort, Announce, Drained, Grant, Hello, Received, Success
from pdplane.core.ids import GrantNo, Instance
from pdplane.core.pages import Page
from pdplane.core.rooms.table import R, S

from .facing import STAMP, Facing, limits, only

FENCE = pytest.mark.parametrize("fence", [True, False])


# --- lost and back within the grace ---------------------------------------------------------------------------------


def test_a_lost_grant_is_said_again_with_the_same_number() -> None:
    world = Facing()
    world.legs_in(5)
    world.deliver(Announce)
    world.cut()
    world.pump()
    assert world.states(5) == (R.GRANTED, S.STREAMING)
    assert {grant.grant for grant in world.d.sent(Grant)} == {1}
    world.send_all(5)
    world.pump()
    assert len(world.d.all(RunDecode)) == 1


def test_a_lost_announce_is_said_again() -> None:
    world = Facing(d_limits=limits(pages=3))
    world.meet(1)
    world.legs_in(2)
    world.cut()
    world.pump()
    assert world.p.node.rooms.get(world.legs[2].room).peer == "D1"  # type: ignore[attr-defined]


def test_a_lost_success_is_said_again_with_the_same_row() -> None:
    world = Facing()
    world.meet(5)
    world.send_all(5)
    world.cut()
    world.pump()
    first, second = world.p.sent(Success)
    assert first == second
    assert world.states(5) == (R.GONE, S.GONE)
    assert len(world.d.all(RunDecode)) == 1


@FENCE
def test_a_lost_abort_is_said_again(fence: bool) -> None:
    """With a fence the room is over at decode long before; prefill must hear of it all the same."""
    world = Facing(fence=fence)
    world.meet(5)
    world.cancel(world.d, 5)
    assert isinstance(only(world.under_way()), Abort)
    world.cut()
    world.pump()
    assert world.p.failed("r5").code == "client_left"
    world.release(5)
    world.pump()
    assert world.idle()


@FENCE
def test_an_abort_that_could_not_be_sent_follows_the_session(fence: bool) -> None:
    world = Facing(fence=fence)
    world.meet(5)
    world.cut(reachable=False)
    world.cancel(world.d, 5)
    assert world.d.sent(Abort) == []
    world.reachable = True
    world.wait(1.0)
    assert world.p.failed("r5").code == "client_left"
    world.release(5)
    world.pump()
    assert world.idle()


def test_a_room_that_both_sides_have_ended_is_not_aborted_again() -> None:
    world = Facing()
    world.meet(5)
    world.cancel(world.d, 5)
    world.pump()
    world.release(5)
    world.pump()
    world.cut()
    world.pump()
    assert len(world.d.sent(Abort)) == 1


def test_a_lost_failure_is_answered_to_the_grant_that_is_said_again() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.cancel(world.p, 5)
    world.release(5)
    world.cut()
    world.pump()
    assert world.d.failed("r5").code == "client_left"
    assert world.idle()


def test_prefill_starts_no_write_while_the_session_is_down() -> None:
    world = Facing()
    world.meet(5)
    world.cut(reachable=False)
    world.compute(5, 40)
    world.sample(5)
    world.release(5)
    assert world.p.all(MovePages) == []
    assert world.p_state(5) is S.FLUSHING
    world.reachable = True
    world.wait(1.0)
    assert sum(len(move.src) for move in world.p.all(MovePages)) == 3
    world.land_all()
    world.pump()
    assert len(world.d.all(RunDecode)) == 1


# --- gone -----------------------------------------------------------------------------------------------------------


@FENCE
def test_after_the_grace_only_that_instances_rooms_fail_on_both_sides(fence: bool) -> None:
    world = Facing(fence=fence)
    world.meet(5)
    world.cut(reachable=False)
    world.wait(1.9)
    assert world.states(5) == (R.GRANTED, S.STREAMING)
    world.wait(0.2)
    assert world.d.failed("r5").code == world.p.failed("r5").code == "peer_gone"
    assert world.d.failed("r5").retryable
    assert world.d_state(5) is (R.GONE if fence else R.DRAINING)
    assert only(world.p.all(Teardown)).peer == "D1"


def test_never_granted_rooms_owe_no_proof_when_the_peer_is_gone() -> None:
    world = Facing(fence=False, d_limits=limits(pages=3))
    world.meet(1)
    world.meet(2)
    world.cut(reachable=False)
    world.wait(3.0)
    assert world.d_state(1) is R.DRAINING
    assert world.d_state(2) is R.GONE


def test_a_grant_that_was_never_handed_to_a_socket_owes_no_proof() -> None:
    world = Facing(fence=False, d_limits=limits(pages=3))
    world.meet(1)
    world.meet(2)
    world.send_all(1)
    world.pump()
    world.cut(reachable=False)
    world.d.take(Released(rid=world.rid(1)))
    assert world.d_state(2) is R.GRANTED
    assert len(world.d.sent(Grant)) == 1
    world.wait(3.0)
    assert world.d_state(2) is R.GONE
    assert world.idle()


def test_a_frozen_peer_is_gone_within_eight_seconds() -> None:
    world = Facing()
    world.meet(5)
    world.p.hears = False
    world.wait(7.5)
    assert world.d.failed("r5").code == "peer_gone"


def test_beats_keep_a_quiet_session_up() -> None:
    world = Facing()
    world.meet(5)
    world.wait(30.0)
    assert world.d_state(5) is R.GRANTED
    assert len(world.conns) == 1


def test_a_successor_is_never_taken_for_the_one_that_was_granted() -> None:
    world = Facing(fence=False)
    world.meet(5)
    successor = world.restart_prefill()
    world.pump()
    assert world.d.failed("r5").code == "peer_gone"
    assert world.d_state(5) is R.DRAINING  # without a fence, ghost writes may still land
    assert [frame for frame in world.d.sent(Abort) if frame.dst == "P1b"] == []
    assert successor.counted("late") == []
    assert [hello.dst for hello in world.d.sent(Hello)] == ["", "P1", ""]
    world.meet(6)
    assert world.p_state(6) is S.STREAMING


def test_a_successor_of_another_layout_fails_new_rooms_with_both_values() -> None:
    world = Facing()
    world.run_to_batch(5)
    world.restart_prefill(stamp=msgspec.structs.replace(STAMP, kv_dtype="f16"))
    world.pump()
    world.meet(6)
    cause = world.d.failed("r6")
    assert cause.code == "incompatible"
    assert "f16" in cause.message
    assert "f32" in cause.message


def test_an_unreachable_prefill_fails_the_rooms_that_wait_for_it() -> None:
    world = Facing()
    world.reachable = False
    world.meet(5)
    assert world.d.failed("r5").code == "prefill_unreachable"
    world.reachable = True
    world.wait(1.0)
    world.meet(6)
    assert world.d_state(6) is R.GRANTED


def test_a_dead_decode_leaves_prefill_clean_once_step_and_writes_have_returned() -> None:
    world = Facing()
    world.meet(5)
    world.compute(5, 20)
    world.d.hears = False
    world.wait(7.5)
    assert world.p.failed("r5").code == "peer_gone"
    assert world.p_state(5) is S.DRAINING
    world.release(5)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "torn down"))
    assert world.p.free == world.p.node.limits.pages
    assert world.p.node.live == 0


# --- quarantine -----------------------------------------------------------------------------------------------------


def quarantined(world: Facing) -> None:
    world.meet(5)
    world.p.hears = False
    world.wait(40.0)
    assert world.d_state(5) is R.QUARANTINE
    assert world.decode.ledger.counts[Page.QUARANTINED] == 3


def test_without_a_proof_pages_go_to_quarantine_and_the_holder_is_named() -> None:
    world = Facing(fence=False)
    quarantined(world)
    assert "P1/dp0cp0tp0pp0" in only(world.d.all(Alarm)).text
    assert len(world.d.answers("r5")) == 1
    world.wait(100.0)
    assert world.decode.ledger.counts[Page.QUARANTINED] == 3


def test_a_frozen_peer_that_comes_back_and_drains_frees_them() -> None:
    world = Facing(fence=False)
    quarantined(world)
    world.p.hears = True
    world.wait(10.0)
    assert world.p_state(5) is S.DRAINING
    assert world.d_state(5) is R.QUARANTINE
    world.release(5)
    world.pump()
    assert world.d.sent(Abort) != []
    assert world.p.sent(Drained) != []
    assert "the proof came, 3 quarantined pages are free again" in world.d.last(Alarm).text
    assert world.idle()


def test_its_old_grant_does_not_revive() -> None:
    world = Facing(fence=False)
    quarantined(world)
    world.p.hears = True
    world.wait(10.0)
    world.sample(5)
    world.release(5)
    world.pump()
    assert world.p.all(MovePages) == []
    assert world.d.all(RunDecode) == []


def test_a_successor_ends_the_search_and_proves_nothing() -> None:
    world = Facing(fence=False)
    quarantined(world)
    world.restart_prefill()
    world.wait(60.0)
    assert world.d_state(5) is R.QUARANTINE
    assert world.d.sent(Hello)[-1].dst == ""
    hellos = len(world.d.sent(Hello))
    world.wait(60.0)
    assert len(world.d.sent(Hello)) == hellos


def test_an_operator_frees_them_and_it_is_logged_as_unproven() -> None:
    world = Facing(fence=False)
    quarantined(world)
    world.d.take(OperatorRelease(GrantNo(99)))
    assert world.d_state(5) is R.QUARANTINE
    world.d.take(OperatorRelease(world.receiver(5).grant))
    assert "unproven" in world.d.last(Alarm).text
    assert world.d.free == world.d.node.limits.pages


def test_an_operator_cannot_free_pages_that_are_not_quarantined() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.d.take(OperatorRelease(world.receiver(5).grant))
    assert world.d_state(5) is R.GRANTED
    assert world.decode.ledger.counts[Page.GRANTED] == 3


def test_a_write_that_never_returns_is_quarantined_at_both_ends_once() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.sample(5)
    world.release(5)
    world.cancel(world.d, 5)
    world.wait(200.0)
    assert world.states(5) == (R.QUARANTINE, S.DRAINING)
    assert world.p.sent(Drained) == []
    assert world.prefill.ledger.counts[Page.QUARANTINED] == 3
    assert len(world.p.all(Alarm)) == 1
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "at last"))
    world.pump()
    assert world.idle()


# --- the word that ends a row ---------------------------------------------------------------------------------------


def test_a_row_is_kept_for_its_time_and_no_longer() -> None:
    world = Facing()
    world.meet(5)
    world.send_all(5)
    world.deliver(Success)
    assert len(world.d.sent(Received)) == 1
    world.mail.clear()  # RECEIVED is lost without the session noticing
    world.wait(29.0)
    assert world.p_state(5) is S.SENT
    world.wait(2.0)
    assert world.p_state(5) is S.GONE
    assert len(world.p.answers("r5")) == 1


def test_a_success_after_the_tombstone_is_answered_by_what_became_of_it() -> None:
    world = Facing(fence=True)
    world.meet(5)
    world.send_all(5)
    world.d.node.rooms.bury(world.legs[5].room, None, None, GrantNo(1), world.now)  # type: ignore[attr-defined]
    world.deliver(Success)
    assert [type(frame) for frame in world.under_way()] == [Received]
    assert Instance("P1") == world.d.sent(Received)[-1].dst
