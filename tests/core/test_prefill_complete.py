"""prefill_complete: prefill computes ahead of any grant and holds the KV under a term; decode reserves on READY."""

from __future__ import annotations

import pytest

from pdplane.core.effects import AbortEngine, AnswerRow, ArmGrant, MovePages, RunDecode, RunPrefill
from pdplane.core.frames import Drained, Failed, Grant, Ready, Received
from pdplane.core.pages import Page
from pdplane.core.rooms.table import KVPoll, R, S

from .facing import AHEAD, PAGE, Facing, limits, only, prompt


def ahead(**more: object) -> Facing:
    return Facing(stamp=AHEAD, **more)  # type: ignore[arg-type]


def computed(world: Facing, number: int) -> None:
    world.sample(number)
    world.release(number)


def test_prefill_computes_while_decode_reserves_nothing() -> None:
    world = ahead()
    world.meet(5)
    assert world.states(5) == (R.ANNOUNCED, S.AHEAD)
    assert world.d.free == world.decode.limits.pages
    assert world.d.all(ArmGrant) == []
    assert len(world.p.all(RunPrefill)) == 1
    world.compute(5, 32)
    assert world.p.all(MovePages) == []


def test_ready_comes_before_any_page_of_decode_is_taken_and_the_pages_follow() -> None:
    world = ahead()
    world.meet(5)
    computed(world, 5)
    assert world.p_state(5) is S.HELD
    assert world.p.node.ledger.counts[Page.HELD] == 3
    assert world.sender(5).poll is KVPoll.BOOTSTRAPPING
    world.deliver(Ready)
    assert world.d_state(5) is R.GRANTED
    world.pump()
    assert world.p_state(5) is S.FLUSHING
    world.land_all()
    world.pump()
    assert len(world.d.all(RunDecode)) == 1
    assert isinstance(only(world.p.answers("r5")), AnswerRow)


def test_a_grant_that_comes_while_it_still_computes_streams_from_there() -> None:
    world = ahead()
    world.meet(5)
    world.compute(5, 32)
    receiver = world.receiver(5)
    receiver.computed(receiver.links[0])  # a READY that decode should not have yet
    world.d.take(world.leg(6))  # any event: admission looks
    world.pump()
    assert world.p_state(5) is S.STREAMING
    assert [len(move.src) for move in world.p.all(MovePages)] == [2]


def test_ready_is_said_again_to_whoever_announces_again() -> None:
    world = ahead()
    world.meet(5)
    computed(world, 5)
    world.cut()  # READY is lost on the way
    world.pump()
    world.wait(0.5)
    assert len(world.p.sent(Ready)) == 2
    assert world.d_state(5) is R.GRANTED
    world.land_all()
    world.pump()
    assert len(world.d.all(RunDecode)) == 1


def test_a_hold_ends_with_its_term_and_decode_is_told() -> None:
    world = ahead(d_limits=limits(4), p_limits=limits(16, hold_term_s=5.0))
    world.legs_in(1, 64)
    world.pump()
    computed(world, 1)
    world.pump()
    world.land_all()
    world.pump()  # all of decode's pages are in use
    world.meet(2, 40)
    computed(world, 2)
    world.pump()
    assert world.states(2) == (R.ALLOCATING, S.HELD)
    world.wait(5.1)
    assert world.states(2) == (R.GONE, S.GONE)
    assert world.p.failed("r2").code == world.d.failed("r2").code == "hold_expired"
    assert world.p.free == 16 - world.p.node.ledger.counts[Page.CACHED]


def test_the_wait_for_pages_at_decode_begins_with_ready() -> None:
    world = ahead(d_limits=limits(4, queue_limit_s=8.0), p_limits=limits(hold_term_s=30.0))
    world.meet(1, 64)
    computed(world, 1)
    world.pump()
    world.land_all()
    world.pump()
    world.meet(2)
    world.wait(7.0)  # computing, with beats that say so
    computed(world, 2)
    world.pump()
    world.wait(7.9)
    assert world.d_state(2) is R.ALLOCATING
    world.wait(0.2)
    assert world.d.failed("r2").code == "overloaded"
    world.pump()
    assert world.p_state(2) is S.GONE


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_cancel_while_kv_is_held_frees_it_at_once(side: str) -> None:
    world = ahead()
    world.meet(5)
    computed(world, 5)
    world.cancel(world.p if side == "prefill" else world.d, 5)
    world.pump()
    assert world.states(5) == (R.GONE, S.GONE)
    assert world.idle()
    assert world.p.sent(Drained)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_cancel_while_it_computes_ahead_stops_the_engine_and_pages_wait_for_it(side: str) -> None:
    world = ahead()
    world.meet(5)
    world.cancel(world.p if side == "prefill" else world.d, 5)
    world.pump()
    assert world.p_state(5) is S.DRAINING
    assert len(world.p.all(AbortEngine)) == 1
    assert len(world.p.sent(Failed)) == (1 if side == "prefill" else 0)
    world.release(5)
    world.pump()
    assert world.states(5) == (R.GONE, S.GONE)
    assert world.idle()


def test_an_aborted_prefill_leaves_nothing_in_the_cache() -> None:
    world = ahead()
    world.meet(5, 64, page_keys=(b"1", b"2", b"3", b"4"))
    world.compute(5, 48)
    world.cancel(world.d, 5)
    world.pump()
    world.release(5)
    world.pump()
    assert world.p.node.ledger.counts[Page.CACHED] == 0
    assert world.idle()


def test_decode_dies_while_kv_is_held() -> None:
    world = ahead()
    world.meet(5)
    computed(world, 5)
    world.d.hears = False
    world.wait(30.0)
    assert world.p_state(5) is S.GONE
    assert world.p.failed("r5").code == "peer_gone"


def test_prefill_dies_while_decode_waits_for_ready() -> None:
    world = ahead()
    world.meet(5)
    world.p.hears = False
    world.wait(8.0)
    assert world.d.failed("r5").code == "peer_gone"
    assert world.d_state(5) is R.GONE


def test_a_computed_prompt_for_which_no_decode_asks_does_not_wait_for_ever() -> None:
    world = ahead()
    world.p.take(world.leg(5))
    computed(world, 5)
    assert world.p_state(5) is S.HELD
    world.wait(world.prefill.limits.peer_wait_s + 0.1)
    assert world.p_state(5) is S.GONE
    assert world.p.failed("r5").code == "no_decode"
    assert world.idle()


def test_what_is_held_ahead_of_grants_is_capped() -> None:
    world = ahead(p_limits=limits(16, held_pages=6, max_running=8))
    for number in range(1, 5):
        world.p.take(world.leg(number, 48))
    assert [world.p_state(n) for n in range(1, 5)] == [S.AHEAD, S.AHEAD, S.WAITING, S.WAITING]
    world.cancel(world.p, 1)
    world.release(1)
    assert world.p_state(3) is S.AHEAD


def test_one_prompt_over_the_cap_is_computed_when_nothing_else_is_held() -> None:
    world = ahead(p_limits=limits(16, held_pages=2))
    world.p.take(world.leg(1, 200))
    assert world.p_state(1) is S.AHEAD


def test_legs_with_different_prompts_are_refused_before_anything_is_computed() -> None:
    world = ahead(p_limits=limits(max_running=1))
    world.p.take(world.leg(4))
    world.p.take(world.leg(5, 40))
    world.d.take(world.leg(5, prompt=prompt(40, b"another")))
    world.pump()
    assert len(world.p.all(RunPrefill)) == 1
    assert world.p.failed("r5").code == world.d.failed("r5").code == "prompt_mismatch"


def test_legs_with_different_prompts_are_refused_when_the_computed_one_comes_first() -> None:
    world = ahead()
    world.p.take(world.leg(5, 40))
    computed(world, 5)
    world.d.take(world.leg(5, prompt=prompt(40, b"another")))
    world.pump()
    assert world.p.all(MovePages) == []
    assert world.p.failed("r5").code == "prompt_mismatch"
    assert world.idle()


def test_every_rank_says_ready_and_is_granted() -> None:
    world = ahead(tp=(2, 4))
    world.meet(5)
    computed(world, 5)
    assert len(world.p.sent(Ready)) == 4
    world.deliver(Ready)
    assert world.d_state(5) is R.ANNOUNCED
    world.pump()
    assert len(world.d.sent(Grant)) == 4
    world.land_all()
    world.pump()
    assert len(world.d.sent(Received)) == 4
    assert world.d_state(5) is R.GONE


def test_prefill_computed_by_a_grant_before_the_leg_streams_as_in_early() -> None:
    world = ahead()
    world.p.take(world.leg(5, PAGE))
    computed(world, 5)
    world.d.take(world.legs[5])
    world.pump()
    world.land_all()
    world.pump()
    assert len(world.d.all(RunDecode)) == 1


def test_a_grant_between_the_last_token_and_the_release_does_not_fail_the_room() -> None:
    world = ahead()
    world.meet(5)
    world.sample(5)
    receiver = world.receiver(5)
    receiver.computed(receiver.links[0])
    world.d.take(world.leg(6))
    world.pump()
    assert world.p_state(5) is S.STREAMING
    world.release(5)
    world.land_all()
    assert world.p_state(5) is S.SENT
