"""Who gives way when the pool is full, who comes back, and that neither waits without end."""

from __future__ import annotations

import pytest

from pdplane.core.effects import (
    AbortEngine,
    AnswerFailed,
    ExtendPages,
    FinishEngine,
    RestoreEngine,
    RetractEngine,
    RunDecode,
)
from pdplane.core.events import Retracted
from pdplane.core.ids import Rid
from pdplane.core.node import Limits
from pdplane.core.pages import Page

from .pool import Pool

SIZE = 4


def pool(pages: int = 6, max_running: int = 4, reserve_tokens: int = 0) -> Pool:
    return Pool(Limits(pages=pages, page_size=SIZE, max_running=max_running, reserve_tokens=reserve_tokens))


def crowded(*priorities: int, max_running: int = 4) -> Pool:
    """r0, r1, ... of these priorities run, each with 7 tokens in two pages, five at most; no page is free."""
    world = pool(pages=2 * len(priorities), max_running=max_running)
    for number, priority in enumerate(priorities):
        world.ask(f"r{number}", tokens=7, max_new=14, priority=priority)
    for number in range(len(priorities)):
        world.fill(f"r{number}")
    assert world.ledger.free_count == 0
    return world


# --- who gives way ----------------------------------------------------------------------------------------------------


def test_nobody_gives_way_for_one_that_still_has_a_place_for_its_next_token() -> None:
    world = crowded(0, 0)
    assert world.rids(RetractEngine) == []
    world.compute("r0", 8)
    assert world.rids(RetractEngine) == ["r1"]


def test_the_latest_arrival_gives_way() -> None:
    world = crowded(0, 0, 0)
    world.compute("r1", 8)
    assert world.rids(RetractEngine) == ["r2"]


def test_the_lowest_priority_gives_way_before_the_latest_arrival() -> None:
    world = crowded(1, 0, 1)
    world.compute("r0", 8)
    assert world.rids(RetractEngine) == ["r1"]


def test_the_one_that_asks_gives_way_itself_where_it_is_the_last() -> None:
    world = crowded(0, 0)
    world.compute("r1", 8)
    assert world.rids(RetractEngine) == ["r1"]


def test_nobody_gives_way_for_pages_that_are_due_anyhow() -> None:
    world = crowded(0, 0, 0)
    world.cancel("r1")
    world.compute("r0", 8)
    assert world.rids(RetractEngine) == []
    world.release("r1")
    assert world.rids(ExtendPages)[0] == "r0"


def test_as_many_give_way_as_the_starving_need_and_no_more() -> None:
    world = crowded(0, 0, 0, 0)
    for name in ("r0", "r1", "r2"):
        world.compute(name, 8)
    assert world.rids(RetractEngine) == ["r3", "r2"]  # two pages each: enough for r0 and r1


def test_the_pages_are_free_when_the_copy_is_made_and_not_before() -> None:
    world = crowded(0, 0)
    world.compute("r0", 8)
    assert world.ledger.counts[Page.SPILLING] == 2
    assert world.rids(ExtendPages) == []
    world.retract("r1")
    assert world.ledger.counts[Page.SPILLING] == 0
    assert world.rids(ExtendPages) == ["r0"]
    assert (world.held("r0"), world.held("r1")) == (3, 0)


def test_one_that_ends_before_it_is_laid_aside_has_simply_ended() -> None:
    world = crowded(0, 0)
    world.compute("r0", 8)
    world.release("r1")
    assert world.rids(ExtendPages) == ["r0"]
    assert world.batch.parked == 0
    world.take(Retracted(rid=Rid("r1"), tokens=8))
    assert world.counted("late") == ["retracted"]
    world.release("r0")
    assert world.ledger.free_count == 4


def test_a_retracted_of_one_that_was_not_asked_is_late() -> None:
    world = crowded(0, 0)
    world.take(Retracted(rid=Rid("r0"), tokens=7))
    assert world.counted("late") == ["retracted"]
    assert world.ledger.counts[Page.ACTIVE] == 4


def test_the_record_and_the_counts_show_it() -> None:
    world = crowded(0, 0)
    world.compute("r0", 8)
    world.retract("r1")
    world.release("r0")
    world.release("r1")
    assert world.noted("r1") == ["running", "retracted", "restored", "freed", "released"]
    assert (len(world.counted("retracted")), len(world.counted("restored"))) == (1, 1)


# --- who comes back ---------------------------------------------------------------------------------------------------


def test_it_comes_back_with_pages_for_what_it_has_and_one_more() -> None:
    world = crowded(0, 0)
    world.compute("r0", 8)
    world.retract("r1")
    assert world.rids(RestoreEngine) == []
    world.release("r0")
    (back,) = [effect for effect in world.log if isinstance(effect, RestoreEngine)]
    assert (back.rid, len(back.pages)) == ("r1", 3)
    assert world.batch.parked == 0
    world.compute("r1", 11)
    assert world.held("r1") == 4  # it grows as before


def test_they_come_back_in_order() -> None:
    world = crowded(0, 0, 0, 0)
    for name in ("r0", "r1", "r2"):
        world.compute(name, 8)
    for name in ("r3", "r2"):
        world.retract(name)
    world.release("r0")
    assert world.rids(RestoreEngine) == ["r2"]
    world.release("r1")
    assert world.rids(RestoreEngine) == ["r2", "r3"]


def test_none_comes_back_past_one_whose_copy_is_still_made() -> None:
    world = crowded(0, 0, 0, 0)
    for name in ("r0", "r1", "r2"):
        world.compute(name, 8)
    world.retract("r3")
    world.release("r0")
    world.release("r1")
    assert world.rids(RestoreEngine) == []
    world.retract("r2")
    assert world.rids(RestoreEngine) == ["r2", "r3"]


def test_one_comes_back_only_beside_what_is_kept_for_growth_so_as_not_to_give_way_at_once() -> None:
    world = crowded(0, 0, 0)
    world.compute("r0", 8)
    world.retract("r2")
    world.release("r1")
    assert world.ledger.free_count == 3  # all that r2 needs, and then r0 could not grow
    assert world.rids(RestoreEngine) == []
    world.release("r0")
    assert world.rids(RestoreEngine) == ["r2"]


def test_nothing_new_is_let_in_while_one_of_its_priority_is_aside() -> None:
    world = crowded(0, 0, 0)
    world.compute("r0", 8)
    world.retract("r2")
    world.release("r1")
    assert world.ledger.free_count == 3
    world.ask("new", tokens=1, max_new=1)
    world.ask("dear", tokens=1, max_new=1, priority=1)
    assert world.granted[3:] == ["dear"]
    world.release("r0")
    assert world.rids(RestoreEngine) == ["r2"]
    assert world.granted[3:] == ["dear", "new"]


def test_nothing_new_is_let_in_while_a_copy_is_made_either() -> None:
    world = crowded(0, 0, 0)
    world.compute("r0", 8)
    world.release("r1")
    world.ask("new", tokens=1, max_new=1)
    assert world.rids(RetractEngine) == ["r2"]
    assert "new" not in world.granted


def test_finished_hand_offs_go_to_the_batch_while_requests_are_aside() -> None:
    world = pool(pages=6)
    for name in ("a", "b", "handed"):
        world.ask(name, tokens=7, max_new=14)
    world.fill("a")
    world.fill("b")
    world.compute("a", 8)
    world.retract("b")
    assert world.batch.parked == 1
    world.fill("handed")
    assert world.rids(RunDecode) == ["a", "b", "handed"]


def test_one_laid_aside_has_left_its_place() -> None:
    world = pool(pages=6, max_running=2)
    for name in ("a", "b", "handed"):
        world.ask(name, tokens=7, max_new=14)
    for name in ("a", "b", "handed"):
        world.fill(name)
    world.compute("a", 8)
    assert world.rids(RunDecode) == ["a", "b"]
    world.retract("b")
    assert world.rids(RunDecode) == ["a", "b", "handed"]


# --- how one laid aside ends ------------------------------------------------------------------------------------------


def test_one_aside_is_cancelled_its_copy_dropped_and_its_peers_untouched() -> None:
    world = crowded(0, 0)
    world.compute("r0", 8)
    world.retract("r1")
    world.cancel("r1")
    assert world.rids(AbortEngine) == world.rids(AnswerFailed) == ["r1"]
    assert world.batch.parked == 0
    world.release("r0")
    assert world.rids(RestoreEngine) == []
    world.release("r1")
    assert (world.live, world.ledger.free_count, world.next_due()) == (0, 4, None)


@pytest.mark.parametrize("copied_first", [True, False])
def test_one_cancelled_while_its_copy_is_made_frees_its_pages_once(copied_first: bool) -> None:
    world = crowded(0, 0)
    world.compute("r0", 8)
    world.cancel("r1")
    assert world.batch.parked == 0
    if copied_first:
        world.retract("r1")
        assert world.rids(ExtendPages) == ["r0"]
    world.release("r1")
    assert world.rids(ExtendPages) == ["r0"]
    assert (world.live, world.ledger.free_count, world.batch.full) == (1, 1, False)


def test_one_aside_keeps_its_deadline() -> None:
    world = pool(pages=4)
    world.ask("a", tokens=7, max_new=14)
    world.ask("b", tokens=7, max_new=14, deadline=5.0)
    world.fill("a")
    world.fill("b")
    world.compute("a", 8)
    world.retract("b")
    world.tick(5.0)
    (answer,) = [effect for effect in world.log if isinstance(effect, AnswerFailed)]
    assert (answer.rid, answer.cause.status) == ("b", 504)
    assert world.rids(AbortEngine) == ["b"]


def test_an_engine_that_fails_to_restore_is_the_answer() -> None:
    world = crowded(0, 0)
    world.compute("r0", 8)
    world.retract("r1")
    world.release("r1", error="no host memory")
    assert world.rids(AnswerFailed) == ["r1"]
    assert world.batch.parked == 0


# --- one that runs alone ----------------------------------------------------------------------------------------------


def alone(max_running: int = 4) -> Pool:
    """One runs, at its edge; the pages that it would need are granted to a hand-off under way."""
    world = pool(pages=4, max_running=max_running)
    world.ask("one", tokens=7, max_new=9)
    world.ask("other", tokens=7, max_new=9)
    world.fill("one")
    world.compute("one", 8)
    return world


def test_a_sole_runner_waits_for_a_hand_off_under_way_which_then_gives_way_to_it() -> None:
    world = alone()
    assert world.rids(RetractEngine) == world.rids(FinishEngine) == []
    world.fill("other")
    assert world.rids(RetractEngine) == ["other"]


def test_a_sole_runner_waits_for_pages_that_drain() -> None:
    world = alone()
    world.fail("other")
    assert world.rids(RetractEngine) == world.rids(FinishEngine) == []
    world.prove("other")
    assert world.rids(ExtendPages) == ["one"]


def test_a_sole_runner_whose_pages_are_in_quarantine_ends_with_length() -> None:
    world = alone()
    world.fail("other")
    world.give_up("other")
    assert world.rids(FinishEngine) == ["one"]
    world.tick()
    assert world.rids(FinishEngine) == ["one"]
    world.release("one")
    assert world.rids(AnswerFailed) == []
    assert (world.live, world.ledger.free_count) == (0, 2)


def test_it_is_not_ended_before_its_last_place_is_used() -> None:
    world = pool(pages=4)
    world.ask("one", tokens=6, max_new=9)
    world.ask("other", tokens=6, max_new=9)
    world.fill("one")
    world.fail("other")
    world.give_up("other")
    world.compute("one", 7)
    assert world.rids(FinishEngine) == []
    world.compute("one", 8)
    assert world.rids(FinishEngine) == ["one"]


def test_a_sole_runner_gives_way_where_a_finished_hand_off_waits_for_its_very_place() -> None:
    world = alone(max_running=1)
    world.fill("other")
    assert world.rids(RetractEngine) == ["one"]
    world.retract("one")
    assert world.rids(RunDecode) == ["one", "other"]
    world.release("other")
    assert world.rids(RestoreEngine) == ["one"]


def lost_while_aside(tokens: int) -> Pool:
    """`big` was laid aside; pages that it needs to come back drain, and may be lost."""
    world = pool(pages=6)
    world.ask("small", tokens=7, max_new=9)
    world.ask("big", tokens=tokens, max_new=9)
    world.fill("small")
    world.fill("big")
    world.compute("small", 8)
    world.retract("big")
    world.ask("lost", tokens=8, max_new=1, priority=1)
    world.release("small")
    assert world.rids(RestoreEngine) == []
    world.fail("lost")
    return world


def test_one_aside_that_can_never_come_back_ends_with_length() -> None:
    world = lost_while_aside(tokens=16)
    assert (world.rids(RestoreEngine), world.rids(FinishEngine)) == ([], [])
    world.give_up("lost")
    assert (world.rids(RestoreEngine), world.rids(FinishEngine)) == ([], ["big"])
    world.release("big")
    assert (world.live, world.ledger.free_count) == (0, 4)


def test_one_aside_comes_back_for_the_rest_of_its_last_page_where_that_is_all_there_will_be() -> None:
    world = lost_while_aside(tokens=15)
    assert (world.rids(RestoreEngine), world.rids(FinishEngine)) == (["big"], [])
    world.compute("big", 16)
    assert world.rids(FinishEngine) == []
    world.give_up("lost")
    assert world.rids(FinishEngine) == ["big"]
