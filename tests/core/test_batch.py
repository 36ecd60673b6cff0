"""What runs: pages for growth, places, and release. Who gives way is told in test_retract."""

from __future__ import annotations

from pdplane.core.effects import AbortEngine, AnswerFailed, ExtendPages, RetractEngine, RunDecode
from pdplane.core.node import Limits
from pdplane.core.pages import Page

from .pool import Pool

SIZE = 4


def pool(pages: int = 16, max_running: int = 4, reserve_tokens: int = 0) -> Pool:
    return Pool(Limits(pages=pages, page_size=SIZE, max_running=max_running, reserve_tokens=reserve_tokens))


def test_a_request_grows_before_it_stands_at_the_edge() -> None:
    world = pool()
    world.run("a", tokens=9, max_new=40)  # three pages, the last a quarter full
    assert world.rids(ExtendPages) == []
    world.compute("a", 10)
    assert world.rids(ExtendPages) == ["a"]
    world.compute("a", 11)
    assert world.rids(ExtendPages) == ["a"]
    assert world.ledger.counts[Page.ACTIVE] == world.held("a") == 4


def test_it_never_grows_past_what_it_can_need() -> None:
    world = pool()
    world.run("a", tokens=10, max_new=3)
    world.compute("a", 12)
    assert world.rids(ExtendPages) == []


def test_one_that_finds_no_page_goes_on_to_its_edge_and_is_fed_by_the_next_release() -> None:
    world = pool(pages=4)
    world.run("a", tokens=5, max_new=4)  # 2 pages, and never more
    world.run("b", tokens=5, max_new=9)  # 2 pages, 4 at most
    world.compute("b", 7)
    assert world.rids(ExtendPages) == world.rids(RetractEngine) == []
    world.release("a")
    assert world.rids(ExtendPages) == ["b"]


def test_pages_for_growth_go_to_the_first_by_priority_and_arrival() -> None:
    world = pool(pages=11)
    world.run("early", tokens=5, max_new=20)
    world.run("late", tokens=5, max_new=20)
    world.run("dear", tokens=5, max_new=20, priority=1)
    world.run("done", tokens=5, max_new=4)
    for name in ("late", "early", "dear"):
        world.compute(name, 8)
    assert world.rids(ExtendPages) == ["late", "early", "dear"]  # while there are pages, whoever asks gets one
    for name in ("late", "early", "dear"):
        world.compute(name, 11)
    world.release("done")
    assert world.rids(ExtendPages)[3:] == ["dear", "early"]


def test_a_finished_hand_off_waits_for_a_place_and_no_longer() -> None:
    world = pool(max_running=1)
    world.run("a", tokens=4, max_new=1)
    world.run("b", tokens=4, max_new=1)
    assert world.rids(RunDecode) == ["a"]
    world.release("a")
    assert world.rids(RunDecode) == ["a", "b"]


def test_a_hand_off_whose_row_is_the_end_takes_no_place() -> None:
    world = pool(max_running=1)
    world.run("a", tokens=4, max_new=1)
    world.ask("b", tokens=4, max_new=1)
    world.fill("b", ended="stop")
    assert world.offs["b"].gone
    assert world.ledger.counts[Page.ACTIVE] == 16 - world.ledger.free_count == 1


def test_one_that_is_leaving_asks_for_nothing_and_holds_its_pages_until_it_has_left() -> None:
    world = pool()
    world.run("a", tokens=9, max_new=40)
    world.cancel("a")
    world.cancel("a")
    world.compute("a", 12)
    assert world.rids(ExtendPages) == []
    assert world.rids(AbortEngine) == world.rids(AnswerFailed) == ["a"]
    assert (world.ledger.counts[Page.ACTIVE], len(world.reserve)) == (3, 0)
    world.release("a")
    assert world.ledger.free_count == 16


def test_pages_of_a_hand_off_that_ends_with_its_row_feed_whoever_starves_at_once() -> None:
    world = Pool(Limits(pages=2, page_size=4, max_running=4, reserve_tokens=0))
    world.ask("a", 4, 4)
    world.ask("b", 4, 4)
    world.fill("a")
    world.fill("b", ended="stop")
    assert world.held("a") == 2


def test_a_release_of_nobody_is_late() -> None:
    world = pool()
    world.release("a")
    assert world.counted("late") == ["released"]


def test_an_engines_error_is_the_answer() -> None:
    world = pool()
    world.run("a", tokens=9, max_new=40)
    world.release("a", error="a bad weight")
    assert world.rids(AnswerFailed) == ["a"]
    assert world.next_due() is None
