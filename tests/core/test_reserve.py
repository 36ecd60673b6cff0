"""The reserve: which prompts are let in beside what is kept free for growth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.node import Limits
from pdplane.core.pages import Ledger, Owner, Page
from pdplane.core.prompt_pages import Prompt, PromptPages
from pdplane.core.reserve import Claim, Reserve

SIZE = 4


def reserve_of(pages: int, reserve_tokens: int = 2 * SIZE) -> tuple[Ledger, Reserve]:
    ledger = Ledger(pages)
    limits = Limits(pages=pages, page_size=SIZE, reserve_tokens=reserve_tokens)
    return ledger, Reserve(PromptPages(ledger, limits), limits)


def of(pages: int) -> Prompt:
    """A prompt that fills so many pages."""
    return Prompt(pages * SIZE)


def enter(ledger: Ledger, reserve: Reserve, name: str, pages: int, most: int) -> Owner:
    owner = Owner(name)
    assert reserve.may_admit(of(pages), most)
    reserve.admit(owner, pages, most)
    ledger.take(pages, Page.GRANTED, owner)
    return owner


def test_a_newcomer_fits_beside_the_growth_that_is_kept_for_all_and_for_itself() -> None:
    ledger, reserve = reserve_of(10)
    enter(ledger, reserve, "a", 3, 9)  # keeps 2 of the 6 that it may still need
    assert reserve.may_admit(of(3), 9)
    assert not reserve.may_admit(of(4), 9)
    assert reserve.may_admit(of(4), 5)
    assert reserve.may_admit(of(5), 5)
    assert not reserve.may_admit(of(6), 6)


def test_no_more_is_kept_for_a_request_than_it_can_need() -> None:
    ledger, reserve = reserve_of(10)
    owner = enter(ledger, reserve, "a", 3, 4)
    assert reserve.kept == 1
    reserve.grown(owner)
    assert reserve.kept == 0


def test_a_part_of_a_page_is_kept_as_a_page() -> None:
    ledger, reserve = reserve_of(10, reserve_tokens=SIZE + 1)
    enter(ledger, reserve, "a", 3, 9)
    assert reserve.kept == 2


def test_a_step_of_what_runs_is_kept_whatever_the_setting_says() -> None:
    ledger, reserve = reserve_of(10, reserve_tokens=0)
    owner = enter(ledger, reserve, "a", 3, 9)
    assert reserve.kept == 0
    reserve.run(owner)
    assert reserve.kept == 1
    assert reserve.may_admit(of(6), 9)
    assert not reserve.may_admit(of(6), 9, running=True)
    assert not reserve.may_admit(of(7), 9)


def test_one_that_finds_the_pool_to_itself_is_let_in_wherever_its_pages_fit() -> None:
    ledger, reserve = reserve_of(4)
    assert reserve.may_admit(of(4), 4)
    assert reserve.may_admit(of(3), 4)
    ledger.take(2, Page.QUARANTINED, Owner("lost"))
    assert reserve.may_admit(of(2), 4)
    assert not reserve.may_admit(of(3), 4)


def test_one_that_will_not_grow_has_nothing_kept_for_it() -> None:
    ledger, reserve = reserve_of(10)
    owner = enter(ledger, reserve, "a", 3, 9)
    reserve.drop(owner)
    reserve.drop(owner)
    assert (reserve.kept, len(reserve)) == (0, 0)


def test_what_was_refused_is_asked_again_only_after_a_change() -> None:
    ledger, reserve = reserve_of(4)
    stamp = reserve.stamp
    owner = enter(ledger, reserve, "a", 2, 3)
    assert reserve.stamp != stamp
    for change in (reserve.run, reserve.grown, reserve.drop):
        stamp = reserve.stamp
        reserve.drop(Owner("nobody"))
        assert reserve.stamp == stamp
        change(owner)
        assert reserve.stamp != stamp


def test_pages_that_come_and_go_are_a_change() -> None:
    ledger, reserve = reserve_of(4)
    stamp = reserve.stamp
    taken = ledger.take(1, Page.GRANTED, Owner("a"))
    assert reserve.stamp != stamp
    ledger.free(taken, Owner("a"))
    assert reserve.stamp == stamp


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.booleans()), max_size=6), st.integers(0, 20))
def test_what_is_kept_is_the_sum_over_all_claims(found: list[tuple[int, int, bool]], reserve_tokens: int) -> None:
    _, reserve = reserve_of(100, reserve_tokens)
    each = -(-reserve_tokens // SIZE)
    wanted = 0
    for number, (held, more, running) in enumerate(found):
        reserve.admit(Owner(f"{number}"), held, held + more, running=running)
        kept = Claim(held, held + more, running).kept(each)
        assert kept <= more
        assert kept == min(more, each) or (running and each == 0 and kept == 1)
        wanted += kept
    assert reserve.kept == wanted
