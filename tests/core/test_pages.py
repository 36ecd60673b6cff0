"""The ledger against a model: whatever is done, every page has one state and one owner, and the sum is the capacity."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pdplane.core.ids import PageId
from pdplane.core.pages import NOBODY, Ledger, Owner, Page

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
        assert sum(sum(held.values()) for held in self.ledger.holders().values()) == len(self.model)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


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


def test_holders_are_told_by_owner_and_state() -> None:
    ledger = Ledger(4)
    pages = ledger.take(3, Page.GRANTED, Owner("grant 7"))
    ledger.shift(pages[:1], Owner("grant 7"), Page.GRANTED, Page.DRAINING)
    assert ledger.holders() == {"grant 7": {"draining": 1, "granted": 2}}
