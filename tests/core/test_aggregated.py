"""The aggregated worker's core: the same ledger, reserve and batch, without a peer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pdplane.core.aggregated import AggregatedNode
from pdplane.core.effects import (
    AbortEngine,
    AnswerFailed,
    Effect,
    ExtendPages,
    RestoreEngine,
    RetractEngine,
    RunWhole,
)
from pdplane.core.errors import client_left
from pdplane.core.events import Cancel, Computed, Drain, Event, JobArrived, Released, Retracted, Tick
from pdplane.core.ids import Rid
from pdplane.core.node import Limits

E = TypeVar("E")


def only(items: Iterable[E]) -> E:
    (item,) = items
    return item


class Alone:
    def __init__(self, **more: object) -> None:
        self.node = AggregatedNode(Limits(**({"pages": 16, "page_size": 16} | more)))  # type: ignore[arg-type]
        self.log: list[Effect] = []

    def take(self, event: Event, now: float = 0.0) -> list[Effect]:
        effects = self.node.handle(event, now)
        assert self.node.audit() == []
        self.log += effects
        return effects

    def job(
        self, rid: str, tokens: int = 40, max_new: int = 4, deadline: float = 100.0, priority: int = 0, now: float = 0.0
    ) -> None:
        job = JobArrived(rid=Rid(rid), prompt_tokens=tokens, max_new=max_new, deadline=deadline, priority=priority)
        self.take(job, now)

    def computed(self, rid: str, tokens: int) -> None:
        self.take(Computed(rid=Rid(rid), tokens=tokens))

    def failed(self, rid: str) -> AnswerFailed:
        return only(e for e in self.log if isinstance(e, AnswerFailed) and e.rid == rid)

    def ran(self) -> list[str]:
        return self.rids(RunWhole)

    def rids(self, kind: type[E]) -> list[str]:
        return [effect.rid for effect in self.log if isinstance(effect, kind)]  # type: ignore[union-attr]

    def idle(self) -> bool:
        left = list(self.node.timers._due)
        return self.node.live == 0 and self.node.ledger.free_count == self.node.limits.pages and not left


def test_a_job_runs_grows_and_frees() -> None:
    alone = Alone()
    alone.job("a", tokens=40, max_new=40)
    assert alone.ran() == ["a"]
    alone.take(Computed(rid=Rid("a"), tokens=40))
    assert len([e for e in alone.log if isinstance(e, ExtendPages)]) == 1
    alone.take(Released(rid=Rid("a")))
    assert alone.idle()
    assert not [e for e in alone.log if isinstance(e, AnswerFailed)]


def test_a_job_waits_for_pages_and_for_a_place() -> None:
    alone = Alone(pages=4, max_running=2)
    for rid in "abc":
        alone.job(rid, tokens=32, max_new=1)
    assert alone.ran() == ["a", "b"]
    assert alone.node.waiting == 1
    alone.take(Released(rid=Rid("a")))
    assert alone.ran() == ["a", "b", "c"]


def test_a_waiting_job_is_cancelled_for_free() -> None:
    alone = Alone(max_running=1)
    alone.job("a")
    alone.job("b")
    alone.take(Cancel(Rid("b"), client_left("aggregated")))
    assert alone.failed("b").cause.code == "client_left"
    alone.take(Released(rid=Rid("a")))
    assert alone.ran() == ["a"]
    assert alone.idle()


def test_a_running_job_is_aborted_and_answered_once() -> None:
    alone = Alone()
    alone.job("a")
    alone.take(Cancel(Rid("a"), client_left("aggregated")))
    alone.take(Cancel(Rid("a"), client_left("aggregated")))
    assert [e for e in alone.log if isinstance(e, AbortEngine)] == [AbortEngine(Rid("a"))]
    assert alone.node.ledger.free_count < alone.node.limits.pages
    alone.take(Released(rid=Rid("a")))
    assert alone.failed("a").cause.code == "client_left"
    assert alone.idle()


def test_waiting_too_long_is_429_and_a_deadline_is_504() -> None:
    alone = Alone(max_running=1, queue_limit_s=5.0)
    alone.job("a", deadline=8.0)
    alone.job("b")
    alone.job("c", deadline=3.0)
    alone.take(Tick(), 3.0)
    assert alone.failed("c").cause.status == 504
    alone.take(Tick(), 5.0)
    assert alone.failed("b").cause.status == 429
    alone.take(Tick(), 8.0)
    assert alone.failed("a").cause.status == 504
    alone.take(Released(rid=Rid("a")), 9.0)
    assert alone.idle()


def test_what_cannot_fit_is_refused_before_anything_is_allocated() -> None:
    alone = Alone(pages=2, max_queue=1)
    alone.job("long", tokens=33)
    assert alone.failed("long").cause.status == 400
    alone.job("a", tokens=32, max_new=1)
    alone.job("b")
    alone.take(Drain())
    alone.job("late", tokens=1)
    assert alone.failed("late").cause.status == 503


def test_a_rid_in_use_is_refused_and_the_first_untouched() -> None:
    alone = Alone(max_running=1)
    alone.job("a")
    alone.job("b")
    for rid in ("a", "b"):
        effects = alone.take(JobArrived(rid=Rid(rid), prompt_tokens=1, max_new=1, deadline=9.0))
        assert only(e for e in effects if isinstance(e, AnswerFailed)).cause.status == 409
    alone.take(Released(rid=Rid("a")))
    assert alone.ran() == ["a", "b"]
    alone.take(Released(rid=Rid("b")))
    assert alone.idle()


def test_a_pool_cuts_what_it_cannot_hold() -> None:
    alone = Alone(pages=2)
    alone.job("a", tokens=30, max_new=50)
    assert only(e for e in alone.log if isinstance(e, RunWhole)).max_new == 3


def test_the_latest_job_gives_way_and_comes_back() -> None:
    alone = Alone(pages=6, reserve_tokens=0)
    for rid in ("a", "b"):
        alone.job(rid, tokens=32, max_new=33)
    for rid in ("a", "b"):
        alone.computed(rid, 32)
    assert alone.rids(ExtendPages) == ["a", "b"]
    alone.computed("a", 48)
    assert alone.rids(RetractEngine) == ["b"]
    alone.take(Retracted(rid=Rid("b"), tokens=33))
    assert alone.rids(ExtendPages) == ["a", "b", "a"]
    assert alone.rids(RestoreEngine) == []
    assert alone.node.live == 2
    alone.take(Released(rid=Rid("a")))
    assert alone.rids(RestoreEngine) == ["b"]
    alone.take(Released(rid=Rid("b")))
    assert alone.idle()


def test_a_job_does_not_give_way_while_its_prompt_is_computed() -> None:
    """An engine lays no half prompt aside; the prompt needs no page more, so its end can be waited for."""
    alone = Alone(pages=6, reserve_tokens=0)
    for rid in ("a", "b"):
        alone.job(rid, tokens=32, max_new=49)
    for tokens in (32, 48, 64):
        alone.computed("a", tokens)
    alone.computed("b", 16)
    assert alone.node.ledger.free_count == 0
    assert alone.rids(RetractEngine) == []
    alone.computed("b", 32)
    assert alone.rids(RetractEngine) == ["b"]


def test_the_last_that_can_gives_way_itself_to_a_prompt_before_it() -> None:
    alone = Alone(pages=6, reserve_tokens=0)
    alone.job("prompt", tokens=32, max_new=1)
    alone.job("a", tokens=32, max_new=49)
    for tokens in (32, 48, 64):
        alone.computed("a", tokens)
    assert alone.rids(RetractEngine) == ["a"]
    alone.take(Retracted(rid=Rid("a"), tokens=64))
    assert alone.rids(RestoreEngine) == []
    alone.take(Released(rid=Rid("prompt")))
    assert alone.rids(RestoreEngine) == ["a"]


def test_no_job_starts_while_one_of_its_priority_is_laid_aside() -> None:
    alone = Alone(pages=6, reserve_tokens=0)
    for rid in ("a", "b"):
        alone.job(rid, tokens=32, max_new=33)
    for rid in ("a", "b"):
        alone.computed(rid, 32)
    alone.computed("a", 48)
    alone.job("small", tokens=1, max_new=1)
    alone.take(Retracted(rid=Rid("b"), tokens=33))
    alone.job("dear", tokens=1, max_new=1, priority=1)
    assert alone.ran() == ["a", "b", "dear"]


def test_a_job_of_higher_priority_starts_first() -> None:
    alone = Alone(max_running=1)
    alone.job("a")
    alone.job("b")
    alone.job("dear", priority=1)
    alone.take(Released(rid=Rid("a")))
    assert alone.ran() == ["a", "dear"]
