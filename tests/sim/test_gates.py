"""What leaves a decode, and when: nothing of a gated run before Ungate, and of a run that was taken back nothing."""

from __future__ import annotations

from pdplane.core.effects import AbortEngine, AnswerFailed, Effect, RunWhole, Ungate
from pdplane.core.errors import client_left
from pdplane.core.events import Computed, Event, Released
from pdplane.core.ids import Rid
from pdplane.sim.gates import Gates

from .watched import Worker, pages, work

D = Worker("decode")
A = Rid("a")


class Heard:
    def __init__(self, *what: Effect | Event) -> None:
        self.said: list[str] = []
        self.gates = Gates(
            {A: work("a")}, lambda who, rid: self.said.append("first"), lambda who, rid: self.said.append("end")
        )
        self.now(*what)

    def now(self, *what: Effect | Event) -> None:
        for one in what:
            if isinstance(one, (Computed, Released)):
                self.gates.event(D, one)
            else:
                self.gates.effect(D, one)  # type: ignore[arg-type]


def run(gated: bool) -> RunWhole:
    return RunWhole(A, pages(1), 2, gated=gated)


FIRST, END = Computed(rid=A, tokens=4), Released(rid=A)


def test_an_open_run_says_its_first_token_once_and_its_end() -> None:
    heard = Heard(run(gated=False), Computed(rid=A, tokens=2))
    assert heard.said == []
    heard.now(FIRST, Computed(rid=A, tokens=5), END)
    assert heard.said == ["first", "end"]


def test_a_gated_run_says_nothing_before_it_is_let_out() -> None:
    heard = Heard(run(gated=True), FIRST)
    assert heard.said == []
    heard.now(Ungate(A))
    assert heard.said == ["first"]
    heard.now(END)
    assert heard.said == ["first", "end"]


def test_a_gated_run_that_has_ended_says_all_of_it_when_it_is_let_out() -> None:
    heard = Heard(run(gated=True), FIRST, END)
    assert heard.said == []
    heard.now(Ungate(A))
    assert heard.said == ["first", "end"]


def test_a_run_that_was_taken_back_has_said_nothing_and_begins_anew() -> None:
    heard = Heard(run(gated=True), FIRST, AbortEngine(A), END)
    assert heard.said == []
    heard.now(run(gated=False), FIRST, END)
    assert heard.said == ["first", "end"]


def test_after_a_failure_nothing_is_said() -> None:
    heard = Heard(run(gated=False), AnswerFailed(A, client_left("decode")), FIRST, END)
    assert heard.said == []


def test_an_end_by_an_error_is_no_answer() -> None:
    heard = Heard(run(gated=False), Released(rid=A, error="the model failed"))
    assert heard.said == []
