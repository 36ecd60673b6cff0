"""A fault of our own code: the worker says that it is broken, ends what it has, takes no more, drags nobody down."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdplane.core.effects import Effect
from pdplane.core.events import Event, Tick
from pdplane.core.pages import Page
from pdplane.worker.background import task

from .fleets import COMPLETIONS, Fleet, Member, Talk, completion, fleet, member, pairing, until

BODY = completion()[1]


def breaks(one: Member) -> None:
    """Its core fails an assertion at the next event."""

    def handle(event: Event, now: float) -> list[Effect]:
        raise AssertionError("a page is not where it should be")

    one.shell.node.handle = handle  # type: ignore[method-assign]


async def is_out(one: Member, why: str) -> None:
    """Unhealthy with its reason, and closed to newcomers."""
    health = await one.get("/health")
    assert health.status_code == 503
    assert why in health.json()["broken"]
    assert (health.json()["live"], health.json()["ready"]) == (False, False)
    assert one.shell.counts["alarm", ""] == 1


def other_of(it: Fleet, side: str) -> Member:
    return it.decode if side == "prefill" else it.prefill


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_core_that_fails_ends_all_requests_with_500_and_lets_the_peer_go(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(router={"retries": 0}) as it:
        it.prefill.engine.allow = 1
        broken = getattr(it, side)
        talk = Talk(it.url, {**BODY, "prompt": "x" * 100})
        await until(lambda: it.prefill.engine.holds(computed=8))
        breaks(broken)
        broken.shell.post(Tick())
        answer = await talk.answer()
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert "a page is not where it should be" in answer.json()["error"]["message"]
        await is_out(broken, "a page is not where it should be")
        assert any(record.levelno == logging.CRITICAL for record in caplog.records)
        it.prefill.engine.allow = None
        await until(lambda: other_of(it, side).idle)
        answer = await broken.post(COMPLETIONS, {**BODY, **pairing(it, 99)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_broken")
        await until(lambda: not it.router.pairing.ready)


async def test_pages_of_a_broken_worker_stay_where_they_are() -> None:
    async with member("aggregated") as one:
        one.engine.allow = 1
        talk = Talk(one.url, {**BODY, "prompt": "x" * 100})
        await until(lambda: one.engine.holds(computed=8))
        held = one.shell.node.ledger.holders()
        breaks(one)
        one.shell.post(Tick())
        assert (await talk.answer()).status_code == 500
        await until(lambda: one.shell.running_engine.running == 0)
        assert one.shell.node.ledger.holders() == held


async def test_an_answer_that_cannot_be_given_breaks_the_worker_and_not_its_clients_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with member("aggregated") as one:

        def push(*given: object) -> None:
            raise RuntimeError("no such character")

        monkeypatch.setattr(one.shell.jobs, "push", push)
        answers = await asyncio.gather(*(one.post(COMPLETIONS, BODY) for _ in range(2)))
        assert {answer.status_code for answer in answers} <= {500, 503}
        await is_out(one, "no such character")


async def test_a_worker_that_has_stopped_carries_nothing_out() -> None:
    async with member("decode") as one:
        await one.shell.stop()
        breaks(one)
        one.shell.post(Tick())
        assert one.shell.broken == ""


async def test_the_same_fault_of_conservation_alarms_once() -> None:
    async with member("aggregated") as one:
        one.shell.node.ledger.counts[Page.ACTIVE] += 1
        assert one.shell.audit()
        alarms = one.shell.counts["alarm", ""]
        assert one.shell.audit()
        assert one.shell.counts["alarm", ""] == alarms
        one.shell.node.ledger.counts[Page.ACTIVE] -= 1
        assert one.shell.audit() == []


async def test_a_background_task_that_fails_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("the registry speaks another language")

    with task(fails()):
        await until(lambda: "the registry speaks another language" in caplog.text)
