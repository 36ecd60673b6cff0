"""Running requests that share pages: what growth may take, what giving way brings, what is left at the end."""

from __future__ import annotations

from pdplane.core.effects import ExtendPages, FinishEngine, RestoreEngine, RetractEngine, RunDecode
from pdplane.core.ids import Rid
from pdplane.core.node import Limits
from pdplane.core.pages import Page

from .pool import Pool

SIZE = 4


def pool(pages: int, max_running: int = 4, reserve_tokens: int = 0) -> Pool:
    return Pool(Limits(pages=pages, page_size=SIZE, max_running=max_running, reserve_tokens=reserve_tokens))


def cached(pages: int, *texts: str, max_running: int = 4, reserve_tokens: int = 0) -> Pool:
    """A pool in which prompts of these texts have run and ended."""
    world = pool(pages, max_running, reserve_tokens)
    for text in texts:
        world.ask(f"was {text}", len(text) * SIZE, 1, text=text)
        world.fill(f"was {text}", ended="stop")
    return world


def shared(world: Pool, name: str) -> int:
    return world.batch.running[Rid(name)].shared


def test_growth_takes_cached_pages_that_nobody_reads_before_anybody_gives_way() -> None:
    world = cached(6, "xyz")
    world.run("a", 2 * SIZE - 1, 12)
    assert world.ledger.free_count == 0  # three are cached, two are the prompt's, and one more for its growth
    world.compute("a", 2 * SIZE)
    world.run("b", SIZE - 1, 8)
    for tokens in range(2 * SIZE, 4 * SIZE):
        world.compute("a", tokens)
    assert world.rids(RetractEngine) == []
    assert world.ledger.counts[Page.CACHED] == 0


def test_a_prompt_that_is_all_there_grows_as_soon_as_it_runs() -> None:
    world = cached(4, "ab")
    world.run("a", 2 * SIZE, 5, text="ab")
    assert (shared(world, "a"), world.held("a")) == (2, 3)
    assert world.rids(ExtendPages) == ["a"]
    assert world.ledger.counts[Page.ACTIVE] == 1


def test_a_copy_has_all_pages_and_only_own_ones_come_back() -> None:
    world = cached(4, "ab")
    world.run("a", 2 * SIZE, 9, text="ab")
    world.run("b", 2 * SIZE, 9, text="ab")
    assert (shared(world, "a"), shared(world, "b"), world.ledger.counts[Page.ACTIVE]) == (2, 2, 2)
    world.compute("a", 3 * SIZE)
    assert world.rids(RetractEngine) == ["b"]
    (retract,) = [effect for effect in world.log if isinstance(effect, RetractEngine)]
    assert len(retract.pages) == 3
    world.retract("b")
    assert (shared(world, "b"), world.held("a")) == (0, 4)
    assert world.ledger.counts[Page.CACHED] == 2  # a still reads them
    world.release("a")
    (restore,) = [effect for effect in world.log if isinstance(effect, RestoreEngine)]
    assert (len(restore.pages), shared(world, "b")) == (3, 0)
    assert set(restore.pages).isdisjoint(world.pages._hits(world.offs["a"].prompt)[:1])


def test_one_that_came_back_gives_its_prompt_to_the_cache_like_any_other() -> None:
    world = pool(8)
    for name, text in (("a", "ab"), ("b", "xy")):
        world.ask(name, 2 * SIZE, 17, text=text)
    world.fill("a")
    world.fill("b")
    for tokens in (9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20):
        world.compute("a", tokens)
        if Rid("b") in world.batch.running and world.rids(RetractEngine) == []:
            world.compute("b", tokens)
    assert world.rids(RetractEngine) == ["b"]
    world.retract("b")
    world.release("a")
    assert world.rids(RestoreEngine) == ["b"]
    world.release("b")
    assert world.pages.hits(world.offs["a"].prompt) == world.pages.hits(world.offs["b"].prompt) == 2


def test_what_others_share_too_is_not_counted_as_coming_back() -> None:
    """a, b and c stand at their edge in four pages that all of them share: a's page comes only when both have gone."""
    world = cached(4, "abcd"[:3])
    world.run("a", 3 * SIZE, 4, text="abc")
    world.run("b", 3 * SIZE, 4, text="abc")
    assert world.rids(RetractEngine) == ["b"]
    world.retract("b")
    assert world.held("a") == 4
    world.release("a")
    world.release("b")
    assert world.pages.available == 4


def test_what_leaves_with_shared_pages_that_nobody_else_reads_is_waited_for() -> None:
    world = cached(5, "ab")
    world.ask("b", 2 * SIZE, 1, text="ab")
    world.ask("a", 2 * SIZE - 1, 6)
    world.ask("c", SIZE - 1, 1)
    for name in ("b", "a", "c"):
        world.fill(name)
    world.cancel("b")
    world.compute("a", 2 * SIZE)
    assert world.rids(RetractEngine) == []
    world.release("b")
    assert world.held("a") == 3


def test_what_leaves_with_shared_pages_that_others_read_is_not() -> None:
    world = cached(5, "ab")
    for name in ("b", "d"):
        world.ask(name, 2 * SIZE, 1, text="ab")
    world.ask("a", 2 * SIZE - 1, 6)
    world.ask("c", SIZE - 1, 1)
    for name in ("b", "d", "a", "c"):
        world.fill(name)
    world.cancel("b")
    world.compute("a", 2 * SIZE)
    assert world.rids(RetractEngine) == ["c"]


def test_one_that_ends_while_it_is_copied_leaves_nothing_to_the_cache() -> None:
    world = pool(4)
    for name, text in (("a", "a"), ("b", "b")):
        world.ask(name, 2 * SIZE - 1, 6, text=text)
    world.fill("a")
    world.fill("b")
    world.compute("a", 2 * SIZE)
    assert world.rids(RetractEngine) == ["b"]
    world.release("b")
    assert world.pages.hits(world.offs["b"].prompt) == 0


def test_what_is_not_known_to_be_whole_leaves_nothing_to_the_cache() -> None:
    world = pool(4)
    world.run("a", 2 * SIZE - 1, 6, text="a")
    world.batch.running[Rid("a")].whole = False
    world.release("a")
    assert world.pages.hits(world.offs["a"].prompt) == 0


def test_a_hand_off_that_is_all_shared_waits_for_the_very_place_of_one_that_starves() -> None:
    """It holds no page that is `filled`, and is waited for all the same: the one that runs gives way."""
    world = cached(4, "ab", "x", max_running=1)
    world.ask("a", 2 * SIZE, 9, text="ab")
    world.ask("b", SIZE, 1, text="x")
    world.fill("a")
    world.fill("b")
    assert world.rids(RunDecode) == ["a"]
    world.compute("a", 3 * SIZE)
    assert world.rids(RetractEngine) == ["a"]
    world.retract("a")
    assert world.rids(RunDecode) == ["a", "b"]
    world.release("b")
    assert world.rids(RestoreEngine) == ["a"]


def test_a_starving_request_waits_for_one_that_holds_only_shared_pages_on_its_way() -> None:
    world = cached(4, "abc")
    world.run("a", SIZE, 9)
    world.ask("b", 3 * SIZE, 1, text="abc")
    world.compute("a", SIZE)
    world.compute("a", 2 * SIZE - 1)
    assert world.rids(FinishEngine) == world.rids(RetractEngine) == []
    world.fail("b")
    assert world.rids(ExtendPages)[-1:] == ["a"]


def test_admission_keeps_growth_free_beside_shared_pages() -> None:
    world = cached(8, "abcd", reserve_tokens=SIZE)
    world.run("a", 4 * SIZE, 6, text="abcd")  # four shared, one grown, one to come at most
    assert world.held("a") == 5
    world.ask("b", 4 * SIZE + 1, 8, text="abcd")
    assert world.granted[-1] == "b"
    assert world.ledger.counts[Page.GRANTED] == 1
    world.ask("c", 4 * SIZE + 1, 8, text="abcd")
    assert world.granted[-1] == "b"
