"""A hold: whose it is, for which prompt, until when, and what whoever comes too late or for another one is told."""

from __future__ import annotations

import msgspec
import pytest

from pdplane.core.effects import AnswerHeld, CancelMoves, Dial, MovePages, SendFrame
from pdplane.core.errors import Cause
from pdplane.core.events import ConnectorOutput, FrameIn, Handle, KVOutput, MoveDone, ReleaseHold, RouteFailed
from pdplane.core.frames import Confirm, Confirmed, Frame, HoldIdentity, PromptId, Read, ReadFailed, Reject, Release
from pdplane.core.ids import GrantNo, HoldNo, Instance, Rank, Rid
from pdplane.core.params.table import HE, H

from .facing import Box, limits, only
from .facing_params import FacingParams, cause, pages


def says(world: FacingParams, frame: Frame, box: Box | None = None) -> None:
    """Decode says this to prefill, whatever its core would have said."""
    box = box or world.d
    (conn,) = [conn for conn, ends in world.conns.items() if ends == (box, world.p)]
    world.p.take(FrameIn(conn, frame))


def named(world: FacingParams, hold: int, grant: int = 1, src: str = "D1", dst: str = "") -> HoldIdentity:
    dst = dst or world.prefill.instance
    return HoldIdentity(hold=HoldNo(hold), grant=GrantNo(grant), src=Instance(src), dst=Instance(dst), rank=Rank())


def read_of(world: FacingParams, hold: int, grant: int = 1, **more: object) -> Read:
    handle = world.handles[hold]
    given = {"src_pages": handle.pages, "dst_pages": pages(0, 1, 2), "prompt": handle.prompt, "rid": handle.rid} | more
    return Read(**named(world, hold, grant), **given)  # type: ignore[arg-type]


def refusals(world: FacingParams) -> list[Cause]:
    """What prefill has refused, in order."""
    answers = [effect.frame for effect in world.p.all(SendFrame)]
    reads = [frame.cause for frame in answers if isinstance(frame, ReadFailed)]
    return reads + [frame.refusal for frame in answers if isinstance(frame, Confirmed) and frame.refusal]


def met() -> FacingParams:
    """A session is up, and hold 1 is held for a prompt of three pages, read by nobody."""
    world = FacingParams()
    world.whole(9)  # hold 1 of these is over
    world.let_go(9)
    world.hold(2)
    world.handles = {2: world.handles[2], 1: world.handles[9]}
    return world


# --- one consumer ---------------------------------------------------------------------------------------------------


def test_numbers_are_never_used_twice() -> None:
    world = FacingParams()
    holds = []
    for _ in range(3):
        holds.append(world.hold(1).hold)
        world.p.take(ReleaseHold(Rid("p1"), cause()))
        world.p.log.clear()
    assert holds == [1, 2, 3]


def test_a_second_decode_is_refused_and_the_first_is_not_touched() -> None:
    world = FacingParams()
    other = world.add_decode("D2")
    world.hold(1)
    world.read(1)
    world.read(1, box=other, rid="e1")
    refused = other.failed("e1")
    assert (refused.code, refused.status, refused.retryable) == ("spent", 409, False)
    assert "D1" in refused.message
    world.land_all()
    world.pump()
    assert world.may_leave(1)


def test_the_same_handle_is_read_once_by_one_decode_too() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.read(1, rid="d2")
    assert (world.d.failed("d2").code, world.d.failed("d2").status) == ("spent", 409)
    assert len(world.d.sent(Read)) == 1
    world.land_all()
    world.pump()
    assert world.may_leave(1)


@pytest.mark.parametrize("policy", [False, True])
def test_a_replay_after_success_is_spent_whatever_the_policy(policy: bool) -> None:
    world = FacingParams(recompute=policy)
    world.whole(1)
    world.read(1, rid="d2")
    assert (world.d.failed("d2").code, world.d.failed("d2").status) == ("spent", 409)


def test_a_replay_at_another_decode_after_success_is_spent() -> None:
    world = FacingParams()
    other = world.add_decode("D2")
    world.whole(1)
    world.read(1, box=other, rid="e1")
    assert (other.failed("e1").code, other.failed("e1").status) == ("spent", 409)


def test_a_replay_after_a_release_is_spent() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.leave(world.d, "d1")
    world.pump()
    world.read(1, rid="d2")
    assert world.d.failed("d2").code == "spent"


def test_a_hold_that_was_released_unread_is_spent_and_says_why() -> None:
    world = FacingParams()
    world.hold(1)
    world.second(1)
    world.leave(world.d, "d1")  # before a session is up
    world.pump()
    world.read(1, rid="d2")
    assert world.d.failed("d2").code == "spent"
    assert "released unread" in world.d.failed("d2").message


def test_a_read_after_the_lease_is_expired() -> None:
    world = FacingParams()
    world.hold(1)
    world.wait(30.0)
    assert world.holder(1).state is H.REVOKED
    assert world.p.free == 16
    world.read(1)
    refused = world.d.failed("d1")
    assert (refused.code, refused.status, refused.retryable) == ("expired", 409, True)


def test_a_hold_that_never_was_is_unknown() -> None:
    world = FacingParams()
    handle = world.hold(1)
    world.read(1, msgspec.structs.replace(handle, hold=HoldNo(77)))
    refused = world.d.failed("d1")
    assert (refused.code, refused.status) == ("unknown_hold", 404)
    assert world.holder(1).state is H.HELD


def test_a_hold_that_is_over_for_longer_than_anybody_may_ask_is_unknown() -> None:
    world = FacingParams(p_limits=limits(tombstone_s=20.0))
    world.hold(1)
    world.wait(30.0)
    world.hold(2)
    world.wait(50.0)  # the end of the second sweeps
    world.read(1)
    assert world.d.failed("d1").code == "unknown_hold"


# --- of which prompt, which pages ------------------------------------------------------------------------------------


def test_decode_refuses_a_handle_of_another_prompt_before_it_dials() -> None:
    world = FacingParams()
    world.hold(1)
    world.second(1, name=b"another")
    refused = world.d.failed("d1")
    assert (refused.code, refused.status, refused.param) == ("prompt_mismatch", 400, "kv_transfer_params")
    assert b"prompt".hex() in refused.message
    assert b"another".hex() in refused.message


def test_decode_refuses_a_handle_of_another_length() -> None:
    world = FacingParams()
    world.hold(1)
    world.second(1, tokens=41)
    assert world.d.failed("d1").code == "prompt_mismatch"


@pytest.mark.parametrize("count", [0, 2, 4])
def test_decode_refuses_a_handle_with_too_few_or_too_many_pages(count: int) -> None:
    world = FacingParams()
    handle = world.hold(1)
    world.second(1, msgspec.structs.replace(handle, pages=pages(*range(count))))
    refused = world.d.failed("d1")
    assert (refused.code, refused.status) == ("invalid_params", 400)
    assert refused.param == "kv_transfer_params.remote_block_ids"


def test_prefill_refuses_a_read_for_another_prompt() -> None:
    world = met()
    says(world, read_of(world, 2, prompt=PromptId(b"another", 40)))
    assert refusals(world)[-1].code == "prompt_mismatch"
    assert world.holder(2).state is H.HELD


@pytest.mark.parametrize(
    ("src", "dst"),
    [((), ()), ((0, 1), (0, 1)), ((0, 1, 2), (0, 1)), ((2, 1, 0), (0, 1, 2)), ((5, 6, 7, 8), (0, 1, 2, 3))],
)
def test_prefill_refuses_a_read_of_pages_that_are_not_its_last(src: tuple[int, ...], dst: tuple[int, ...]) -> None:
    world = met()
    assert world.handles[2].pages == pages(3, 4, 5)
    says(world, read_of(world, 2, src_pages=pages(*src), dst_pages=pages(*dst)))
    assert refusals(world)[-1].code == "invalid_params"
    assert (world.holder(2).state, world.holder(2).consumer) == (H.HELD, None)


def test_prefill_refuses_a_read_by_number_alone() -> None:
    """Numbers can be guessed; what the hold was answered to cannot."""
    world = met()
    says(world, read_of(world, 2, rid=Rid("another")))
    refused = refusals(world)[-1]
    assert (refused.code, refused.param) == ("invalid_params", "kv_transfer_params.remote_request_id")
    assert (world.holder(2).state, world.holder(2).consumer) == (H.HELD, None)


def test_wrong_block_ids_in_a_handle_end_in_a_refusal_and_the_hold_stays() -> None:
    """What the edge cannot see: as many pages as there should be, and not the right ones."""
    world = FacingParams()
    handle = world.hold(1)
    world.read(1, msgspec.structs.replace(handle, pages=pages(9, 10, 11)))
    refused = world.d.failed("d1")
    assert (refused.code, refused.status) == ("invalid_params", 400)
    assert world.p.all(MovePages) == []


def test_a_read_that_names_other_links_than_there_are_is_refused() -> None:
    world = met()
    says(world, read_of(world, 2, links=((Rank(), Rank()), (Rank(tp=1), Rank()))))
    assert refusals(world)[-1].code == "bad_grant"


def test_an_unfit_read_of_a_bound_hold_is_refused_and_its_consumer_goes_on() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    reader = world.reader(1)
    says(world, read_of(world, 1, reader.grant, src_pages=pages(0, 1), dst_pages=pages(0, 1)))
    assert refusals(world)[-1].code == "invalid_params"
    assert world.holder(1).state is H.BOUND


# --- who may say what ------------------------------------------------------------------------------------------------


def test_a_confirm_by_another_consumer_is_denied_in_every_state() -> None:
    world = FacingParams()
    other = world.add_decode("D2")
    world.whole(1)
    world.hold(2)
    world.hold(3)
    world.read(3, box=other, rid="e3")
    for hold, code in ((1, "spent"), (2, "not_read"), (3, "spent")):
        says(world, Confirm(**named(world, hold, grant=42)))
        assert refusals(world)[-1].code == code, hold
        assert refusals(world)[-1].status == 409
    world.wait(31.0, pump=False)
    world.hold(4)
    assert world.holder(2).state is H.REVOKED


def test_a_confirm_of_a_hold_whose_lease_is_over_is_refused_to_its_consumer() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    grant = world.reader(1).grant
    world.holder(1).apply(HE.LEASE_END, cause=cause("expired"))
    for by in (grant, 42):
        says(world, Confirm(**named(world, 1, by)))
        assert refusals(world)[-1].code == "expired"


def test_a_confirmation_that_got_lost_is_said_again() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.land_all()
    says(world, Confirm(**named(world, 1, world.reader(1).grant)))
    assert world.holder(1).state is H.RELEASED
    world.cut()
    world.wait(1.0)
    assert world.may_leave(1)
    assert [frame.refusal for frame in world.p.sent(Confirmed)][-1] is None


def test_a_release_by_another_than_the_consumer_is_late() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    says(world, Release(**named(world, 1, grant=42), cause=cause()))
    assert world.holder(1).state is H.BOUND
    assert "release" in world.p.counted("late")


def test_a_release_by_whoever_never_read_ends_what_nobody_reads() -> None:
    world = met()
    says(world, Release(**named(world, 2, grant=0), cause=cause(), rid=Rid("p2")))
    assert world.holder(2).state is H.RELEASED
    says(world, Release(**named(world, 2, grant=0), cause=cause(), rid=Rid("p2")))
    assert world.holder(2).state is H.RELEASED


@pytest.mark.parametrize("rid", ["", "p1", "p", "p22"])
def test_a_release_by_number_alone_ends_nothing_that_nobody_has_read(rid: str) -> None:
    world = met()
    says(world, Release(**named(world, 2, grant=0), cause=cause(), rid=Rid(rid)))
    assert world.holder(2).state is H.HELD
    assert "release" in world.p.counted("late")


def forged(world: FacingParams) -> Handle:
    """Of somebody else's hold, by its number, and of a prompt of the forger's own."""
    return msgspec.structs.replace(world.handles[2], rid=Rid("mine"), prompt=PromptId(b"mine", 40))


def test_a_forged_handle_that_is_refused_at_the_door_lets_go_of_nobody_elses_hold() -> None:
    world = met()
    world.read(3, forged(world), name=b"another")
    assert world.d.failed("d3").code == "prompt_mismatch"
    assert world.holder(2).state is H.HELD
    world.read(2)
    assert world.holder(2).state is H.BOUND


def test_a_forger_who_leaves_while_it_reads_lets_go_of_nobody_elses_hold() -> None:
    world = met()
    world.second(3, forged(world))
    world.leave(world.d, "d3")
    world.pump()
    assert world.holder(2).state is H.HELD
    assert "release" in world.p.counted("late")


def test_unknown_holds_are_counted_and_whoever_asks_is_told() -> None:
    world = met()
    says(world, Confirm(**named(world, 77)))
    says(world, Release(**named(world, 77), cause=cause()))
    says(world, Read(**named(world, 77), src_pages=pages(0), dst_pages=pages(0), prompt=PromptId(b"", 1)))
    assert world.p.counted("late").count("unknown_hold") == 3
    assert [refused.code for refused in refusals(world)] == ["unknown_hold", "unknown_hold"]


def test_a_frame_for_the_life_before_is_rejected_and_never_acted_on() -> None:
    world = met()
    says(world, Release(**named(world, 2, dst="P0"), cause=cause()))
    assert world.holder(2).state is H.HELD
    assert only(world.p.sent(Reject)).src == "P1"


def test_a_frame_in_anothers_name_is_counted_and_dropped() -> None:
    world = met()
    says(world, Release(**named(world, 2, src="D7"), cause=cause()))
    assert world.holder(2).state is H.HELD
    assert "identity" in world.p.counted("late")


def test_another_instance_at_that_address_is_said_at_once() -> None:
    world = FacingParams()
    world.hold(1)
    world.restart_prefill("P1b")
    world.read(1)
    refused = world.d.failed("d1")
    assert (refused.code, refused.status, refused.retryable) == ("wrong_instance", 409, True)
    assert "P1b" in refused.message


def test_a_successors_hold_of_the_same_number_is_another_hold() -> None:
    world = FacingParams()
    world.hold(1)
    world.restart_prefill("P1b")
    world.hold(2)
    assert world.handles[2].hold == world.handles[1].hold
    world.read(1)
    world.read(2)
    assert world.d.failed("d1").code == "wrong_instance"
    world.land_all()
    world.pump()
    assert world.may_leave(2)


# --- ends ------------------------------------------------------------------------------------------------------------


def test_an_exact_name_releases_a_hold_at_once_and_another_name_nothing() -> None:
    world = FacingParams()
    world.hold(1)
    world.p.take(ReleaseHold(Rid("p"), cause()))
    assert "release" in world.p.counted("late")
    assert world.holder(1).state is H.HELD
    world.p.take(ReleaseHold(Rid("p1"), cause()))
    assert world.p.free == 16
    world.p.take(ReleaseHold(Rid("p1"), cause()))
    assert world.p.counted("late").count("release") == 2
    assert world.idle()


def test_a_hold_that_ends_while_it_is_read_stops_its_moves_and_is_never_confirmed() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    world.p.take(ReleaseHold(Rid("p1"), cause("aborted")))
    assert world.p.free == 16
    assert len(world.p.all(CancelMoves)) == 1
    world.land_all()  # what was under way lands, and nobody will trust it
    world.pump()
    assert world.d.failed("d1").code == "aborted"
    assert not world.may_leave(1)


def test_a_move_that_fails_is_said_once_and_again_after_a_lost_session() -> None:
    world = FacingParams()
    world.hold(1)
    world.read(1)
    move = only(world.p.all(MovePages))
    world.p.take(MoveDone(move.move, "broken pipe"))
    assert [refused.code for refused in refusals(world)] == ["transfer_failed"]
    world.cut()
    world.wait(0.2)
    assert len(world.p.all(MovePages)) == 1
    assert [refused.code for refused in refusals(world)] == ["transfer_failed", "transfer_failed"]
    assert (world.d.failed("d1").code, world.d.failed("d1").status) == ("transfer_failed", 502)


def test_a_move_that_fails_when_the_hold_is_over_is_nobodys_news() -> None:
    world = FacingParams()
    world.whole(1)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, "broken pipe"))
    assert refusals(world) == []


def test_who_holds_what_can_be_asked() -> None:
    world = FacingParams()
    world.hold(1)
    world.hold(2, 16)
    world.read(1)
    world.wait(2.0)
    told = world.prefill.holds_told()
    assert [(each["rid"], each["hold"], each["pages"], each["consumer"]) for each in told] == [
        ("p1", 1, 3, "D1"),
        ("p2", 2, 1, None),
    ]
    assert [each["lease_left_s"] for each in told] == [28.0, 28.0]


def test_a_rid_in_use_is_refused_and_the_first_is_not_touched() -> None:
    world = FacingParams()
    world.hold(1)
    world.ask(1)
    assert world.p.failed("p1").code == "duplicate_rid"
    assert world.holder(1).state is H.HELD
    assert len(world.p.all(AnswerHeld)) == 1


def test_a_notice_never_ends_what_is_not_finished() -> None:
    """I07, and the crash that a spurious "done" is elsewhere."""
    world = FacingParams()
    rid = world.ask(1)
    world.p.take(ConnectorOutput(Rank(), KVOutput(finished_sending={rid, Rid("nobody")})))
    assert world.p.counted("late") == ["finished_sending", "finished_sending"]
    world.computed(1)
    assert world.holder(1).state is H.HELD


def test_what_no_scheduler_and_no_connector_knows_is_late() -> None:
    """An event of the other dialect, and a frame in another's name."""
    world = met()
    for box in (world.p, world.d):
        box.take(RouteFailed("nowhere", cause()))
        assert "RouteFailed" in box.counted("late")
    world.read(2)
    grant = world.reader(2).grant
    (conn,) = world.conns
    stranger = Confirmed(**named(world, 2, grant, src="P9", dst="D1"))
    world.d.take(FrameIn(conn, stranger))
    assert "identity" in world.d.counted("late")
    assert not world.may_leave(2)


def test_a_handle_that_names_a_rank_which_its_prefill_has_not_is_refused_without_a_dial() -> None:
    world = FacingParams()
    handle = world.hold(1)
    world.second(1, msgspec.structs.replace(handle, dp=3))
    assert (world.d.failed("d1").code, world.d.failed("d1").status) == ("no_such_rank", 400)
    assert world.d.all(Dial) == []
    world.wait(30.0)
    assert world.idle()


def test_what_decode_has_under_way_can_be_asked() -> None:
    world = FacingParams(d_limits=limits(pages=4))
    world.hold(1)
    world.hold(2)
    world.read(1)
    world.read(2)
    node = world.decode
    assert (node.live, node.parked, node.waiting, node.sessions()) == (2, 1, 1, 1)
    assert (node.owner_of(Rid("d1")), node.owner_of(Rid("d2")), node.owner_of(Rid("d9"))) == ("d1", "", "")
