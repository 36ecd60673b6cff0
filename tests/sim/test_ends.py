"""The checkers of ends by themselves: one end a leg, agreed by both sides, and no wait without end."""

from __future__ import annotations

import pytest

from pdplane.core.effects import AnswerFailed, AnswerRow, Effect, Note, RestoreEngine, RetractEngine, RunDecode
from pdplane.core.errors import client_left
from pdplane.core.events import LegArrived, Released
from pdplane.core.frames import PromptId, Row
from pdplane.core.ids import Rid, Room
from pdplane.sim.checkers import Violation
from pdplane.sim.ends import Ends, Waits

from .watched import Worker, calm_plan, pages

ROW = Row(first_token=1, prompt_tokens=4, prompt_digest=b"")
D, P = Worker("decode"), Worker("prefill")


def _ends() -> Ends:
    ends = Ends(calm_plan())
    for who in (D, P):
        leg = LegArrived(rid=Rid(f"a{who.side[0]}"), room=Room(5), prompt=PromptId(b"", 4), max_new=2, deadline=300.0)
        ends.event(who, leg, 1.0)
    return ends


def test_a_second_answer_breaks_the_verdict() -> None:
    ends = _ends()
    ends.effect(D, AnswerFailed(Rid("ad"), client_left("decode")), 2.0)
    with pytest.raises(Violation, match="verdict: d0#1 answers ad a second time"):
        ends.effect(D, AnswerRow(Rid("ad"), ROW), 3.0)


def test_a_failure_must_cross_in_time() -> None:
    ends = _ends()
    ends.effect(P, AnswerFailed(Rid("ap"), client_left("prefill")), 2.0)
    ends.crossed(2.0 + ends.bound_s)
    with pytest.raises(Violation, match=r"crossing: attempt a: one side failed .* ad at d0#1 has not ended"):
        ends.crossed(2.1 + ends.bound_s)


def test_prefills_good_end_starts_no_clock_for_decode() -> None:
    ends = _ends()
    ends.effect(P, AnswerRow(Rid("ap"), ROW), 2.0)
    ends.crossed(200.0)


def test_a_leg_that_never_ends_is_named() -> None:
    ends = _ends()
    ends.effect(P, AnswerRow(Rid("ap"), ROW), 2.0)
    with pytest.raises(Violation, match="end: ad at d0#1 never ended"):
        ends.all_over()


def test_a_room_is_taken_once() -> None:
    ends = _ends()
    ends.effect(D, Note(Rid("ad"), Room(5), "Queued"), 1.0)
    with pytest.raises(Violation, match="room: d0#1 takes b for room 5"):
        ends.effect(D, Note(Rid("b"), Room(5), "Queued"), 2.0)


def test_decode_takes_only_what_prefill_has_sent() -> None:
    ends = _ends()
    with pytest.raises(Violation, match="agreement: d0#1 takes ad as handed off, and no prefill has sent it"):
        ends.effect(D, RunDecode(Rid("ad"), pages(1), ROW, 2), 2.0)
    ends.effect(P, AnswerRow(Rid("ap"), ROW), 2.0)
    ends.effect(D, RunDecode(Rid("ad"), pages(1), ROW, 2), 2.1)


def test_what_prefill_has_sent_never_becomes_failed() -> None:
    ends = _ends()
    ends.effect(P, AnswerRow(Rid("ap"), ROW), 2.0)
    with pytest.raises(Violation, match="verdict: p0#1 answers ap a second time"):
        ends.effect(P, AnswerFailed(Rid("ap"), client_left("prefill")), 3.0)


BEGINS = {
    "is laid aside": (D, RetractEngine(Rid("a"), pages(1))),
    "is handed off and does not run": (D, Note(Rid("a"), Room(5), "Success")),
    "is held": (P, Note(Rid("a"), Room(5), "Held")),
}


@pytest.mark.parametrize("what", BEGINS)
def test_a_wait_without_end_is_named(what: str) -> None:
    waits = Waits(calm_plan())
    waits.effect(*BEGINS[what], 1.0)
    waits.bounded(2.0)
    with pytest.raises(Violation, match=f"wait: a {what} at .0#1 since 1.0 s"):
        waits.bounded(1000.0)


@pytest.mark.parametrize(
    ("what", "over"),
    [
        ("is laid aside", RestoreEngine(Rid("a"), pages(2))),
        ("is laid aside", AnswerFailed(Rid("a"), client_left("decode"))),
        ("is handed off and does not run", Note(Rid("a"), Room(5), "Gone")),
        ("is held", Note(Rid("a"), Room(5), "Flushing")),
    ],
)
def test_a_wait_that_is_over_has_no_bound(what: str, over: Effect) -> None:
    waits = Waits(calm_plan())
    who, begins = BEGINS[what]
    waits.effect(who, begins, 1.0)
    waits.effect(who, over, 2.0)
    waits.bounded(1000.0)


def test_a_request_that_leaves_the_engine_waits_no_more() -> None:
    waits = Waits(calm_plan())
    waits.effect(*BEGINS["is laid aside"], 1.0)
    waits.event(D, Released(rid=Rid("a")))
    waits.bounded(1000.0)
