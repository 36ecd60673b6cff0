"""Leases: renewed a sixth at a time, answered, and worth nothing once they are over."""

from __future__ import annotations

import msgspec
import pytest

from pdplane.core.effects import Note, RunWhole
from pdplane.core.events import ConnLost, FrameIn
from pdplane.core.frames import Confirm, Confirmed, Read, Renew, Renewed
from pdplane.core.ids import ConnId, HoldNo, Instance, Rank
from pdplane.core.params.leases import SHORTEST_S
from pdplane.core.params.table import H, L, RequestStatus

from .facing import Box, limits, only
from .facing_params import FacingParams

LEASE_S = 3.0
SHORT = limits(hold_term_s=LEASE_S)


def renewals(box: Box) -> list[tuple[HoldNo, ...]]:
    return [frame.holds for frame in box.sent(Renew)]


def expired_under_its_reader() -> FacingParams:
    """The pages are under way, and no renewal has come through for a whole lease."""
    world = FacingParams(p_limits=SHORT)
    world.hold(1)
    world.read(1)
    world.wait(LEASE_S, pump=False)
    assert world.holder(1).state is H.REVOKED
    assert world.p.free == 16
    return world


def test_a_lease_is_renewed_every_sixth_of_it() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.d.log.clear()
    world.wait(4.9)
    assert renewals(world.d) == []
    world.wait(15.2)
    assert renewals(world.d) == [(1,)] * 4
    assert world.holder(1).state is H.BOUND


def test_a_lease_that_is_renewed_lasts_however_long_the_read_takes() -> None:
    world = FacingParams(d_limits=limits(progress_limit_s=1000.0))
    world.hold(1)
    world.read(1, deadline=1000.0)
    world.wait(200.0)
    world.land_all()
    world.pump()
    assert world.may_leave(1)


def test_what_waits_for_pages_is_renewed_before_it_is_read() -> None:
    world = FacingParams(d_limits=limits(pages=3, queue_limit_s=1000.0))
    world.whole(1)
    world.hold(2)
    world.read(2)
    world.wait(100.0)
    assert world.states(2) == (H.HELD, L.PARKED)
    world.let_go(1)
    world.land_all()
    world.pump()
    world.land_all()
    world.pump()
    assert world.may_leave(2)


def test_all_that_is_wanted_of_one_prefill_goes_in_one_frame() -> None:
    world = FacingParams()
    for number in (1, 2, 3):
        world.hold(number)
        world.read(number)
    world.d.log.clear()
    world.wait(5.0)
    assert renewals(world.d) == [(1, 2, 3)]
    assert world.p.sent(Renewed)[-1].holds == (1, 2, 3)


def test_a_question_is_not_asked_twice_before_it_is_answered() -> None:
    world = FacingParams(p_limits=SHORT)
    world.hold(1)
    world.read(1)
    world.d.log.clear()
    world.wait(2.4, pump=False)
    assert renewals(world.d) == [(1,)]
    world.pump()
    world.wait(0.5)
    assert renewals(world.d) == [(1,), (1,)]


def test_a_lost_session_takes_the_question_along_and_the_next_one_asks_anew() -> None:
    world = FacingParams(p_limits=SHORT)
    world.hold(1)
    world.read(1)
    world.wait(0.5, pump=False)
    world.d.log.clear()
    world.cut()
    world.wait(0.1)
    assert renewals(world.d) == [(1,)]
    assert world.holder(1).state is H.BOUND


def test_a_second_session_with_the_same_prefill_asks_nothing_while_the_first_one_is_being_answered() -> None:
    """Two links: what comes up beside the one that was asked changes nothing, and a hold that was kept in between is
    not taken for lost because the answer does not know it."""
    world = FacingParams(tp=(2, 1), p_limits=SHORT)
    world.hold(1)
    world.read(1)
    world.hold(2)
    world.d.log.clear()
    world.wait(0.5, pump=False)
    question = only(item for item in world.mail if isinstance(item[2], Renew))
    world.mail.clear()  # all but the question: it is slow
    world.second(2)
    lose(world, next(conn for conn in world.conns if conn != question[0]))
    world.pump()
    assert renewals(world.d) == [(1,)]
    world.mail.append(question)
    world.pump()
    assert world.states(2)[1] is L.READING
    assert world.states(1)[1] is L.READING


def test_an_answer_on_another_session_than_was_asked_is_late() -> None:
    world = FacingParams(tp=(2, 1))
    world.hold(1)
    world.read(1)
    other = max(world.conns)
    assert world.decode.pull.members.links_up()
    world.d.take(FrameIn(other, renewed(rank=Rank(tp=1))))
    assert world.states(1)[1] is L.READING
    assert "renewed" in world.d.counted("late")


def test_a_renewal_goes_on_while_the_read_of_an_aborted_request_drains() -> None:
    world = FacingParams(auto_fence=False)
    world.hold(1)
    world.read(1)
    world.leave(world.d, "d1")
    world.d.log.clear()
    world.wait(25.0)
    assert world.status(1) is RequestStatus.FINISHED_ABORTED
    assert renewals(world.d) == [(1,)] * 5
    assert world.holder(1).state is H.BOUND
    world.close_fences(1)
    world.pump()
    assert world.holder(1).state is H.RELEASED
    assert world.idle()


def test_renewals_end_with_the_load() -> None:
    world = FacingParams()
    world.whole(1)
    world.d.log.clear()
    world.wait(60.0)
    assert renewals(world.d) == []


def test_a_renewal_revives_nothing() -> None:
    world = FacingParams(p_limits=SHORT)
    world.hold(1)
    world.hold(2, 16)
    world.read(2)
    world.wait(2.9, pump=False)
    world.second(1)
    world.wait(0.1, pump=False)  # the lease ends, the question is under way
    world.pump()
    assert world.holder(1).state is H.REVOKED
    assert world.d.failed("d1").code == "expired"
    assert (world.d.failed("d1").status, world.d.failed("d1").retryable) == (409, True)


def test_whoever_is_lost_hears_what_became_of_the_hold() -> None:
    world = FacingParams()
    other = world.add_decode("D2")
    world.whole(1)
    world.read(1, box=other, rid="e1")
    assert other.failed("e1").code == "spent"


def test_another_decode_cannot_renew_a_bound_hold() -> None:
    world = FacingParams(p_limits=SHORT)
    other = world.add_decode("D2")
    world.hold(1)
    world.hold(2, 16)
    world.read(1)
    world.read(2, box=other, rid="e2")
    (conn,) = [conn for conn, ends in world.conns.items() if ends == (other, world.p)]
    world.wait(2.0)
    world.p.take(FrameIn(conn, Renew(src=Instance("D2"), dst=Instance("P1"), rank=Rank(), holds=(HoldNo(1),))))
    assert world.p.sent(Renewed)[-1].holds == ()
    assert world.p.sent(Renewed)[-1].why[HoldNo(1)].code == "spent"  # type: ignore[index]


# --- expiry ----------------------------------------------------------------------------------------------------------


def test_prefill_frees_at_the_leases_end_and_the_reader_commits_nothing() -> None:
    """I23: the pages may be another prompt's by the time that they are read."""
    world = expired_under_its_reader()
    world.land_all()
    world.ask(2)  # takes the very pages
    assert world.status(1) is RequestStatus.RUNNING
    world.pump()
    assert only(world.p.sent(Confirmed)).refusal is not None
    assert world.d.failed("d1").code == "expired"
    assert not world.may_leave(1)
    assert only(world.d.all(RunWhole)).gated


def test_a_reader_whose_pages_have_not_all_come_hears_it_by_the_renewal() -> None:
    world = expired_under_its_reader()
    world.pump()
    assert world.d.failed("d1").code == "expired"
    assert world.d.sent(Confirm) == []
    assert world.idle()


@pytest.mark.parametrize("recompute", [False, True])
def test_what_was_lost_while_it_waited_for_pages_was_never_read(recompute: bool) -> None:
    world = FacingParams(p_limits=SHORT, d_limits=limits(pages=4), recompute=recompute)
    world.whole(1, 50)
    world.hold(2)
    world.read(2)
    world.wait(LEASE_S + 0.1, pump=False)
    world.pump()
    world.let_go(1)
    assert len(world.d.sent(Read)) == 1
    if recompute:
        assert (world.run_of(2).computed, world.run_of(2).gated) == (0, False)
    else:
        assert world.d.failed("d2").code == "expired"


def test_an_expired_hold_never_hides_behind_a_renewed_one() -> None:
    """I24: of many holds with the same term the first is renewed, again and again; the others end when they are due."""
    world = FacingParams()
    for number in range(1, 6):
        world.hold(number, 16)
    world.read(1)
    world.wait(29.9)
    assert [each["hold"] for each in world.prefill.holds_told()] == [1, 2, 3, 4, 5]
    world.wait(0.2)
    assert [each["hold"] for each in world.prefill.holds_told()] == [1]


def test_a_hold_that_ends_says_who_was_reading() -> None:
    world = expired_under_its_reader()
    ended = [note for note in world.p.all(Note) if note.state == H.REVOKED]
    assert "while D1 read" in only(ended).detail


@pytest.mark.parametrize("lease_s", [0.0, 0.06, 6.0])
def test_however_short_a_lease_is_it_is_renewed_at_bounded_intervals(lease_s: float) -> None:
    world = FacingParams(p_limits=limits(hold_term_s=max(lease_s, 1.0)))
    handle = world.hold(1)
    world.read(1, msgspec.structs.replace(handle, lease_s=lease_s))
    world.d.log.clear()
    world.wait(1.0)
    assert len(renewals(world.d)) <= 1.0 / max(SHORTEST_S, lease_s / 6) + 1


def lose(world: FacingParams, conn: ConnId) -> None:
    """One connection breaks, at both ends; what was under way on it is lost."""
    ends = world.conns.pop(conn)
    for item in [item for item in world.mail if item[0] == conn]:
        world.mail.remove(item)
    for box in ends:
        box.take(ConnLost(conn))


def renewed(rank: Rank) -> Renewed:
    return Renewed(src=Instance("P1"), dst=Instance("D1"), rank=rank, holds=(), lease_s=30.0)


def test_a_read_is_as_good_as_a_renewal() -> None:
    """Whoever comes just before the lease's end has all of it for his read."""
    world = FacingParams(p_limits=limits(hold_term_s=3.0))
    world.hold(1)
    world.wait(2.9)
    world.read(1)
    world.wait(2.9, pump=False)
    assert world.holder(1).state is H.BOUND
    world.wait(0.2, pump=False)
    assert world.holder(1).state is H.REVOKED


def test_what_still_waits_for_a_session_is_renewed_when_its_prefill_was_gone_for_a_while() -> None:
    """One link of two is up and is lost for longer than the grace, and dials are out to both."""
    world = FacingParams(tp=(2, 1))
    world.hold(1)
    world.silent.add(world.port(1))
    world.read(1)
    world.silent.add(world.port(0))
    world.cut()
    world.wait(3.0)
    assert world.d.counted("peer_gone") == [""]
    world.silent.clear()
    for tp in (0, 1):
        world._dial(world.d, world.port(tp), Rank())
    world.pump()
    assert world.states(1)[1] is L.READING
    world.d.log.clear()
    world.wait(10.0)
    assert renewals(world.d) == [(1,), (1,)]
