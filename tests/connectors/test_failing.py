"""Connectors that do what none should. A request may fail then, or compute its prompt itself; no answer is ever wrong,
no page is lost, and what can never be known is ended by a clock.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pdplane.core.effects import Alarm, RunPrefill, RunWhole, Ungate
from pdplane.core.events import ConnectorOutput, KVOutput
from pdplane.core.ids import PageId, Rank, Rid
from pdplane.core.pages import Page
from pdplane.core.params.table import RequestStatus

from ..core.facing import only
from .facing_store import FacingStore
from .failing import (
    Again,
    Bend,
    FailsLate,
    fails,
    fails_and_confirms,
    fails_at,
    never_confirms,
    never_reports,
)

POLICIES = pytest.mark.parametrize("recompute", [False, True], ids=["fail", "recompute"])


def wanted(folder: Path, bends: dict[int, Bend], **more: object) -> FacingStore:
    """A prompt of five pages is saved, wanted, and whatever is to be said of its load is said."""
    world = FacingStore(folder, bends=bends, **more)  # type: ignore[arg-type]
    world.saved(1, 70)
    world.wants(1, 70)
    world.work()
    return world


def right_or_refused(world: FacingStore, code: str, *, computed: int) -> None:
    """By its policy, and then all is given back."""
    if world.d_limits.recompute:
        assert (world.run_of(1).computed, world.run_of(1).gated) == (computed, False)
        assert world.wrong_pages(1) == []
        world.let_go(1)
    else:
        assert world.d.failed("d1").code == code
        assert world.d.all(RunWhole) == []
    assert world.over()


@POLICIES
@pytest.mark.parametrize("page", [0, 1, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_that_fails_at_a_page_is_good_up_to_there(
    tmp_path: Path, page: int, ranks: int, recompute: bool
) -> None:
    """Whichever rank says it."""
    world = wanted(tmp_path, {ranks - 1: fails_at(page)}, ranks=ranks, recompute=recompute)
    right_or_refused(world, "kv_load_failed", computed=page * 16)


def test_the_first_bad_page_of_all_ranks_counts(tmp_path: Path) -> None:
    world = wanted(tmp_path, {0: fails_at(3), 1: fails_at(1), 2: fails_at(4)}, ranks=3, recompute=True)
    right_or_refused(world, "kv_load_failed", computed=16)


@POLICIES
@pytest.mark.parametrize("bend", [fails, fails_and_confirms])
def test_nothing_of_a_load_that_failed_is_trusted(tmp_path: Path, bend: Bend, recompute: bool) -> None:
    world = wanted(tmp_path, {1: bend}, ranks=2, recompute=recompute)
    assert world.d.all(Ungate) == []
    right_or_refused(world, "kv_load_failed", computed=0)


def test_a_failure_waits_until_no_rank_touches_the_pages_any_more(tmp_path: Path) -> None:
    world = FacingStore(tmp_path, ranks=2, bends={0: fails})
    world.saved(1)
    world.wants(1)
    world.executor.run()
    world.reports(world.d, 0)
    assert world.status(1) is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert world.decode.ledger.counts[Page.GRANTED] == 3
    world.reports(world.d, 1)
    assert world.d.failed("d1").code == "kv_load_failed"
    assert world.over()


@POLICIES
def test_a_load_that_turns_out_wrong_when_it_is_over_takes_the_engine_back(tmp_path: Path, recompute: bool) -> None:
    world = FacingStore(tmp_path, ranks=2, bends={0: never_confirms, 1: FailsLate()}, recompute=recompute)
    world.saved(1)
    world.wants(1)
    world.executor.run()
    for rank in (0, 1):
        world.reports(world.d, rank)
    assert (world.run_of(1).gated, world.may_leave(1)) == (True, False)
    world.work()
    world.let_go(1)
    if recompute:
        assert (world.run_of(1).computed, world.run_of(1).gated) == (0, False)
        assert world.wrong_pages(1) == []
        world.let_go(1)
    else:
        assert world.d.failed("d1").code == "kv_load_failed"
    assert world.d.all(Ungate) == []
    assert world.over()


@pytest.mark.parametrize("bends", [{0: never_reports}, {1: never_reports}, {0: never_reports, 1: never_reports}])
def test_a_rank_that_never_reports_costs_its_request_and_the_pages_an_alarm(
    tmp_path: Path, bends: dict[int, Bend]
) -> None:
    world = FacingStore(tmp_path, ranks=2, bends=bends)
    world.saved(1)
    world.wants(1, deadline=50.0)
    world.work()
    assert world.status(1) is RequestStatus.WAITING_FOR_REMOTE_KVS
    world.wait(50.0)
    assert world.d.failed("d1").code == "deadline"
    assert world.decode.ledger.counts[Page.DRAINING] == 3
    world.wait(31.0)
    assert world.decode.ledger.counts[Page.QUARANTINED] == 3
    assert "has not ended" in only(world.d.all(Alarm)).text
    for rank in (0, 1):  # it does after all
        world.d.take(ConnectorOutput(Rank(tp=rank), KVOutput(finished_recving={Rid("d1")})))
    assert world.over()


def test_a_load_without_a_sign_of_work_is_given_up(tmp_path: Path) -> None:
    world = wanted(tmp_path, {0: never_reports})
    world.wait(61.0)
    assert world.d.failed("d1").code == "no_progress"


def test_a_load_that_is_never_confirmed_is_never_answered(tmp_path: Path) -> None:
    world = wanted(tmp_path, {1: never_confirms}, ranks=2)
    world.let_go(1)
    assert not world.may_leave(1)
    world.wait(300.0)
    assert world.d.failed("d1").code == "deadline"
    assert world.over()


def test_who_reports_twice_counts_once(tmp_path: Path) -> None:
    """The other rank has not said a word."""
    world = FacingStore(tmp_path, ranks=2, bends={0: Again(), 1: Again()})
    world.saved(1)
    world.wants(1)
    world.executor.run()
    for _ in range(3):
        world.reports(world.d, 0)
    assert world.status(1) is RequestStatus.WAITING_FOR_REMOTE_KVS
    world.work()
    assert world.may_leave(1)
    assert world.wrong_pages(1) == []
    assert "finished_recving" in world.d.counted("late")  # "nobody", of whom it spoke
    world.let_go(1)
    world.work()
    assert world.over()


def test_a_prompt_that_is_said_to_be_sent_twice_is_sent_once(tmp_path: Path) -> None:
    world = FacingStore(tmp_path, ranks=2, p_bends={0: Again(), 1: Again()})
    world.computes(1)
    world.executor.run()
    for _ in range(3):
        world.reports(world.p, 0)
    assert world.prefill.ledger.counts[Page.HELD] == 3
    world.work()
    assert "finished_sending" in world.p.counted("late")
    assert world.over()


def test_a_prompt_that_is_never_said_to_be_sent_keeps_its_pages_and_shows(tmp_path: Path) -> None:
    """Nobody else can know that they are not being read."""
    world = FacingStore(tmp_path, p_bends={0: never_reports})
    world.saved(1)
    world.wait(600.0)
    assert world.prefill.ledger.counts[Page.HELD] == 3
    assert world.saver.settled() == ["the pages of p1 are kept for ever"]
    world.p.take(ConnectorOutput(Rank(), KVOutput(finished_sending={Rid("p1")})))
    assert world.over()


def test_a_notice_that_comes_too_early_ends_nothing(tmp_path: Path) -> None:
    """Of a prompt that is being computed, and of a load that has not begun."""
    world = FacingStore(tmp_path)
    world.saver.update_connector_output = world.saver.inner.update_connector_output  # type: ignore[method-assign]
    world.ask(1)
    world.p.take(ConnectorOutput(Rank(), KVOutput(finished_sending={Rid("p1")})))
    assert world.p.counted("late") == ["finished_sending"]
    assert world.prefill.ledger.counts[Page.COMPUTING] == len(only(world.p.all(RunPrefill)).pages)
    world.wants(1)
    early = KVOutput(finished_recving={Rid("d1")}, confirmed={Rid("d1")})
    world.d.take(ConnectorOutput(Rank(), early))
    assert world.status(1) is RequestStatus.WAITING
    assert world.d.counted("late") == ["finished_recving"]


def test_bad_pages_that_nobody_is_loading_are_counted_and_touch_nobody(tmp_path: Path) -> None:
    world = FacingStore(tmp_path)
    world.wants(1)
    pages = set(world.run_of(1).pages)
    world.d.take(ConnectorOutput(Rank(), KVOutput(invalid_block_ids=pages | {PageId(15)})))
    assert world.d.counted("late") == ["invalid_block_ids"]
    world.let_go(1)
    assert world.over()


def test_a_rank_that_does_not_belong_here_is_not_heard(tmp_path: Path) -> None:
    world = FacingStore(tmp_path)
    world.saved(1)
    world.wants(1)
    world.d.take(ConnectorOutput(Rank(tp=5), KVOutput(finished_recving={Rid("d1")}, confirmed={Rid("d1")})))
    assert world.status(1) is RequestStatus.WAITING_FOR_REMOTE_KVS
