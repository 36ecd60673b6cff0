"""Several ranks on either side: a room's pages move over links, and each link is told, granted and owes its proof."""

from __future__ import annotations

import pytest

from pdplane.core import membership
from pdplane.core.effects import (
    AnswerFailed,
    ArmGrant,
    CloseConn,
    Dial,
    DisarmGrant,
    LookUp,
    LookUpRank,
    MovePages,
    RevokeGrant,
    RunDecode,
    RunPrefill,
    Teardown,
)
from pdplane.core.events import (
    ConnLost,
    ControlEndpoint,
    DialFailed,
    Dialled,
    GrantQuiet,
    RankKnown,
    RouteKnown,
    TornDown,
)
from pdplane.core.frames import Abort, Announce, Drained, Failed, Grant, Received, Row, Success, Welcome
from pdplane.core.ids import ConnId, GrantNo, Instance, Rank, Room, Shape
from pdplane.core.membership import ASK_AGAIN_S
from pdplane.core.rooms.table import SE, R, S

from .facing import ADDRESS, Facing, only

TP = pytest.mark.parametrize(("tp", "links"), [((1, 2), 2), ((2, 1), 2), ((2, 4), 4), ((4, 1), 4), ((4, 4), 4)])


@TP
def test_a_room_is_announced_granted_and_received_on_every_link(tp: tuple[int, int], links: int) -> None:
    world = Facing(tp=tp)
    world.meet(5)
    assert len(world.d.sent(Announce)) == len(world.d.sent(Grant)) == links
    assert len(only(world.p.all(RunPrefill)).pages) == 3
    world.send_all(5)
    world.pump()
    assert len(world.p.sent(Success)) == len(world.d.sent(Received)) == links
    assert world.states(5) == (R.GONE, S.GONE)


@TP
def test_the_slices_of_all_links_fill_every_shard_of_a_page(tp: tuple[int, int], links: int) -> None:
    world = Facing(tp=tp)
    world.meet(5)
    lanes = only(world.d.all(ArmGrant)).lanes
    assert len(lanes) == links
    for rank in range(tp[1]):
        mine = [lane.slice for lane in lanes if lane.link.here.tp == rank]
        assert sum(part.size_bytes for part in mine) == mine[0].dst_page
    assert sum(lane.slice.size_bytes for lane in lanes) == world.stamp.page_bytes


def test_prefill_computes_only_when_the_grants_of_all_links_are_in() -> None:
    world = Facing(tp=(2, 1))
    world.legs_in(5)
    world.deliver(Grant)
    assert world.p_state(5) is S.WAITING
    assert world.p.all(RunPrefill) == []
    world.deliver(Grant)
    assert world.p_state(5) is S.STREAMING


def test_a_page_that_only_one_link_has_brought_is_not_complete() -> None:
    world = Facing(tp=(2, 1))
    world.meet(5)
    world.sample(5)
    world.release(5)
    first, second = world.p.all(MovePages)
    world.land(first)
    for link in world.receiver(5).links:
        row = Row(first_token=7, prompt_tokens=40, prompt_digest=b"prompt")
        world.receiver(5).success(link, row)  # SUCCESS must not overtake the bytes
    assert world.d_state(5) is R.GRANTED
    world.land(second)
    assert world.d_state(5) is R.GONE
    assert len(world.d.all(RunDecode)) == 1


def test_each_rank_of_decode_closes_its_own_fence() -> None:
    world = Facing(tp=(1, 2), auto_fence=False)
    world.meet(5)
    world.cancel(world.d, 5)
    gates = {(revoke.here, revoke.kind) for revoke in world.d.all(RevokeGrant)}
    assert gates == {(Rank(tp=0), "memory"), (Rank(tp=1), "memory")}
    grant = world.receiver(5).grant
    world.d.take(GrantQuiet(grant, Rank(tp=0), "memory"))
    assert world.d_state(5) is R.DRAINING
    world.d.take(GrantQuiet(grant, Rank(tp=1), "memory"))
    assert world.d_state(5) is R.GONE
    assert len(world.d.all(DisarmGrant)) == 2


def test_a_grant_whose_links_are_not_ours_is_refused() -> None:
    world = Facing()
    world.p.take(world.leg(5))
    world.d.take(world.legs[5])
    world.pump()
    link = world.receiver(5).links[0]
    stray = Grant(
        room=Room(77), grant=world.receiver(5).grant, src=Instance("D1"), dst=Instance("P1"), rank=Rank(),
        pages=(), prompt=world.legs[5].prompt, time_left_s=1.0, links=((Rank(tp=3), Rank()),),
    )  # fmt: skip
    assert world.decode.send(link, stray)
    world.d.take(world.leg(6))  # any event carries it out
    world.pump()
    refused = [failed for failed in world.p.sent(Failed) if failed.room == 77]
    assert only(refused).cause.code == "bad_grant"
    assert Room(77) not in world.prefill.rooms.live


def test_one_link_lost_for_good_ends_the_instance_on_all_of_them() -> None:
    world = Facing(tp=(2, 1))
    world.meet(5)
    conn = world.decode.members.conn(world.receiver(5).links[1])
    assert conn is not None
    gone = world.receiver(5).links[1].there.instance
    dialler = world.decode.members.by_conn(conn)
    assert dialler is not None
    world.listeners.pop(dialler.endpoint)
    world.listeners[dialler.endpoint] = (world.add_decode("nobody"), Rank())
    world.boxes.pop()
    del world.conns[conn]
    world.d.take(ConnLost(conn))
    world.wait(2.5)
    assert world.d.failed("r5").code == "peer_gone"
    assert world.d.all(Teardown) == [Teardown(gone, GrantNo(1))]
    assert len(world.d.all(CloseConn)) == 1  # the other link's session, which was up


def test_peer_level_teardown_is_a_proof_where_there_is_no_fence() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.sample(5)
    world.p.hears = False
    world.wait(8.0)
    assert world.d.failed("r5").code == "peer_gone"
    assert world.d_state(5) is R.DRAINING
    world.d.take(TornDown(world.prefill.instance, world.receiver(5).grant))
    assert world.d_state(5) is R.GONE
    assert world.d.free == world.decode.limits.pages


def test_teardown_of_another_instance_proves_nothing() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.cancel(world.d, 5)
    world.d.take(TornDown(Instance("P9"), world.receiver(5).grant))
    assert world.d_state(5) is R.DRAINING


# --- data parallel ranks --------------------------------------------------------------------------------------------


def group(world: Facing, size: int, follow: bool = True) -> RouteKnown:
    ranks = tuple((Rank(dp=dp), ControlEndpoint("p", 1)) for dp in range(size))
    return RouteKnown(ADDRESS, ranks, Shape(dp=size), follow)


def asking(size: int = 2, follow: bool = True, **leg: object) -> Facing:
    """Decode has asked the registry for room 5, and is answered."""
    world = Facing()
    world.decode.handle(world.leg(5, **leg), world.now)
    world.d.take(group(world, size, follow))
    return world


def test_a_named_rank_that_contradicts_the_room_is_a_400_with_both() -> None:
    cause = asking(dp_rank=0).d.failed("r5")
    assert (cause.status, cause.code) == (400, "rank_contradiction")
    assert "rank 0 contradicts room 5, which is rank 1's" in cause.message


def test_a_rank_that_prefill_does_not_have_is_a_400() -> None:
    assert asking(dp_rank=2).d.failed("r5").status == 400
    assert asking(follow=False, dp_rank=-1).d.failed("r5").status == 400


def test_a_named_rank_is_honoured_where_rooms_do_not_decide() -> None:
    world = asking(follow=False, dp_rank=0)
    assert world.d.answers("r5") == []
    assert world.decode.members.groups[ADDRESS].waiting[Room(5)].dp == 0


def test_otherwise_the_registry_is_asked_until_it_knows() -> None:
    world = asking(follow=False)
    world.wait(ASK_AGAIN_S * 2.5, pump=False)
    asked = world.d.all(LookUpRank)
    assert len(asked) >= 2
    assert set(asked) == {LookUpRank(ADDRESS, Room(5))}
    effects = world.decode.handle(RankKnown(ADDRESS, Room(5), 1), world.now)
    assert LookUp(ADDRESS) in effects  # no session is up: whoever comes asks anew where the ranks are
    assert world.decode.members.groups[ADDRESS].waiting[Room(5)].dp == 1
    world.decode.handle(group(world, 2, follow=False), world.now)
    assert world.decode.members.groups[ADDRESS].waiting[Room(5)].dp == 1


def test_a_rank_that_the_registry_makes_up_is_refused() -> None:
    world = asking(follow=False)
    world.d.take(RankKnown(ADDRESS, Room(5), 7))
    assert world.d.failed("r5").code == "no_such_rank"


def test_a_route_that_lacks_a_rank_is_not_taken_for_a_whole_one() -> None:
    world = Facing(tp=(2, 1))
    world.decode.handle(world.leg(5), world.now)
    world.d.take(RouteKnown(ADDRESS, ((Rank(), ControlEndpoint("p", 1)),), Shape(tp=2)))
    assert world.d.failed("r5").code == "prefill_not_ready"
    assert "dp0cp0tp1pp0" in world.d.failed("r5").message


def test_an_abort_on_every_link_is_answered_on_every_link() -> None:
    world = Facing(tp=(4, 1), fence=False)
    world.meet(5)
    world.cancel(world.d, 5)
    world.pump()
    assert len(world.d.sent(Abort)) == 4
    world.release(5)
    world.pump()
    assert {frame.rank.tp for frame in world.p.sent(Drained)} == {0, 1, 2, 3}
    assert world.idle()


def test_a_dial_that_is_answered_when_nobody_wants_it_any_more_is_closed() -> None:
    world = Facing()
    world.meet(5)
    nowhere = ControlEndpoint("gone", 1)
    world.d.take(DialFailed(nowhere, Rank(), "refused"))
    world.d.take(Dialled(nowhere, Rank(), ConnId(99)))
    assert world.d.last(CloseConn) == CloseConn(ConnId(99))
    assert world.d.counted("late").count("dial") == 2


def test_a_rank_that_is_known_late_and_has_no_endpoint_is_refused() -> None:
    world = Facing()
    world.decode.handle(world.leg(5), world.now)
    world.d.take(RouteKnown(ADDRESS, ((Rank(dp=0), ControlEndpoint("p", 1)),), Shape(dp=2), False))
    world.d.take(RankKnown(ADDRESS, Room(5), 1))
    assert world.d.failed("r5").code == "prefill_not_ready"


def test_a_route_that_lacked_a_rank_is_asked_for_again() -> None:
    world = Facing(tp=(2, 1))
    world.decode.handle(world.leg(5), world.now)
    world.d.take(RouteKnown(ADDRESS, ((Rank(), ControlEndpoint("p", 1)),), Shape(tp=2)))
    world.meet(6)
    assert world.d.answers("r6") == []
    assert world.d_state(6) is R.GRANTED


def test_what_an_old_answer_refuses_is_asked_for_again_while_no_session_vouches_for_it() -> None:
    world = Facing()
    world.meet(4)
    world.cut(reachable=False)
    world.wait(3.0)
    looked = len(world.d.all(LookUp))
    effects = world.decode.handle(world.leg(9, dp_rank=1), world.now)
    assert [effect for effect in effects if isinstance(effect, LookUp)] == [LookUp(ADDRESS)]
    assert not [effect for effect in effects if isinstance(effect, AnswerFailed)]
    assert looked


def test_a_grant_that_decode_has_given_up_does_not_revive_with_a_new_session() -> None:
    world = Facing(fence=False, teardown_proves=True)
    world.meet(5)
    world.compute(5, 16)
    world.land_all()
    world.p.hears = False
    world.wait(8.0)
    assert world.d_state(5) is R.GONE  # torn down: its pages may be another's
    world.p.hears = True
    world.pump()  # what its kernel has let in meanwhile: a new session with the decode that has given it up
    world.compute(5, 32)
    assert len(world.p.all(MovePages)) == 1
    assert world.p.failed("r5").code == "peer_gone"
    world.release(5)
    world.meet(6)
    world.wait(0.6)
    world.send_all(6)
    world.pump()
    assert len(world.d.all(RunDecode)) == 1


def test_writes_go_on_when_the_grant_is_said_again_on_the_new_session() -> None:
    world = Facing()
    world.meet(5)
    world.cut()
    world.compute(5, 32)
    assert world.p.all(MovePages) == []
    world.deliver(Welcome)
    world.compute(5, 36)
    assert world.p.all(MovePages) == []
    world.pump()
    assert [len(move.src) for move in world.p.all(MovePages)] == [2]


def test_ranks_that_answer_as_two_instances_are_refused_at_once_and_named() -> None:
    world = Facing(tp=(2, 1))
    other = world.add_prefill("P2")
    world.listeners[ControlEndpoint("p", 1)] = world.p, Rank(tp=0)
    assert world.listeners[ControlEndpoint("p", 2)][0] is other
    world.meet(5)
    cause = world.d.failed("r5")
    assert (cause.code, cause.side) == ("prefill_not_ready", "prefill")
    assert "p:1 is P1/dp0cp0tp0pp0, p:2 is P2/dp0cp0tp1pp0" in cause.message


def test_a_teardown_proves_nothing_for_what_was_granted_after_it() -> None:
    world = Facing(fence=False)
    world.meet(5)
    before = world.receiver(5).grant
    world.cut(reachable=False)
    world.wait(3.0)
    world.reachable = True
    world.release(5)
    world.meet(6)
    world.wait(0.6)
    assert world.d_state(6) is R.GRANTED
    world.cancel(world.d, 6)
    world.d.take(TornDown(world.prefill.instance, before))
    assert world.d_state(6) is R.DRAINING


def test_one_seat_under_two_addresses_is_one_session() -> None:
    world = Facing()
    world.meet(5)
    world.listeners[ControlEndpoint("q", 1)] = world.p, Rank()
    world.decode.handle(world.leg(6, address="another"), world.now)
    world.p.take(world.legs[6])
    world.d.take(RouteKnown("another", ((Rank(), ControlEndpoint("q", 1)),)))
    world.pump()
    world.wait(2.0)
    dials = len(world.d.all(Dial))
    assert dials <= 4  # the old session's last try among them
    world.wait(20.0)
    assert world.d_state(6) is R.GRANTED
    world.meet(7)
    assert world.d_state(7) is R.GRANTED
    assert len(world.d.all(Dial)) == dials


def test_a_row_that_prefill_sent_and_forgot_may_be_asked_for_again_by_a_new_attempt() -> None:
    world = Facing()
    world.meet(5)
    world.send_all(5)
    world.mail.clear()  # SUCCESS is lost
    world.sender(5).apply(SE.TTL)  # and its row's time is over
    world.cut()
    world.pump()
    cause = world.d.failed("r5")
    assert (cause.code, cause.status, cause.retryable) == ("row_gone", 503, True)


def test_a_prefill_with_pipeline_ranks_is_refused_by_the_core_itself() -> None:
    world = Facing()
    world.decode.handle(world.leg(5), world.now)
    world.d.take(RouteKnown(ADDRESS, ((Rank(), ControlEndpoint("p", 1)),), Shape(pp=2)))
    cause = world.d.failed("r5")
    assert cause.code == "incompatible"
    assert "pp 2" in cause.message


def test_links_are_worked_out_once_per_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Facing()
    worked_out: list[object] = []
    real = membership.pairs
    monkeypatch.setattr(membership, "pairs", lambda *what: worked_out.append(what) or real(*what))
    for number in range(1, 8):
        world.meet(number)
    world.cut(reachable=False)
    world.wait(3.0)
    assert len(worked_out) == 1


def test_half_of_every_page_is_never_taken_for_whole_ones_by_a_registry_that_is_out_of_date() -> None:
    world = Facing()
    world.meet(4)
    world.send_all(4)
    world.pump()
    world.tp = (2, 1)
    world.restart_prefill()  # with two ranks now, the first of them where the only one was
    world.stale_route = RouteKnown(ADDRESS, ((Rank(), ControlEndpoint("p", 1)),), Shape(tp=1))
    world.wait(1.0)
    world.legs_in(5)
    world.pump()
    world.wait(1.0)
    cause = world.d.failed("r5")
    assert cause.code == "prefill_not_ready"
    assert "tp 1, pp 1, the prefill itself dp 1, cp 1, tp 2, pp 1" in cause.message
    assert len(world.d.all(ArmGrant)) == 1
    world.stale_route = None
    world.meet(6)
    world.wait(1.0)
    assert world.d_state(6) is R.GRANTED


def test_prefill_refuses_a_grant_that_names_a_part_of_the_links() -> None:
    world = Facing(tp=(2, 1))
    world.meet(5)
    link = world.receiver(5).links[0]
    part = Grant(
        room=Room(77), grant=world.receiver(5).grant, src=Instance("D1"), dst=Instance("P1"), rank=link.there.rank,
        pages=(), prompt=world.legs[5].prompt, time_left_s=1.0,
    )  # fmt: skip
    assert world.decode.send(link, part)
    world.d.take(world.leg(6))
    world.pump()
    refused = [failed for failed in world.p.sent(Failed) if failed.room == 77]
    assert only(refused).cause.code == "bad_grant"


def test_a_prefill_that_comes_back_as_one_that_follows_rooms_is_met_as_such() -> None:
    world = Facing()
    world.decode.handle(world.leg(5), world.now)
    world.d.take(group(world, 2, follow=False))  # rooms' ranks are in the registry, and nobody is up yet
    world.wait(1.2)  # ... nor will the successor ever write one: its own registry says that rooms decide
    assert world.decode.members.groups[ADDRESS].follow_room
    world.p.take(world.legs[5])
    world.pump()
    world.wait(0.5)
    assert world.d_state(5) is R.GRANTED


def test_a_newcomer_asks_for_the_route_anew_where_no_session_vouches_for_the_old_one() -> None:
    world = asking(follow=False)
    looked = len(world.d.all(LookUp))
    effects = world.decode.handle(world.leg(6), world.now)
    assert LookUp(ADDRESS) in effects
    assert looked == 0
