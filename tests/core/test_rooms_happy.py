"""One request from both legs to the running batch, and what each side says and holds on the way."""

from __future__ import annotations

import pytest

from pdplane.core.effects import AnswerRow, ArmGrant, ConnectData, DisarmGrant, MovePages, RunDecode, RunPrefill
from pdplane.core.effects import SendFrame as Send
from pdplane.core.events import Released
from pdplane.core.frames import Announce, Grant, Received, Success
from pdplane.core.pages import Page
from pdplane.core.rooms.table import KVPoll, R, S

from .facing import MEMORY, Facing, limits, only


def test_both_legs_meet_and_prefill_computes_only_with_a_grant() -> None:
    world = Facing()
    world.p.take(world.leg(5))
    assert world.p_state(5) is S.WAITING
    assert world.p.all(RunPrefill) == []
    world.d.take(world.legs[5])
    world.pump()
    assert world.states(5) == (R.GRANTED, S.STREAMING)
    assert len(only(world.p.all(RunPrefill)).pages) == 3


def test_the_landing_is_armed_before_the_grant_is_told() -> None:
    world = Facing()
    world.meet(5)
    kinds = [e for e in world.d.log if isinstance(e, ArmGrant) or (isinstance(e, Send) and isinstance(e.frame, Grant))]
    assert isinstance(kinds[0], ArmGrant)
    assert isinstance(kinds[1], Send)
    assert world.decode.ledger.counts[Page.GRANTED] == 3


def test_full_pages_move_while_the_rest_is_computed() -> None:
    world = Facing()
    world.meet(5, tokens=40)
    world.compute(5, 20)
    assert only(world.p.all(MovePages)).src == world.sender(5).pages[:1]
    world.compute(5, 20)
    assert len(world.p.all(MovePages)) == 1
    world.sample(5)
    assert [len(move.src) for move in world.p.all(MovePages)] == [1, 2]
    assert world.p_state(5) is S.FLUSHING


def test_a_whole_hand_off_ends_in_the_batch_with_prefill_free() -> None:
    world = Facing()
    world.run_to_batch(5)
    assert world.states(5) == (R.GONE, S.GONE)
    run = only(world.d.all(RunDecode))
    assert run.row.first_token == 7
    assert run.max_new == 4
    assert world.p.free == world.p.node.limits.pages
    assert world.d.sent(Received) != []
    assert only(world.p.answers("r5")).__class__ is AnswerRow
    world.d.take(Released(rid=world.rid(5)))
    assert world.idle()


def test_success_waits_for_the_last_write_and_for_the_engine() -> None:
    world = Facing()
    world.meet(5)
    world.sample(5)
    world.land_all()
    assert world.p.sent(Success) == []  # the engine still has the pages
    world.release(5)
    assert len(world.p.sent(Success)) == 1


def test_decode_takes_completion_only_with_the_last_page_landed() -> None:
    world = Facing(fence=False)
    world.meet(5)
    world.sample(5)
    world.release(5)
    world.armed.clear()  # what lands is reported late
    world.land_all()
    world.pump()
    assert world.d_state(5) is R.GRANTED
    receiver = world.receiver(5)
    world.landed(5, receiver.pages[:2])
    assert world.d_state(5) is R.GRANTED
    world.landed(5, receiver.pages[2:])
    assert world.d_state(5) is R.GONE
    assert len(world.d.all(RunDecode)) == 1


def test_a_row_that_ends_the_request_is_answered_without_decoding() -> None:
    world = Facing()
    world.meet(5)
    world.send_all(5, ended="stop")
    world.pump()
    assert world.d.all(RunDecode) == []
    answer = only(world.d.answers("r5"))
    assert isinstance(answer, AnswerRow)
    assert answer.row.finish_reason == "stop"
    assert world.idle()


def test_two_ranks_must_both_succeed() -> None:
    world = Facing(tp=(2, 1))
    world.meet(5)
    assert len(world.d.sent(Grant)) == 2
    world.send_all(5)
    world.deliver(Success)
    assert world.d_state(5) is R.GRANTED
    world.pump()
    assert world.d_state(5) is R.GONE
    assert len(world.d.sent(Received)) == 2


def test_decode_may_speak_first() -> None:
    world = Facing()
    world.d.take(world.leg(5))
    world.pump()
    assert world.states(5) == (R.GRANTED, S.ORPHAN)
    world.p.take(world.legs[5])
    assert world.p_state(5) is S.STREAMING
    world.send_all(5)
    world.pump()
    assert len(world.d.all(RunDecode)) == 1


def test_prefill_is_told_where_to_write_when_the_session_comes_up() -> None:
    world = Facing()
    world.meet(5)
    data = only(world.p.all(ConnectData))
    assert data.link.there.instance == "D1"
    assert data.endpoint == MEMORY
    assert data.slice.whole


def test_one_session_serves_many_rooms() -> None:
    world = Facing()
    for number in (1, 2, 3):
        world.meet(number, tokens=16)
    assert len(world.conns) == 1
    assert len(world.d.sent(Announce)) == 3


def test_the_public_poll_follows_the_states() -> None:
    world = Facing()
    world.legs_in(5)
    assert (world.receiver(5).poll, world.sender(5).poll) == (KVPoll.BOOTSTRAPPING, KVPoll.BOOTSTRAPPING)
    world.pump()
    receiver, sender = world.receiver(5), world.sender(5)
    assert (receiver.poll, sender.poll) == (KVPoll.WAITING_FOR_INPUT, KVPoll.WAITING_FOR_INPUT)
    world.compute(5, 16)
    assert sender.poll is KVPoll.TRANSFERRING
    world.land_all()
    assert receiver.poll is KVPoll.TRANSFERRING
    world.send_all(5)
    assert sender.poll is KVPoll.SUCCESS
    world.pump()
    assert (receiver.poll, sender.poll) == (KVPoll.SUCCESS, KVPoll.SUCCESS)


def test_a_filled_room_waits_for_its_place_in_the_batch() -> None:
    world = Facing(d_limits=limits(max_running=1))
    world.run_to_batch(1)
    world.run_to_batch(2)
    assert world.d_state(2) is R.SUCCESS
    world.d.take(Released(rid=world.rid(1)))
    assert [run.rid for run in world.d.all(RunDecode)] == ["r1", "r2"]


def test_the_wanted_tokens_are_cut_to_what_the_pool_can_hold() -> None:
    world = Facing(d_limits=limits(pages=3))
    world.meet(5, tokens=40, max_new=100)
    world.send_all(5)
    world.pump()
    assert only(world.d.all(RunDecode)).max_new == 9  # 48 rows of KV, and the last token needs none


def test_prefill_credits_are_back_pressure() -> None:
    world = Facing(p_limits=limits(max_running=1))
    world.meet(1)
    world.meet(2)
    assert world.p_state(2) is S.ARMED
    world.send_all(1)
    assert world.p_state(2) is S.STREAMING


def test_prefill_pages_are_back_pressure() -> None:
    world = Facing(p_limits=limits(pages=3))
    world.meet(1)
    world.meet(2)
    assert world.p_state(2) is S.ARMED
    world.send_all(1)
    assert world.p_state(2) is S.STREAMING


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 255, 256])
def test_any_length_goes_through(tokens: int) -> None:
    world = Facing()
    world.meet(5, tokens=tokens, max_new=1)
    for done in range(64, tokens, 64):
        world.compute(5, done)
        world.land_all()
    world.compute(5, tokens)
    world.send_all(5)
    world.pump()
    assert len(world.d.all(RunDecode)) == 1
    assert world.d.all(DisarmGrant) != []
    world.d.take(Released(rid=world.rid(5)))
    assert world.idle()
