"""The ledger against a model: whatever is done, every page has one state and one owner, and the sum is the capacity."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pdplane.core.ids import PageId
from pdplane.core.pages import CACHE, NOBODY, SLICE, Ledger, Owner, Page

CAPACITY = 12
HELD = [state for state in Page if state is not Page.FREE]


class LedgerMachine(RuleBasedStateMachine):
    owned = Bundle("owned")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CAPACITY)
        self.model: dict[PageId, tuple[Page, Owner]] = {}
        self.freed_order: list[PageId] = [PageId(page) for page in range(CAPACITY)]
        self.owners = 0

    @rule(target=owned, count=st.integers(1, CAPACITY), state=st.sampled_from(HELD))
    def take(self, count: int, state: Page) -> object:
        if count > self.ledger.free_count:
            with pytest.raises(AssertionError, match="free"):
                self.ledger.take(count, state, Owner("greedy"))
            return multiple()
        self.owners += 1
        owner = Owner(f"grant {self.owners}")
        pages = self.ledger.take(count, state, owner)
        assert list(pages) == self.freed_order[:count], "free pages go out oldest first"
        del self.freed_order[:count]
        self.model |= dict.fromkeys(pages, (state, owner))
        return owner, pages

    @rule(taken=owned, to=st.sampled_from(HELD))
    def shift(self, taken: tuple[Owner, tuple[PageId, ...]], to: Page) -> None:
        owner, pages = taken
        if pages:
            self.ledger.shift(pages, owner, self.model[pages[0]][0], to)
            self.model |= dict.fromkeys(pages, (to, owner))

    @rule(taken=owned, wrong=st.sampled_from(HELD), to=st.sampled_from(HELD))
    def a_shift_from_another_state_is_a_fault(
        self, taken: tuple[Owner, tuple[PageId, ...]], wrong: Page, to: Page
    ) -> None:
        owner, pages = taken
        if pages and self.model[pages[0]][0] is not wrong:
            with pytest.raises(AssertionError):
                self.ledger.shift(pages, owner, wrong, to)

    @rule(taken=owned)
    def anothers_pages_cannot_be_freed(self, taken: tuple[Owner, tuple[PageId, ...]]) -> None:
        if taken[1]:
            with pytest.raises(AssertionError):
                self.ledger.free(taken[1], Owner("thief"))

    @rule(target=owned, taken=consumes(owned), to=st.sampled_from(HELD))
    def hand_over(self, taken: tuple[Owner, tuple[PageId, ...]], to: Page) -> object:
        owner, pages = taken
        if pages:
            self.ledger.hand_over(pages, owner, self.model[pages[0]][0], CACHE, to)
            self.model |= dict.fromkeys(pages, (to, CACHE))
        return CACHE, pages

    @rule(taken=owned)
    def a_page_named_twice_is_a_fault_and_nothing_moves(self, taken: tuple[Owner, tuple[PageId, ...]]) -> None:
        owner, pages = taken
        if pages:
            with pytest.raises(AssertionError, match="twice"):
                self.ledger.free((*pages, pages[0]), owner)

    @rule(taken=consumes(owned))
    def free(self, taken: tuple[Owner, tuple[PageId, ...]]) -> None:
        owner, pages = taken
        self.ledger.free(pages, owner)
        for page in pages:
            del self.model[page]
        self.freed_order += pages
        if pages:
            with pytest.raises(AssertionError):
                self.ledger.free(pages, owner)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.ledger.audit() == []
        assert sum(self.ledger.counts.values()) == CAPACITY
        assert self.ledger.free_count == CAPACITY - len(self.model)
        for number in range(CAPACITY):
            page = PageId(number)
            told = (self.ledger.state_of(page), self.ledger.owner_of(page))
            assert told == self.model.get(page, (Page.FREE, NOBODY))
        holders: dict[Owner, dict[str, int]] = {}
        for state, owner in self.model.values():
            of = holders.setdefault(owner, {})
            of[state.name.lower()] = of.get(state.name.lower(), 0) + 1
        assert self.ledger.holders() == holders


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30)


def test_an_audit_names_page_and_holder() -> None:
    ledger = Ledger(4)
    (page,) = ledger.take(1, Page.GRANTED, Owner("grant 7"))
    ledger._state[page] = Page.FREE
    faults = ledger.audit()
    assert any("page 0" in fault and "grant 7" in fault for fault in faults)
    assert any("granted pages: counted 1, found 0" in fault for fault in faults)


def test_an_audit_sees_a_page_that_left_the_free_list() -> None:
    ledger = Ledger(4)
    del ledger._free[PageId(2)]
    assert any("page 2" in fault for fault in ledger.audit())


def test_an_audit_sees_a_page_whose_owner_is_not_known_to_hold_it() -> None:
    ledger = Ledger(4)
    ledger.take(1, Page.GRANTED, Owner("grant 7"))
    ledger._owner[0] = Owner("grant 8")
    assert ledger.audit() == ["page 0 is granted of grant 8, which is not known to hold such pages"]


def test_an_audit_sees_owners_whose_sum_is_not_the_count() -> None:
    ledger = Ledger(4)
    ledger.take(2, Page.ACTIVE, Owner("r"))
    ledger._held[Owner("r")][Page.ACTIVE] = 1
    assert ledger.audit() == ["active pages: counted 2, owners hold 1"]


def round_of(ledger: Ledger) -> list[list[str]]:
    """As many audits as walk all of it once."""
    return [ledger.audit() for _ in range(len(Page) + -(-ledger.capacity // SLICE) + 1)]


@pytest.mark.parametrize("page", [0, SLICE, 2 * SLICE + 5, 3 * SLICE])
def test_a_large_pool_is_walked_in_slices_that_find_a_fault_wherever_it_is(page: int) -> None:
    ledger = Ledger(3 * SLICE + 1)
    del ledger._free[PageId(page)]
    ledger.counts[Page.FREE] -= 1
    ledger.counts[Page.ACTIVE] += 1
    assert any(f"page {page} is free and disagrees with the free list" in faults for faults in round_of(ledger))
    assert f"page {page} is free and disagrees with the free list" in ledger.audit_all()


def test_what_a_slice_found_stays_known_until_it_is_walked_again() -> None:
    ledger = Ledger(3 * SLICE)
    assert not any(round_of(ledger))
    ledger._owner[5] = Owner("ghost")
    round_of(ledger)
    assert ledger.audit() == ["page 5 is free and owned by ghost"]
    assert ledger.audit() == ["page 5 is free and owned by ghost"]
    ledger._owner[5] = NOBODY
    round_of(ledger)
    assert ledger.audit() == []


def test_a_large_pool_whose_sum_is_wrong_is_known_at_once() -> None:
    ledger = Ledger(3 * SLICE)
    ledger.counts[Page.ACTIVE] += 1
    assert ledger.audit() == [f"{3 * SLICE + 1} pages accounted for, capacity is {3 * SLICE}"]


def test_a_free_list_of_another_length_is_known_at_once() -> None:
    ledger = Ledger(3 * SLICE)
    del ledger._free[PageId(2 * SLICE)]
    assert ledger.audit() == [f"{3 * SLICE} pages counted free, {3 * SLICE - 1} on the free list"]


def test_transitions_between_slices_are_no_faults() -> None:
    ledger = Ledger(3 * SLICE)
    held: list[tuple[Owner, tuple[PageId, ...]]] = []
    for number in range(120):
        assert ledger.audit() == []
        owner = Owner(f"r{number}")
        held.append((owner, ledger.take(60, Page.ACTIVE, owner)))
        if number % 3 == 2:
            owner, pages = held.pop(0)
            ledger.free(pages, owner)
    assert ledger.audit_all() == []


def test_an_owner_without_pages_is_forgotten() -> None:
    ledger = Ledger(4)
    ledger.free(ledger.take(3, Page.ACTIVE, Owner("r")), Owner("r"))
    assert ledger.holders() == {}
    assert ledger.held_by(Owner("r")) == {}


def test_holders_are_told_by_owner_and_state() -> None:
    ledger = Ledger(4)
    pages = ledger.take(3, Page.GRANTED, Owner("grant 7"))
    ledger.shift(pages[:1], Owner("grant 7"), Page.GRANTED, Page.DRAINING)
    assert ledger.holders() == {"grant 7": {"draining": 1, "granted": 2}}
