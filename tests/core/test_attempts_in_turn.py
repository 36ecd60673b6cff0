"""Legs that leave one after the other: prefill's hold is let go once, whatever happens between the hops."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdplane.core.attempts import (
    CHOOSING,
    DECODE,
    HANDOFF,
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
    OpenLeg,
    Release,
    ReleaseHold,
    Reply,
    RequestAttempts,
)
from pdplane.core.errors import Cause, client_left, deadline

BAD = Failure(cause=Cause("bad", "no", 400))
DOWN = Failure(cause=Cause("down", "reset", 502, retryable=True), answered=False)
FULL = Failure(cause=Cause("overloaded", "full", 429, retryable=True))
STALE = Failure(cause=Cause("stale", "closed", 502, retryable=True), answered=False, blames=NOBODY)
LOST = Failure(cause=Cause("expired", "too late", 502, retryable=True), blames=HANDOFF)
LEFT = client_left("router")
LATE = deadline("router", 300)


def opened(retries: int = 1) -> RequestAttempts:
    machine = RequestAttempts(retries)
    assert machine.pair_chosen("p1", "d1", in_turn=True) == (OpenLeg(PREFILL, 0),)
    return machine


def handed_over(retries: int = 1) -> RequestAttempts:
    """Prefill has answered, and holds; decode's leg is open."""
    machine = opened(retries)
    assert machine.prefill_done(0, held=True) == (Release(PREFILL), OpenLeg(DECODE, 0))
    return machine


def kinds(effects: Effects) -> list[type[Effect]]:
    return [type(effect) for effect in effects]


def test_a_request_without_trouble_releases_nothing() -> None:
    machine = handed_over()
    assert machine.decode_first_byte(0) == (Forward(),)
    assert machine.decode_done(0) == (Release(DECODE), Finish(None), Done())


def test_an_empty_answer_is_proof_too() -> None:
    assert handed_over().decode_done(0) == (Forward(), Release(DECODE), Finish(None), Done())


def test_decode_is_not_open_before_prefill_has_answered() -> None:
    machine = opened()
    assert machine.decode_first_byte(0) == machine.decode_done(0) == machine.decode_failed(0, DOWN) == ()
    assert machine.late == 3
    assert machine.phase == HELD


def test_prefills_refusal_opens_no_second_leg() -> None:
    assert kinds(opened().prefill_failed(0, BAD)) == [Release, Reply, Finish, Done]


def test_prefills_failure_is_tried_elsewhere_from_the_first_leg_on() -> None:
    machine = opened()
    assert machine.prefill_failed(0, DOWN) == (
        EndLeg(PREFILL, DOWN.cause),
        Release(PREFILL),
        Choose(frozenset({"p1"})),
    )
    assert machine.pair_chosen("p2", "d1", in_turn=True) == (OpenLeg(PREFILL, 1),)


def test_a_refusal_of_decode_releases_the_hold_before_the_answer() -> None:
    effects = handed_over().decode_failed(0, BAD)
    assert kinds(effects) == [Release, ReleaseHold, Reply, Finish, Done]


def test_a_decode_that_was_cut_is_ended_before_the_hold_is_released() -> None:
    effects = handed_over().decode_failed(0, DOWN)
    assert kinds(effects) == [EndLeg, Release, ReleaseHold, Choose]


def test_a_retry_never_has_the_hold_of_the_attempt_before() -> None:
    machine = handed_over()
    machine.decode_failed(0, FULL)
    assert machine.pair_chosen("p1", "d2", in_turn=True) == (OpenLeg(PREFILL, 1),)
    assert machine.prefill_done(0, held=True) == ()
    assert machine.prefill_done(1, held=True) == (Release(PREFILL), OpenLeg(DECODE, 1))


def test_a_lost_hold_costs_a_retry_and_excludes_nobody() -> None:
    machine = handed_over()
    assert machine.decode_failed(0, LOST)[-1] == Choose(frozenset())
    machine.pair_chosen("p1", "d1", in_turn=True)
    machine.prefill_done(1, held=True)
    assert kinds(machine.decode_failed(1, LOST)) == [Release, ReleaseHold, Reply, Finish, Done]


def test_a_hold_that_cannot_be_used_is_released_though_its_leg_was_prefills() -> None:
    effects = opened(0).prefill_failed(0, LOST, held=True)
    assert kinds(effects) == [Release, ReleaseHold, Reply, Finish, Done]


def test_an_answer_without_a_hold_owes_no_release() -> None:
    machine = opened()
    machine.prefill_done(0)
    assert kinds(machine.decode_failed(0, BAD)) == [Release, Reply, Finish, Done]


def test_a_client_that_leaves_while_prefill_computes_ends_that_leg_alone() -> None:
    assert opened().cancel(LEFT) == (EndLeg(PREFILL, LEFT), Release(PREFILL), Finish(LEFT), Done())


def test_a_client_that_leaves_between_the_hops_costs_decodes_leg_and_the_hold() -> None:
    effects = handed_over().cancel(LEFT)
    assert effects == (EndLeg(DECODE, LEFT), Release(DECODE), ReleaseHold(LEFT), Finish(LEFT), Done())


def test_a_deadline_between_the_hops_is_answered_and_releases() -> None:
    assert kinds(handed_over().cancel(LATE)) == [EndLeg, Release, ReleaseHold, Reply, Finish, Done]


def test_while_choosing_again_nothing_is_held() -> None:
    machine = handed_over()
    machine.decode_failed(0, FULL)
    assert machine.phase == CHOOSING
    assert kinds(machine.cancel(LEFT)) == [Finish, Done]


def test_after_the_first_byte_the_hold_is_decodes_affair() -> None:
    machine = handed_over()
    machine.decode_first_byte(0)
    assert machine.phase == STREAMING
    assert kinds(machine.decode_failed(0, DOWN)) == [EndLeg, Release, Break, Finish, Done]


def test_a_worker_that_does_both_has_one_leg_in_this_shape_as_well() -> None:
    machine = RequestAttempts()
    assert machine.pair_chosen(None, "w", in_turn=True) == (Open(0),)
    machine.decode_first_byte(0)
    assert machine.decode_done(0) == (Release(DECODE), Finish(None), Done())


def test_a_retry_may_have_the_other_shape() -> None:
    machine = handed_over()
    machine.decode_failed(0, FULL)
    assert machine.pair_chosen("p2", "d2") == (Open(1),)
    assert machine.prefill_done(1) == (Release(PREFILL),)


EVENTS = (
    "pair", "pair_in_turn", "alone", "none", "p_done", "p_held", "p_fail", "p_fail_held", "d_byte", "d_done", "d_fail",
    "left", "deadline", "drain",
)  # fmt: skip
FAILURES = (BAD, DOWN, FULL, STALE, LOST)
Step = tuple[str, int, int]
STEPS = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 4), st.integers(0, 3)), max_size=16)


class Books:
    """Carries effects out on paper, and objects. `held`: the attempt whose hold is neither taken nor released."""

    def __init__(self, machine: RequestAttempts) -> None:
        self.machine = machine
        self.open: set[str] = set()
        self.in_turn = False
        self.held: int | None = None
        self.attempts = self.finished = 0
        self.forwarded = self.answered = self.done = False

    def step(self, name: str, which: int, attempt: int) -> None:
        machine, failure = self.machine, FAILURES[which]
        match name:
            case "pair" | "pair_in_turn":
                self.in_turn = name == "pair_in_turn" if machine.phase == CHOOSING else self.in_turn
                self.take(machine.pair_chosen("p", "d", in_turn=name == "pair_in_turn"))
            case "alone":
                self.in_turn = self.in_turn and machine.phase != CHOOSING
                self.take(machine.pair_chosen(None, "w", in_turn=True))
            case "none":
                self.take(machine.no_pair(LATE))
            case "p_done" | "p_held":
                self.hold(attempt, name == "p_held")
                self.take(machine.prefill_done(attempt, held=name == "p_held"))
            case "p_fail" | "p_fail_held":
                answered = name == "p_fail_held" and failure.answered
                self.hold(attempt, answered)
                self.take(machine.prefill_failed(attempt, failure, held=answered and self.in_turn))
            case "d_byte" | "d_done":
                if attempt == machine.attempt and DECODE in self.open:
                    self.held = None  # taken
                self.take(machine.decode_first_byte(attempt) if name == "d_byte" else machine.decode_done(attempt))
            case "d_fail":
                self.take(machine.decode_failed(attempt, failure))
            case "drain":
                self.take(machine.drain_limit())
            case _:
                self.take(machine.cancel(LEFT if name == "left" else LATE))

    def hold(self, attempt: int, held: bool) -> None:
        """Prefill answers a leg that is open, and keeps the KV."""
        if held and self.in_turn and attempt == self.machine.attempt and PREFILL in self.open:
            assert self.held is None
            self.held = attempt

    def take(self, effects: Effects) -> None:
        for effect in effects:
            assert not self.done, "an effect after the last"
            match effect:
                case Open(attempt):
                    self.began(attempt)
                    self.open = {PREFILL, DECODE} if self.machine.prefill is not None else {DECODE}
                case OpenLeg(side, attempt):
                    assert not self.open, "two legs of a pair that leave in turn"
                    if side == PREFILL:
                        self.began(attempt)
                    assert attempt == self.attempts - 1
                    self.open = {side}
                case ReleaseHold():
                    assert self.held is not None, "a release without a hold, or the second one"
                    assert not self.open, "released while a leg may still fetch it"
                    self.held = None
                case Release(side):
                    self.open.remove(side)
                case EndLeg(side, _):
                    assert side in self.open
                case Choose():
                    assert self.held is None, "another attempt while the hold of this one stands"
                case Forward():
                    assert DECODE in self.open, "an answer of a leg that is not open"
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
                    assert self.held is None, "the end, with a hold left at prefill"
                    self.done = True

    def began(self, attempt: int) -> None:
        assert attempt == self.attempts
        assert not self.open
        assert self.held is None
        assert not self.forwarded, "a retry after the first byte"
        self.attempts += 1


@settings(max_examples=1000)
@given(STEPS, st.integers(0, 3))
def test_any_order_of_events_lets_go_of_every_hold_once(events: list[Step], retries: int) -> None:
    """Each hold is taken or released exactly once, each leg released once; one verdict, one answer at most."""
    machine = RequestAttempts(retries)
    books = Books(machine)
    stale = sum(FAILURES[which] is STALE for name, which, _ in events if name.endswith(("fail", "fail_held")))
    for event in events:
        books.step(*event)
        assert books.done == machine.over
        assert books.attempts <= retries + 1 + stale
    books.take(machine.cancel(LEFT))
    books.take(machine.drain_limit())
    assert books.done
    assert not books.open
    assert books.held is None
    assert books.finished == 1
