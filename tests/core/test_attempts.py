"""The machine of a request and its attempts: every end is reached once, every leg is released once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdplane.core.attempts import (
    CHOOSING,
    DECODE,
    DRAINING,
    HELD,
    NOBODY,
    PREFILL,
    STREAMING,
    Break,
    Choose,
    Done,
    Effect,
    Effects,
    EndLeg,
    Failure,
    Finish,
    Forward,
    Open,
    Release,
    Reply,
    RequestAttempts,
    retry_safe,
)
from pdplane.core.errors import Cause, client_left, deadline

BAD = Failure(cause=Cause("bad", "no", 400))
DOWN = Failure(cause=Cause("down", "reset", 502, retryable=True), answered=False)
FULL = Failure(cause=Cause("overloaded", "full", 429, retryable=True))
STALE = Failure(cause=Cause("stale", "closed", 502, retryable=True), answered=False, blames=NOBODY)
LEFT = client_left("router")
LATE = deadline("router", 300)


def opened(retries: int = 1) -> RequestAttempts:
    machine = RequestAttempts(retries)
    assert machine.pair_chosen("p1", "d1") == (Open(0),)
    return machine


def kinds(effects: Effects) -> list[type[Effect]]:
    return [type(effect) for effect in effects]


def test_a_request_without_trouble() -> None:
    machine = opened()
    assert machine.prefill_done(0) == (Release(PREFILL),)
    assert machine.decode_first_byte(0) == (Forward(),)
    assert machine.decode_done(0) == (Release(DECODE), Finish(None), Done())
    assert machine.over
    assert machine.cause is None


def test_a_finished_answer_does_not_wait_for_prefill() -> None:
    machine = opened()
    machine.decode_first_byte(0)
    assert machine.decode_done(0) == (Release(DECODE), Finish(None))
    assert machine.phase == DRAINING
    assert machine.prefill_done(0) == (Release(PREFILL), Done())


def test_a_hung_prefill_is_ended_at_the_drain_limit() -> None:
    machine = opened()
    machine.decode_first_byte(0)
    machine.decode_done(0)
    assert kinds(machine.drain_limit()) == [EndLeg, Release, Done]


def test_an_empty_answer_counts_as_its_own_first_byte() -> None:
    machine = opened()
    machine.prefill_done(0)
    assert machine.decode_done(0) == (Forward(), Release(DECODE), Finish(None), Done())


def test_prefills_4xx_ends_decode_and_is_the_answer() -> None:
    machine = opened()
    effects = machine.prefill_failed(0, BAD)
    assert kinds(effects) == [Release, EndLeg, Release, Reply, Finish, Done]
    assert effects[1].side == DECODE  # type: ignore[union-attr]
    assert Reply(BAD) in effects
    assert machine.cause == BAD.cause


def test_a_leg_that_did_not_answer_is_aborted_as_well() -> None:
    machine = opened()
    ended = [effect.side for effect in machine.decode_failed(0, DOWN) if isinstance(effect, EndLeg)]
    assert ended == [DECODE, PREFILL]


def test_a_retry_avoids_the_worker_to_blame_and_has_a_new_number() -> None:
    machine = opened()
    assert machine.prefill_failed(0, FULL)[-1] == Choose(frozenset({"p1"}))
    assert machine.phase == CHOOSING
    assert machine.pair_chosen("p2", "d1") == (Open(1),)
    assert machine.decode_failed(1, DOWN)[-3:] == (Reply(DOWN), Finish(DOWN.cause), Done())


def test_decode_may_blame_prefill() -> None:
    machine = opened()
    failure = Failure(cause=DOWN.cause, blames=PREFILL)
    assert machine.decode_failed(0, failure)[-1] == Choose(frozenset({"p1"}))


def test_a_stale_connection_blames_nobody_and_costs_no_retry() -> None:
    machine = opened()
    assert machine.decode_failed(0, STALE)[-1] == Choose(frozenset())
    machine.pair_chosen("p1", "d1")
    assert machine.decode_failed(1, DOWN)[-1] == Choose(frozenset({"d1"}))
    machine.pair_chosen("p1", "d2")
    assert isinstance(machine.decode_failed(2, DOWN)[-3], Reply)


def test_stale_connections_are_not_tried_without_end() -> None:
    machine = opened()
    attempts = 0
    while machine.decode_failed(attempts, STALE)[-1] == Choose(frozenset()):
        machine.pair_chosen("p1", "d1")
        attempts += 1
    assert attempts == 3


def test_with_nobody_left_the_failure_is_the_answer() -> None:
    machine = opened()
    machine.prefill_failed(0, FULL)
    assert machine.no_pair(Cause("none", "nobody", 503)) == (Reply(FULL), Finish(FULL.cause), Done())


def test_without_any_pair_the_reason_is_the_answer() -> None:
    cause = Cause("none", "no prefill is ready", 503)
    assert RequestAttempts().no_pair(cause) == (Reply(Failure(cause=cause)), Finish(cause), Done())


def test_no_retries_means_none() -> None:
    assert isinstance(opened(0).prefill_failed(0, DOWN)[-3], Reply)


def test_after_the_first_byte_decodes_failure_breaks_the_answer() -> None:
    machine = opened()
    machine.decode_first_byte(0)
    effects = machine.decode_failed(0, DOWN)
    assert kinds(effects) == [EndLeg, Release, EndLeg, Release, Break, Finish, Done]


def test_after_the_first_byte_prefills_failure_changes_nothing() -> None:
    machine = opened()
    machine.decode_first_byte(0)
    assert machine.prefill_failed(0, DOWN) == (EndLeg(PREFILL, DOWN.cause), Release(PREFILL))
    assert machine.decode_done(0)[1] == Finish(None)


def test_a_client_that_left_gets_no_answer() -> None:
    assert kinds(opened().cancel(LEFT)) == [EndLeg, Release, EndLeg, Release, Finish, Done]


def test_a_deadline_is_answered_before_the_first_byte_and_breaks_after_it() -> None:
    assert Reply in kinds(opened().cancel(LATE))
    machine = opened()
    machine.decode_first_byte(0)
    assert Break in kinds(machine.cancel(LATE))


def test_events_of_an_earlier_attempt_are_late() -> None:
    machine = opened()
    machine.prefill_failed(0, FULL)
    machine.pair_chosen("p2", "d2")
    assert machine.decode_done(0) == machine.prefill_done(0) == machine.decode_first_byte(0) == ()
    assert machine.late == 3
    assert machine.phase == HELD


def test_an_aggregated_worker_has_one_leg() -> None:
    machine = RequestAttempts()
    machine.pair_chosen(None, "w")
    machine.decode_first_byte(0)
    assert machine.phase == STREAMING
    assert machine.decode_done(0) == (Release(DECODE), Finish(None), Done())


@pytest.mark.parametrize(
    ("status", "said", "safe"),
    [
        (400, None, False), (400, True, False), (409, True, False), (408, None, False), (429, None, True),
        (429, False, False), (500, None, True), (500, False, False), (502, None, True), (503, None, True),
        (504, None, False), (504, True, True), (501, None, False),
    ],
)  # fmt: skip
def test_what_may_be_tried_again(status: int, said: bool | None, safe: bool) -> None:
    assert retry_safe(status, said) is safe


EVENTS = ("pair", "none", "p_done", "p_fail", "d_byte", "d_done", "d_fail", "left", "deadline", "drain")
FAILURES = (BAD, DOWN, FULL, STALE)
Step = tuple[str, int, int]
STEPS = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3), st.integers(0, 3)), max_size=14)


def step(machine: RequestAttempts, name: str, which: int, attempt: int) -> Effects:
    match name:
        case "pair":
            return machine.pair_chosen("p", "d")
        case "none":
            return machine.no_pair(LATE)
        case "p_done":
            return machine.prefill_done(attempt)
        case "p_fail":
            return machine.prefill_failed(attempt, FAILURES[which])
        case "d_byte":
            return machine.decode_first_byte(attempt)
        case "d_done":
            return machine.decode_done(attempt)
        case "d_fail":
            return machine.decode_failed(attempt, FAILURES[which])
        case "drain":
            return machine.drain_limit()
        case _:
            return machine.cancel(LEFT if name == "left" else LATE)


@settings(max_examples=600)
@given(STEPS, st.integers(0, 3))
def test_any_order_of_events_keeps_the_books(events: list[Step], retries: int) -> None:
    """Each opened leg is released exactly once and ended before it is forgotten; one verdict; one reply at most."""
    machine, shell = RequestAttempts(retries), Books()
    stale = sum(name in ("p_fail", "d_fail") and FAILURES[which] is STALE for name, which, _ in events)
    for event in events:
        shell.take(step(machine, *event))
        assert shell.done == machine.over
        assert shell.opens <= retries + 1 + stale  # a stale connection says nothing of the worker, and costs no retry
    shell.take(machine.cancel(LEFT))
    shell.take(machine.drain_limit())
    assert shell.done
    assert not shell.open
    assert shell.finished == 1


class Books:
    """Carries effects out on paper, and objects."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.opens = self.finished = 0
        self.forwarded = self.done = self.answered = False

    def take(self, effects: Effects) -> None:
        for effect in effects:
            assert not self.done, "an effect after the last"
            match effect:
                case Open(attempt):
                    assert attempt == self.opens
                    assert not self.open
                    assert not self.forwarded, "a retry after the first byte"
                    self.opens += 1
                    self.open = {PREFILL, DECODE}
                case Release(side):
                    self.open.remove(side)
                case EndLeg(side, _):
                    assert side in self.open
                case Forward():
                    assert not self.answered
                    self.forwarded = True
                case Reply():
                    assert not self.forwarded
                    assert not self.answered
                    self.answered = True
                case Break():
                    assert self.forwarded
                case Finish():
                    self.finished += 1
                    assert self.finished == 1
                case Done():
                    assert not self.open
                    assert self.finished == 1
                    self.done = True
