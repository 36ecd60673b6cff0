"""Identity on every frame: whoever speaks under another name, number or life is counted, and nothing changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdplane.core.effects import CloseConn, RunPrefill
from pdplane.core.errors import bad_request
from pdplane.core.events import FrameIn, LegArrived, LegRefused
from pdplane.core.frames import Abort, Announce, Beat, Drained, Failed, Grant, Received, Reject, Row, Success
from pdplane.core.ids import ConnId, GrantNo, Instance, PageId, Rank, Rid, Room
from pdplane.core.rooms.table import R, S

from .facing import Facing, limits, only, prompt

CAUSE = bad_request("no")
TO_DECODE: dict[str, Any] = {"room": 5, "grant": 1, "src": "P1", "dst": "D1", "rank": Rank()}
TO_PREFILL: dict[str, Any] = {"room": 5, "grant": 1, "src": "D1", "dst": "P1", "rank": Rank()}
ROW = Row(7, 40, b"prompt")
FOREIGN = [{"grant": 2}, {"src": "P0"}, {"dst": "D0"}, {"rank": Rank(tp=1)}, {"room": 6}]


def conn_of(world: Facing) -> ConnId:
    return only(world.conns)


def snapshot(world: Facing) -> tuple[object, ...]:
    receiver, sender = world.receiver(5), world.sender(5)
    sets = (set(receiver.quiet), set(receiver.succeeded), set(receiver.landed), receiver.cause, sender.cause)
    return (*world.states(5), *sets, world.d.free, world.p.free)


@pytest.mark.parametrize("wrong", FOREIGN)
@pytest.mark.parametrize("kind", ["success", "drained", "failed"])
def test_a_frame_of_another_identity_proves_nothing_at_decode(kind: str, wrong: dict[str, Any]) -> None:
    world = Facing(fence=False)
    world.meet(5)
    before = snapshot(world)
    fields = TO_DECODE | wrong
    frame = {
        "success": Success(**fields, row=ROW),
        "drained": Drained(**fields),
        "failed": Failed(**fields, cause=CAUSE),
    }
    world.d.take(FrameIn(conn_of(world), frame[kind]))
    assert snapshot(world) == before
    assert len(world.d.counted("late")) == 1


@pytest.mark.parametrize("wrong", [*FOREIGN[:1], {"src": "D0"}, {"rank": Rank(tp=1)}])
@pytest.mark.parametrize("kind", ["abort", "received"])
def test_a_frame_of_another_identity_ends_nothing_at_prefill(kind: str, wrong: dict[str, Any]) -> None:
    world = Facing()
    world.meet(5)
    before = snapshot(world)
    fields = TO_PREFILL | wrong
    frame = {"abort": Abort(**fields, cause=CAUSE), "received": Received(**fields)}
    world.p.take(FrameIn(conn_of(world), frame[kind]))
    assert snapshot(world) == before
    assert len(world.p.counted("late")) == 1


def test_a_frame_for_another_instance_is_rejected_with_the_one_that_is_here() -> None:
    world = Facing()
    world.meet(5)
    conn = conn_of(world)
    world.p.take(FrameIn(conn, Abort(**(TO_PREFILL | {"dst": Instance("P0")}), cause=CAUSE)))
    reject = only(world.p.sent(Reject))
    assert (reject.src, reject.cause.code) == ("P1", "wrong_instance")
    assert CloseConn(conn) in world.p.log
    assert world.prefill.sessions.sessions == 0


def test_success_before_the_grant_is_not_a_proof() -> None:
    world = Facing(fence=False, d_limits=limits(pages=3))
    world.meet(1)
    world.meet(5)
    fields = TO_DECODE | {"grant": 0}
    world.d.take(FrameIn(conn_of(world), Success(**fields, row=ROW)))
    world.d.take(FrameIn(conn_of(world), Drained(**fields)))
    receiver = world.receiver(5)
    assert (receiver.quiet, receiver.succeeded, receiver.state) == (set(), set(), R.ALLOCATING)
    assert world.d.counted("late") == ["Allocating/success", "Allocating/drained"]


def test_frames_on_a_session_that_is_not_greeted_yet_prove_nothing() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.p.hears = False
    world.cut()
    conn = only(world.conns)
    world.d.take(FrameIn(conn, Drained(**TO_DECODE)))
    world.d.take(FrameIn(conn, Failed(**TO_DECODE, cause=CAUSE)))
    assert world.d_state(5) is R.GRANTED
    assert world.d.counted("late") == ["identity", "identity"]


def test_a_failure_said_before_the_grant_was_seen_counts() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.d.take(FrameIn(conn_of(world), Failed(**(TO_DECODE | {"grant": 0}), cause=CAUSE)))
    assert world.d_state(5) is R.DRAINING


def test_a_beat_speaks_only_for_the_rooms_of_its_sender() -> None:
    world = Facing(d_limits=limits(progress_limit_s=10.0))
    world.meet(5)
    world.wait(8.0)
    world.d.take(FrameIn(conn_of(world), Beat(src=Instance("P0"), progress={5: 10})))
    world.d.take(FrameIn(conn_of(world), Beat(src=Instance("P1"), progress={6: 10})))
    world.wait(5.0)
    assert world.d.failed("r5").code == "no_progress"


# --- duplicates -----------------------------------------------------------------------------------------------------


def another_leg(world: Facing, number: int, rid: str) -> LegArrived:
    return msgspec.structs.replace(world.legs[number], rid=Rid(rid))


@pytest.mark.parametrize("side", ["d", "p"])
def test_a_second_leg_of_a_room_is_refused_and_the_first_untouched(side: str) -> None:
    world = Facing()
    world.meet(5)
    before = snapshot(world)
    box = getattr(world, side)
    box.take(another_leg(world, 5, "other"))
    assert box.failed("other").status == 409
    assert box.answers("r5") == []
    assert snapshot(world) == before
    world.send_all(5)
    world.pump()
    assert world.states(5) == (R.GONE, S.GONE)
    box.take(another_leg(world, 5, "again"))
    assert box.failed("again").status == 409


@pytest.mark.parametrize("side", ["d", "p"])
def test_a_rid_in_use_is_refused_among_the_very_effects_of_its_leg(side: str) -> None:
    world = Facing()
    world.meet(5)
    effects = getattr(world, side).take(msgspec.structs.replace(world.legs[5], room=Room(6)))
    assert [effect.cause.status for effect in effects if hasattr(effect, "cause")] == [409]
    assert world.states(5) == (R.GRANTED, S.STREAMING)


def test_a_rid_that_runs_is_in_use() -> None:
    world = Facing()
    world.run_to_batch(5)
    world.d.take(msgspec.structs.replace(world.legs[5], room=Room(6)))
    assert world.d.failed("r5").status == 409
    assert len(world.decode.batch) == 1
    assert len(world.decode.rooms.live) == 0


def test_another_decode_for_a_room_is_told_and_the_first_keeps_it() -> None:
    world = Facing(fence=False)
    world.meet(5)
    before = snapshot(world)
    other = world.add_decode("D2")
    other.take(world.legs[5])
    world.pump()
    assert other.failed("r5").code == "duplicate_room"
    assert other.free == other.node.limits.pages
    assert snapshot(world) == before


def test_another_decodes_abort_does_not_end_the_room() -> None:
    world = Facing(fence=False)
    world.meet(5)
    other = world.add_decode("D2")
    other.take(world.legs[5])
    world.cancel(other, 5)
    world.pump()
    assert world.p_state(5) is S.STREAMING
    assert other.node.live == 0


def test_another_grant_number_for_a_room_is_answered_as_a_duplicate() -> None:
    world = Facing()
    world.meet(5)
    fields = TO_PREFILL | {"grant": GrantNo(9)}
    grant = Grant(**fields, pages=(PageId(0),) * 3, prompt=prompt(40), time_left_s=1.0)
    world.p.take(FrameIn(conn_of(world), grant))
    assert [(type(f), f.grant) for f in world.under_way()] == [(Failed, 9), (Drained, 9)]  # type: ignore[union-attr]
    assert world.p_state(5) is S.STREAMING
    assert world.sender(5).grant_no == 1


# --- latecomers -----------------------------------------------------------------------------------------------------


def test_whoever_comes_to_a_tombstone_at_prefill_is_answered_at_once() -> None:
    world = Facing()
    world.meet(5)
    world.cancel(world.p, 5)
    world.release(5)
    world.pump()
    conn = conn_of(world)
    world.p.log.clear()
    grant = Grant(**TO_PREFILL, pages=(PageId(0),) * 3, prompt=prompt(40), time_left_s=1.0)
    world.p.take(FrameIn(conn, grant))
    world.p.take(FrameIn(conn, Announce(**TO_PREFILL)))
    world.p.take(FrameIn(conn, Abort(**TO_PREFILL, cause=CAUSE)))
    world.p.take(FrameIn(conn, Received(**TO_PREFILL)))
    assert len(world.p.sent(Failed)) == 2
    assert len(world.p.sent(Drained)) == 3
    assert world.p.sent(Failed)[0].cause.code == "client_left"
    assert world.p.node.live == 0


def test_a_leg_refused_at_prefills_edge_fails_decode_as_soon_as_it_asks() -> None:
    world = Facing()
    world.p.take(LegRefused(room=Room(5), cause=CAUSE))
    world.d.take(world.leg(5))
    world.pump()
    assert world.d.failed("r5") == CAUSE
    assert world.idle()


def test_a_leg_refused_at_prefills_edge_fails_decode_that_has_asked_already() -> None:
    world = Facing(fence=False)
    world.d.take(world.leg(5))
    world.pump()
    world.p.take(LegRefused(room=Room(5), cause=CAUSE))
    world.pump()
    assert world.d.failed("r5") == CAUSE
    assert world.idle()


def test_a_leg_refused_at_prefills_edge_leaves_a_room_with_its_leg_alone() -> None:
    world = Facing()
    world.meet(5)
    world.p.take(LegRefused(room=Room(5), cause=CAUSE))
    assert world.p_state(5) is S.STREAMING


def test_legs_with_different_prompts_fail_before_anything_is_computed() -> None:
    world = Facing(fence=False)
    world.p.take(world.leg(5))
    world.d.take(msgspec.structs.replace(world.legs[5], prompt=prompt(40, b"another")))
    world.pump()
    assert world.d.failed("r5").code == world.p.failed("r5").code == "prompt_mismatch"
    assert b"another".hex() in world.d.failed("r5").message
    assert world.p.all(RunPrefill) == []
    assert world.idle()


def test_a_grant_of_too_few_pages_fails_the_room_and_names_both_numbers() -> None:
    world = Facing()
    world.d.take(world.leg(1))
    world.pump()
    world.p.take(world.leg(5))
    grant = Grant(**TO_PREFILL, pages=(PageId(0),), prompt=prompt(40), time_left_s=1.0)
    world.p.take(FrameIn(conn_of(world), grant))
    cause = world.p.failed("r5")
    assert cause.code == "prompt_mismatch"
    assert "1 pages" in cause.message
    assert "need 3" in cause.message
