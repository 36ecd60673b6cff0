"""Sessions that break, processes that die: in each state, on either side; and the same again where they come back."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pdplane.core.effects import AnswerFailed, Dial, MovePages, RunWhole, Teardown, Ungate
from pdplane.core.errors import Cause
from pdplane.core.events import DialFailed, TornDown
from pdplane.core.frames import Confirm, Confirmed, Read, ReadFailed, Release
from pdplane.core.ids import GrantNo, HoldNo, Instance, Rank
from pdplane.core.pages import Page
from pdplane.core.params.missed import MOST, Missed
from pdplane.core.params.pull_connector import MAX_KNOWN
from pdplane.core.params.table import H, L, RequestStatus

from .facing import limits, only
from .facing_params import FacingParams


def parked(world: FacingParams) -> None:
    """It waits for pages, which another one has."""
    world.whole(2, 64)
    world.read(1)


def reading(world: FacingParams) -> None:
    world.read(1)


def half_read(world: FacingParams) -> None:
    world.read(1)
    world.land_pages(1, 2)


def confirming(world: FacingParams) -> None:
    world.read(1)
    world.land_all()


def waiting_for_its_place(world: FacingParams) -> None:
    world.whole(2, 16)
    world.read(1)
    world.land_all()


def ended_unconfirmed(world: FacingParams) -> None:
    confirming(world)
    world.let_go(1)


def running(world: FacingParams) -> None:
    confirming(world)
    world.pump()


Way = Callable[[FacingParams], None]
UNCONFIRMED: list[Way] = [parked, reading, half_read, confirming, waiting_for_its_place, ended_unconfirmed]
AT = pytest.mark.parametrize("way", UNCONFIRMED)


def at(way: Way, **more: object) -> FacingParams:
    """Decode has four pages and one place."""
    world = FacingParams(d_limits=limits(pages=4, max_running=1), **more)  # type: ignore[arg-type]
    world.hold(1)
    way(world)
    return world


def finish(world: FacingParams) -> None:
    """Whatever decode still has comes to its end."""
    for _ in range(4):
        world.pump()
        world.land_all()
        world.pump()
        for rid in list(world.decode.batch.running):
            world.let_go(int(rid[1:]))


# --- the session alone -----------------------------------------------------------------------------------------------


@AT
def test_a_session_that_comes_back_in_time_costs_nothing(way: Way) -> None:
    world = at(way)
    world.cut()
    world.wait(1.0)
    finish(world)
    assert world.may_leave(1)
    assert world.holder(1).state is H.RELEASED
    assert [confirmed.refusal for confirmed in world.p.sent(Confirmed)][-1] is None
    assert world.idle()


@AT
def test_a_session_may_break_again_and_again(way: Way) -> None:
    world = at(way)
    for _ in range(5):
        world.cut(reachable=False)
        world.wait(0.7)
        world.reachable = True
        world.wait(0.9)
    finish(world)
    assert world.may_leave(1)
    assert world.idle()


def test_a_read_that_is_asked_for_again_is_moved_once() -> None:
    world = at(reading)
    world.cut()
    world.wait(1.0)
    assert len(world.d.sent(Read)) == 2
    assert len(world.p.all(MovePages)) == 1


def test_a_question_that_is_asked_again_has_the_same_answer() -> None:
    world = at(confirming)
    world.deliver(Confirm)
    world.cut()
    world.wait(1.0)
    assert len(world.p.sent(Confirmed)) == 2
    assert world.may_leave(1)


def test_a_release_that_got_lost_is_made_good_by_the_lease() -> None:
    world = at(reading)
    world.leave(world.d, "d1")
    assert len(world.d.sent(Release)) == 1
    world.cut()
    world.wait(31.0)
    assert world.holder(1).state is H.REVOKED
    assert world.idle()


# --- prefill dies ----------------------------------------------------------------------------------------------------


@AT
@pytest.mark.parametrize("recompute", [False, True])
def test_a_dead_prefill_fails_what_is_unconfirmed_or_it_is_computed_here(way: Way, recompute: bool) -> None:
    world = at(way, recompute=recompute)
    world.boxes.remove(world.p)
    world.cut(reachable=False)
    world.wait(3.0)
    if recompute:
        finish(world)
        assert (world.run_of(1).computed, world.run_of(1).gated) == (0, False)
        assert not any(answer.rid == "d1" for answer in world.d.all(AnswerFailed))
    else:
        failed = world.d.failed("d1")
        assert (failed.code, failed.status, failed.retryable) == ("peer_gone", 503, True)
        finish(world)
    assert world.idle()
    assert only(world.d.all(Teardown)).peer == "P1"


def test_a_dead_prefill_does_not_touch_what_runs_confirmed() -> None:
    world = at(running)
    world.boxes.remove(world.p)
    world.cut(reachable=False)
    world.wait(10.0)
    assert world.status(1) is RequestStatus.RUNNING
    assert world.may_leave(1)
    world.let_go(1)
    assert world.idle()


@AT
def test_a_successor_at_the_same_address_confirms_nothing(way: Way) -> None:
    world = at(way)
    world.restart_prefill("P1b")
    world.hold(7)  # the same number, of another life
    world.wait(3.0)
    assert world.d.failed("d1").code == "peer_gone"
    finish(world)
    assert world.holder(1).state is H.HELD
    world.wait(30.0)
    assert world.idle()


def test_whose_pages_come_while_its_prefill_is_gone_never_runs() -> None:
    world = at(reading, auto_fence=False)
    world.boxes.remove(world.p)
    world.cut(reachable=False)
    world.wait(3.0)
    world.land_pages(1, 3)
    world.close_fences(1)
    assert world.d.failed("d1").code == "peer_gone"
    assert world.d.all(RunWhole) == []
    world.wait(20.0)
    assert world.idle()


def test_what_a_dead_prefill_can_still_send_is_nothing_once_everything_with_it_is_cut() -> None:
    """The teardown proves what an open fence does not."""
    world = FacingParams(auto_fence=False, teardown_proves=True)
    world.hold(1)
    world.read(1)
    world.cut(reachable=False)
    world.wait(10.0)
    assert world.d.failed("d1").code == "peer_gone"
    assert world.d.free == 16
    assert world.idle()


def test_a_teardown_proves_nothing_for_what_was_granted_later() -> None:
    world = FacingParams(auto_fence=False)
    world.hold(1)
    world.read(1)
    world.leave(world.d, "d1")
    for torn in (TornDown(Instance("P1"), GrantNo(0)), TornDown(Instance("P9"), GrantNo(1))):
        world.d.take(torn)
        assert world.decode.ledger.counts[Page.DRAINING] == 3
    world.d.take(TornDown(Instance("P1"), GrantNo(1)))
    assert world.d.free == 16


def test_an_unreachable_prefill_is_said_at_once() -> None:
    world = FacingParams()
    world.hold(1)
    world.reachable = False
    world.second(1)
    failed = world.d.failed("d1")
    assert (failed.code, failed.status, failed.retryable) == ("prefill_unreachable", 503, True)
    assert "p:1" in failed.message


def test_an_unreachable_prefill_is_no_matter_where_decode_may_compute() -> None:
    world = FacingParams(recompute=True)
    world.hold(1)
    world.reachable = False
    world.second(1)
    assert (world.run_of(1).computed, world.run_of(1).gated) == (0, False)
    assert world.d.counted("recompute") == ["prefill_unreachable"]


def test_one_dead_peer_delays_nobody_elses_handshake() -> None:
    """Prefill "dead" accepts nothing and answers nothing; the dial is simply out."""
    world = FacingParams()
    handle = world.hold(1)
    world.hold(2)
    nowhere = msgspec.structs.replace(
        handle, instance=Instance("P9"), endpoints=((Rank(), world.port(host="dead")),), hold=HoldNo(9)
    )
    world.silent.add(world.port(host="dead"))
    world.second(9, nowhere)
    world.read(2)
    assert world.states(2)[1] is L.READING
    assert world.status(9) is RequestStatus.WAITING
    world.d.take(DialFailed(world.port(host="dead"), Rank(), "timed out"))
    assert world.d.failed("d9").code == "prefill_unreachable"


def test_who_comes_when_a_dial_has_just_failed_is_told_at_once_and_nobody_dials() -> None:
    world = FacingParams()
    for number in (1, 2, 3):
        world.hold(number)
    world.reachable = False
    world.second(1)
    dials = len(world.d.all(Dial))
    world.now += 0.4
    world.second(2)
    assert [world.d.failed(rid).code for rid in ("d1", "d2")] == ["prefill_unreachable"] * 2
    assert len(world.d.all(Dial)) == dials
    world.reachable = True
    world.now += 0.2
    world.read(3)
    assert world.states(3)[1] is L.READING


def test_the_longer_a_prefill_is_not_found_the_more_seldom_it_is_tried() -> None:
    missed, gone, there = Missed(), Cause("prefill_unreachable", "", 503), (Instance("P1"), "p:1")
    now, waits = 0.0, []
    for _ in range(6):
        missed.note(there, gone, now)
        missed.note(there, gone, now + 0.1)  # another one who had waited for the same dial
        at = now
        while missed.cause(there, now):
            now += 0.25
        waits.append(now - at)
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    missed.met(Instance("P1"))
    missed.note(there, gone, now)
    assert missed.cause(there, now + 0.6) is None
    for number in range(2 * MOST):
        missed.note((Instance(f"N{number}"), "p:1"), gone, now)
    assert len(missed) == MOST


def test_a_handle_with_a_wrong_address_fails_nobody_else() -> None:
    """Whoever asks decode directly may name any address for a prefill that lives."""
    world = FacingParams()
    world.hold(2)
    nowhere = world.port(host="nowhere")
    lying = msgspec.structs.replace(world.hold(1), endpoints=((Rank(), nowhere),))
    world.silent.add(nowhere)
    world.second(1, lying)
    world.d.take(DialFailed(nowhere, Rank(), "no route to host"))
    assert world.d.failed("d1").code == "prefill_unreachable"
    world.read(2)
    assert world.reader(2).state is L.READING


def test_a_successor_is_not_taken_for_the_dead_one() -> None:
    world = FacingParams()
    old = world.hold(1)
    world.restart_prefill()
    world.hold(2)
    world.reachable = False
    world.second(1, old)
    world.reachable = True
    world.read(2)
    world.wait(0.1)
    assert world.d.failed("d1").code == "prefill_unreachable"
    assert world.reader(2).state is L.READING


def test_what_was_known_of_prefills_that_nobody_finds_is_bounded() -> None:
    """Whoever asks decode directly may name hosts without end."""
    world = FacingParams()
    handle = world.hold(1)
    world.hold(2)
    world.reachable = False
    for number in range(300):
        at = ((Rank(), world.port(host=f"host{number}")),)
        world.listeners[at[0][1]] = (world.p, Rank())
        nowhere = msgspec.structs.replace(handle, instance=Instance(f"N{number}"), endpoints=at)
        world.second(9, nowhere, rid=f"d{1000 + number}")
    members = world.decode.pull.members
    assert len(members.groups) == MAX_KNOWN
    assert len(members.diallers) <= MAX_KNOWN + 1
    world.reachable = True
    world.read(2)
    world.land_all()
    world.pump()
    assert world.may_leave(2)


# --- decode dies -----------------------------------------------------------------------------------------------------


def test_what_a_dead_decode_was_reading_is_given_up_and_the_rest_waits_for_its_lease() -> None:
    world = FacingParams()
    world.hold(1)
    world.hold(2)
    world.read(1)
    world.boxes.remove(world.d)
    world.d.hears = False
    world.cut()
    world.wait(3.0)
    assert (world.holder(1).state, world.holder(2).state) == (H.REVOKED, H.HELD)
    assert world.prefill.ledger.counts[Page.HELD] == 3
    assert world.p.counted("peer_gone") == [""]
    world.wait(30.0)
    assert world.p.free == 16


def test_what_it_had_read_belongs_to_no_other_decode() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.boxes.remove(world.d)
    world.d.hears = False
    world.cut()
    world.wait(3.0)
    other = world.add_decode("D2")
    world.read(1, box=other, rid="e1")
    assert other.failed("e1").code == "peer_gone"
    assert other.failed("e1").retryable


def test_a_hold_that_nobody_had_read_is_anothers_to_read() -> None:
    world = FacingParams()
    world.hold(1)
    world.hold(2)
    world.read(1)
    world.boxes.remove(world.d)
    world.d.hears = False
    world.cut()
    world.wait(3.0)
    other = world.add_decode("D2")
    world.read(2, box=other, rid="e2")
    world.land(world.p.all(MovePages)[-1])
    world.pump()
    assert [ungate.rid for ungate in other.all(Ungate)] == ["e2"]


def test_a_decode_that_froze_and_comes_back_finds_its_read_refused() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.d.hears = False
    world.wait(8.0)
    assert world.holder(1).state is H.REVOKED
    world.d.hears = True
    world.wait(8.0)
    assert world.d.failed("d1").code == "peer_gone"
    assert world.idle()


def test_both_ends_of_a_broken_link_of_several_come_to_the_same_end() -> None:
    world = FacingParams(tp=(2, 2))
    world.hold(1)
    world.read(1)
    world.cut(reachable=False)
    world.wait(3.0)
    assert world.d.failed("d1").code == "peer_gone"
    assert world.holder(1).state is H.REVOKED
    assert world.p.sent(ReadFailed) == []
    world.wait(20.0)
    assert world.idle()
