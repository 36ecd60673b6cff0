"""Public failures of the field, as they would have to happen here: one name, one story each.

Those that live in registry, router or transport are told there; the scenarios with whole fleets are the simulator's.
"""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest

from pdplane.core.effects import Alarm, AnswerRow, MovePages, RunDecode
from pdplane.core.events import Computed, FrameIn, MoveDone, Released, Sampled
from pdplane.core.frames import Abort, Drained, Failed, Grant, Received
from pdplane.core.ids import Room
from pdplane.core.rooms.table import R, S

from .facing import Facing, limits, only, prompt


def test_i01_no_page_is_granted_again_while_an_old_write_can_land() -> None:
    world = Facing(fence=False, d_limits=limits(pages=3))
    world.meet(1)
    world.sample(1)
    old = only(world.p.all(MovePages))
    world.cancel(world.d, 1)
    world.meet(2)
    assert world.d_state(2) is R.ALLOCATING
    world.release(1)
    world.pump()
    assert world.d_state(2) is R.ALLOCATING  # the write is still under way
    world.land(old)
    world.pump()
    assert world.d_state(2) is R.GRANTED


def test_i02_the_target_of_an_answer_lives_until_it_has_been_given() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.cancel(world.p, 5)
    world.release(5)
    assert world.p_state(5) is S.GONE
    world.cut()  # FAILED and DRAINED are lost, and prefill's room is over
    world.pump()
    assert world.idle()
    assert world.d.all(Alarm) == []


def test_i03_two_ranks_do_not_share_one_acknowledgement() -> None:
    world = Facing(fence=False, tp=(2, 1))
    world.meet(5)
    world.cancel(world.d, 5)
    world.pump()
    world.release(5)
    world.deliver(Drained)
    assert world.d_state(5) is R.DRAINING
    assert [link.there.rank.tp for link in world.receiver(5).holders] == [1]
    first = world.receiver(5).links[0]
    again = next(frame for frame in world.p.sent(Drained) if frame.rank == first.there.rank)
    conn = world.decode.members.conn(first)
    assert conn is not None
    world.d.take(FrameIn(conn, again))
    assert [link.there.rank.tp for link in world.receiver(5).holders] == [1]
    world.pump()
    assert world.d_state(5) is R.GONE


@pytest.mark.parametrize("fence", [True, False])
@pytest.mark.parametrize("order", list(permutations(["cancel at decode", "cancel at prefill", "complete"])))
def test_i04_abort_and_completion_end_in_one_verdict_and_one_free_in_every_order(
    order: tuple[str, ...], fence: bool
) -> None:
    for pumped in range(4):
        world = Facing(fence=fence)
        world.meet(5)
        for place, step in enumerate(order):
            if step == "complete":
                world.sample(5)
                world.release(5)
                world.land_all()
            else:
                world.cancel(world.d if step.endswith("decode") else world.p, 5)
            if place < pumped:
                world.pump()
        world.pump()
        world.d.take(Released(rid=world.rid(5)))
        world.pump()
        assert world.idle(), (order, pumped)
        assert len(world.d.answers("r5")) <= 1
        assert len(world.p.answers("r5")) == 1


def test_i05_a_peer_that_never_reports_holds_pages_for_a_bounded_time_and_is_named() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.p.hears = False
    world.wait(60.0)
    assert world.d_state(5) is R.QUARANTINE
    assert "P1" in only(world.d.all(Alarm)).text


@pytest.mark.parametrize("fails", ["d", "p"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_i08_when_one_leg_fails_the_other_ends_at_once(fails: str, when: str) -> None:
    world = Facing()
    failing, other = (world.d, world.p) if fails == "d" else (world.p, world.d)
    if when == "after":
        world.meet(5)
        world.cancel(failing, 5)
    else:
        failing.take(world.leg(5))
        world.pump()
        world.cancel(failing, 5)
        world.pump()
        other.take(world.legs[5])
    world.pump()
    assert other.failed("r5").code == "client_left"
    assert world.now == 0.0


def test_i09_an_aborted_prefill_never_becomes_an_answer() -> None:
    world = Facing(fence=False)
    world.meet(5, tokens=40)
    world.compute(5, 32)
    world.land_all()
    world.cancel(world.p, 5)
    world.p.take(Sampled(rid=world.rid(5), token=7))  # the engine had it under way
    world.release(5)
    world.pump()
    assert world.d.all(RunDecode) == world.d.all(AnswerRow) == []
    assert world.idle()


@pytest.mark.parametrize("row", [{"prompt_tokens": 39}, {"prompt_digest": b"other"}])
def test_i09_a_row_of_another_prompt_is_not_committed(row: dict[str, object]) -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.sample(5)
    sender = world.sender(5)
    assert sender.row is not None
    sender.row = msgspec.structs.replace(sender.row, **row)
    world.release(5)
    world.land_all()
    world.pump()
    assert world.d.all(RunDecode) == []
    assert world.d.failed("r5").code == "prompt_mismatch"
    assert world.idle()


def test_i13_growth_and_whole_prompts_cannot_wait_for_each_other() -> None:
    world = Facing(d_limits=limits(pages=8))
    for number in (1, 2, 3):
        world.meet(number, tokens=48, max_new=81)  # 3 pages each, 8 at most
    assert [world.d_state(number) for number in (1, 2, 3)] == [R.GRANTED, R.ALLOCATING, R.ALLOCATING]
    for number in (1, 2, 3):
        world.send_all(number)
        world.pump()
        for tokens in range(48, 129):
            world.d.take(Computed(rid=world.rid(number), tokens=tokens))
        world.d.take(Released(rid=world.rid(number)))
        world.pump()
    assert world.idle()


def test_i14_prefill_that_waits_its_turn_is_not_a_transfer_that_hangs() -> None:
    world = Facing(d_limits=limits(progress_limit_s=6.0), p_limits=limits(max_running=1))
    world.meet(1)
    world.meet(2)
    for tokens in range(1, 11):
        world.compute(1, tokens)
        world.wait(3.0)
    assert world.d_state(2) is R.GRANTED
    assert world.d.answers("r1") == world.d.answers("r2") == []


def test_i16_a_completion_counts_also_when_the_request_is_over() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.sample(5)
    world.cancel(world.d, 5)
    world.pump()
    world.release(5)
    world.p.take(MoveDone(only(world.p.all(MovePages)).move, ""))
    world.pump()
    assert world.idle()


def test_i18_nothing_of_a_dead_process_is_trusted_by_its_successor_or_of_it() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.restart_prefill()
    world.pump()
    assert world.p.sent(Drained) == []
    assert world.d_state(5) is R.DRAINING
    world.meet(6)
    assert world.d.sent(Grant)[-1].dst == "P1b"
    assert world.sender(6).grant_no == 2


def test_i22_a_duplicate_room_is_refused_and_both_first_legs_live_on() -> None:
    world = Facing()
    world.meet(5)
    for box in (world.d, world.p):
        box.take(msgspec.structs.replace(world.legs[5], rid="thief", prompt=prompt(16, b"theirs")))  # type: ignore[arg-type]
        assert box.failed("thief").status == 409
    world.send_all(5)
    world.pump()
    assert [run.rid for run in world.d.all(RunDecode)] == ["r5"]


def test_i25_every_counter_returns() -> None:
    world = Facing(p_limits=limits(max_running=2))
    for number in range(1, 7):
        world.meet(number, tokens=16, max_new=1)
    world.cancel(world.p, 1)
    world.cancel(world.d, 2)
    world.pump()
    for _ in range(6):
        for number in range(1, 7):
            if world.p_state(number) in (S.STREAMING, S.DRAINING):
                world.sample(number)
                world.release(number)
        world.land_all()
        world.pump()
    for number in range(1, 7):
        world.d.take(Released(rid=world.rid(number)))
    world.pump()
    assert world.idle()
    assert (world.prefill.computing, world.prefill.waiting, world.decode.waiting) == (0, 0, 0)
    assert world.prefill._by_move == {}
    assert world.prefill._by_rid == world.decode._by_rid == {}
    assert world.decode._by_grant == world.decode._progress == {}
    assert world.decode.door.arrivals == 0


def test_a_failure_that_precedes_drained_answers_first_and_frees_later() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.cancel(world.p, 5)
    world.deliver(Failed)
    assert world.d.failed("r5").code == "client_left"
    assert world.d.free < world.d.node.limits.pages
    world.release(5)
    world.deliver(Drained)
    assert world.d.free == world.d.node.limits.pages


def test_a_success_that_comes_again_after_the_batch_is_answered_and_runs_nothing() -> None:
    world = Facing()
    world.meet(5)
    world.send_all(5)
    mail = list(world.mail)
    world.pump()
    world.mail.extend(mail)
    world.pump()
    assert len(world.d.all(RunDecode)) == 1
    assert len(world.d.sent(Received)) == 2


def test_a_landing_reported_twice_or_for_other_pages_does_not_complete_a_room() -> None:
    world = Facing()
    world.meet(5)
    receiver = world.receiver(5)
    others = tuple(page for page in range(16) if page not in receiver.pages)[:3]
    for pages in (receiver.pages[:2], receiver.pages[:2], others):
        world.landed(5, pages)
    assert receiver.landed == {receiver.links[0]: set(receiver.pages[:2])}


def test_an_abort_for_a_room_nobody_knows_is_answered_and_remembered() -> None:
    world = Facing()
    world.meet(1)
    world.d.take(world.leg(5))
    world.cancel(world.d, 5)
    world.mail = type(world.mail)(mail for mail in world.mail if isinstance(mail[2], Abort))
    world.pump()
    assert only(world.p.sent(Drained)).room == Room(5)
    world.p.take(world.legs[5])
    assert world.p.failed("r5").code == "client_left"
