"""Clocks: one heap for all of them, and which clock ends what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.deadlines import Timers
from pdplane.core.effects import Note
from pdplane.core.events import Drain, Released
from pdplane.core.rooms.table import R, S

from .facing import Facing, limits

Key = tuple[str, int]


def drain(timers: Timers[Key], now: float) -> list[Key]:
    found = []
    while (key := timers.pop_due(now)) is not None:
        found.append(key)
    return found


def test_an_expired_clock_never_hides_behind_a_renewed_one() -> None:
    timers: Timers[Key] = Timers()
    timers.set(("lease", 1), 10.0)
    timers.set(("lease", 2), 11.0)
    timers.set(("lease", 1), 100.0)
    assert timers.next_due() == 11.0
    assert drain(timers, 12.0) == [("lease", 2)]
    assert timers.next_due() == 100.0


def test_a_renewed_clock_may_also_move_forward() -> None:
    timers: Timers[Key] = Timers()
    timers.set(("a", 1), 10.0)
    timers.set(("a", 1), 5.0)
    assert drain(timers, 5.0) == [("a", 1)]
    assert drain(timers, 20.0) == []


def test_a_cleared_clock_does_not_go_off_and_may_be_set_again() -> None:
    timers: Timers[Key] = Timers()
    timers.set(("a", 1), 5.0)
    timers.clear(("a", 1))
    timers.clear(("a", 1))
    assert timers.next_due() is None
    timers.set(("a", 1), 5.0)
    assert drain(timers, 5.0) == [("a", 1)]


def test_renewals_do_not_pile_up() -> None:
    timers: Timers[Key] = Timers()
    for tick in range(10_000):
        timers.set(("a", 1), float(tick))
    assert len(timers._heap) < 100


@given(
    st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 20))), max_size=300), st.integers(0, 20)
)
def test_due_is_what_was_last_set_and_not_cleared(steps: list[tuple[int, int | None]], now: int) -> None:
    timers: Timers[Key] = Timers()
    model: dict[Key, float] = {}
    for number, when in steps:
        key = ("k", number)
        if when is None:
            timers.clear(key)
            model.pop(key, None)
        else:
            timers.set(key, float(when))
            model[key] = float(when)
    assert timers.next_due() == min(model.values(), default=None)
    found = drain(timers, float(now))
    assert sorted(found) == sorted(key for key, when in model.items() if when <= now)
    assert [model[key] for key in found] == sorted(model[key] for key in found)


# --- which clock ends what ------------------------------------------------------------------------------------------


def test_the_deadline_ends_a_room_on_both_sides_in_every_phase() -> None:
    world = Facing()
    world.meet(5, deadline=20.0)
    world.wait(19.9)
    assert world.states(5) == (R.GRANTED, S.STREAMING)
    world.wait(0.2)
    assert world.d.failed("r5").status == world.p.failed("r5").status == 504
    world.release(5)
    world.pump()
    assert world.idle()


def test_the_deadline_ends_what_runs_too() -> None:
    world = Facing()
    world.meet(5, deadline=20.0)
    world.send_all(5)
    world.pump()
    world.wait(21.0)
    assert world.d.failed("r5").code == "deadline"
    assert "20" in world.d.failed("r5").message
    assert world.d.free < world.d.node.limits.pages
    world.d.take(Released(rid=world.rid(5)))
    assert world.idle()


def test_waiting_for_pages_has_a_clock_of_its_own_and_ends_with_retry_after() -> None:
    world = Facing(d_limits=limits(pages=3, queue_limit_s=5.0, progress_limit_s=1000.0))
    world.meet(1)
    world.meet(2)
    world.wait(5.1)
    cause = world.d.failed("r2")
    assert (cause.status, cause.retryable) == (429, True)
    assert cause.retry_after_s
    assert world.d_state(1) is R.GRANTED  # the queue's clock stops with the grant


def test_no_progress_ends_a_granted_room_and_progress_resets_the_clock() -> None:
    world = Facing(d_limits=limits(progress_limit_s=10.0))
    world.meet(5)
    world.wait(8.0)
    world.compute(5, 20)  # the next beat tells
    world.wait(8.0)
    assert world.d_state(5) is R.GRANTED
    world.land_all()
    world.wait(9.0)
    assert world.d_state(5) is R.GRANTED
    world.wait(3.0)
    assert world.d.failed("r5").code == "no_progress"


def test_a_room_that_prefill_still_queues_is_not_stuck() -> None:
    world = Facing(d_limits=limits(progress_limit_s=5.0, queue_limit_s=5.0), p_limits=limits(max_running=1))
    world.meet(1)
    world.meet(2)
    for tokens in range(1, 16):
        world.compute(1, tokens)
        world.wait(2.0)
    assert world.states(2) == (R.GRANTED, S.ARMED)


def test_a_grant_without_a_leg_ends_after_ten_seconds() -> None:
    world = Facing(fence=False)
    world.d.take(world.leg(5))
    world.pump()
    world.wait(9.9)
    assert world.d_state(5) is R.GRANTED
    world.wait(0.2)
    assert world.d.failed("r5").code == "no_leg"
    assert world.idle()


def test_a_leg_without_a_decode_ends_after_ten_seconds() -> None:
    world = Facing()
    world.p.take(world.leg(5))
    world.wait(9.9)
    assert world.p_state(5) is S.WAITING
    world.wait(0.2)
    assert world.p.failed("r5").code == "no_decode"
    assert world.p.node.live == 0


def test_a_leg_whose_decode_waits_for_pages_waits_with_it() -> None:
    world = Facing(d_limits=limits(pages=3, progress_limit_s=1000.0))
    world.meet(1)
    world.meet(2)
    world.wait(30.0)
    assert world.states(2) == (R.ALLOCATING, S.WAITING)


def test_what_is_finished_is_harvested_before_clocks_of_what_waits() -> None:
    world = Facing(d_limits=limits(max_running=1))
    world.run_to_batch(1)
    world.meet(2, deadline=20.0)
    world.send_all(2)
    world.pump()
    assert world.d_state(2) is R.SUCCESS
    world.now = 20.0
    world.d.take(Released(rid=world.rid(1)))
    assert world.d_state(2) is R.GONE
    assert world.d.answers("r2") == []


def test_a_draining_node_finishes_what_it_has_and_takes_nothing_new() -> None:
    world = Facing()
    world.meet(5)
    world.d.take(Drain("going down"))
    world.p.take(Drain("going down"))
    world.legs_in(6)
    assert world.d.failed("r6").status == world.p.failed("r6").status == 503
    assert "going down" in world.d.failed("r6").message
    world.send_all(5)
    world.pump()
    assert len(world.decode.batch) == 1


def test_the_record_tells_every_state_once_and_in_order() -> None:
    world = Facing()
    world.run_to_batch(5)
    d_states = [note.state for note in world.d.all(Note) if note.state in set(R)]
    p_states = [note.state for note in world.p.all(Note) if note.state in set(S)]
    assert d_states == ["Queued", "Allocating", "Granted", "Success", "Gone"]
    assert p_states == ["Waiting", "Armed", "Streaming", "Flushing", "Sent", "Gone"]
