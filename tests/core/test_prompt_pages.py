"""Pages of prompts: sharing, own pages, growth and keeping, against what each page really holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdplane.core.ids import PageId
from pdplane.core.node import Limits
from pdplane.core.pages import Ledger, Owner, Page
from pdplane.core.prompt_pages import Prompt, PromptPages, Taken

SIZE = 4
CAPACITY = 10


def prompt(text: str, extra: int = 0, *, last_computed: bool = False) -> Prompt:
    """A page for each letter, and `extra` tokens behind them; `last_computed`: as at prefill."""
    tokens = len(text) * SIZE + extra
    keys = tuple(text[: end + 1].encode() for end in range(len(text)))
    return Prompt(tokens, keys, (tokens - 1) // SIZE if last_computed else len(text))


class Request(msgspec.Struct):
    owner: Owner
    prompt: Prompt
    pages: list[PageId]
    shared: int

    @property
    def head(self) -> list[PageId]:
        return self.pages[: self.shared]


class PromptPagesMachine(RuleBasedStateMachine):
    """`holds`: what was written to each page last. Own pages are written when they are taken, shared ones never are."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CAPACITY)
        self.pages = PromptPages(self.ledger, Limits(pages=CAPACITY, page_size=SIZE))
        self.requests: list[Request] = []
        self.holds: dict[PageId, bytes] = {}
        self.arrived = 0

    def write(self, request: Request, first: int) -> None:
        for index, page in enumerate(request.pages[first:], first):
            keys = request.prompt.page_keys
            self.holds[page] = keys[index] if index < len(keys) else f"{request.owner} {index}".encode()

    @rule(
        text=st.text("ab", min_size=0, max_size=5),
        extra=st.integers(0, SIZE - 1),
        spare=st.integers(0, 3),
        last_computed=st.booleans(),
    )
    def ask(self, text: str, extra: int, spare: int, last_computed: bool) -> None:
        wanted = prompt(text, extra if text else extra + 1, last_computed=last_computed)
        hits, need = self.pages.hits(wanted), self.pages.need(wanted)
        assert hits <= wanted.most_shared
        read = {page for request in self.requests for page in request.head}
        idle_hits = len(set(self.pages._hits(wanted)) - read)
        fits = need - hits + spare <= self.pages.available - idle_hits
        assert self.pages.fits(wanted, spare) == fits
        if not fits:
            return
        self.arrived += 1
        owner = Owner(f"r{self.arrived}")
        taken = self.pages.take(wanted, Page.GRANTED, owner)
        assert (taken.shared, len(taken.pages), taken.own) == (hits, need, need - hits)
        assert self.pages.available >= spare
        request = Request(owner, wanted, list(taken.pages), taken.shared)
        for page, key in zip(request.head, wanted.page_keys, strict=False):
            assert self.holds[page] == key
        self.write(request, taken.shared)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """With no page free, whoever is idle in the cache gives way, and nobody else."""
        request = data.draw(st.sampled_from(self.requests))
        if self.pages.available:
            request.pages += self.pages.take_more(1, Page.GRANTED, request.owner)
            self.write(request, len(request.pages) - 1)
        else:
            with pytest.raises(AssertionError, match="1 pages wanted, 0 free or evictable"):
                self.pages.take_more(1, Page.GRANTED, request.owner)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        stamp = self.pages.stamp
        if keep:
            self.pages.keep(request.prompt, request.pages, request.shared, request.owner, Page.GRANTED)
        else:
            self.ledger.free(request.pages[request.shared :], request.owner)
        self.pages.release(request.head)
        assert self.pages.stamp != stamp
        if keep:
            assert self.pages.hits(request.prompt) == request.prompt.most_shared

    @invariant()
    def every_reader_finds_what_its_prompt_says(self) -> None:
        for request in self.requests:
            for page, key in zip(request.pages, request.prompt.page_keys, strict=False):
                assert self.holds[page] == key

    @invariant()
    def the_books_agree(self) -> None:
        heads = [request.head for request in self.requests]
        assert self.pages.audit(heads) == self.pages.audit_all(heads) == self.ledger.audit() == []
        read = {page for head in heads for page in head}
        own = sum(len(request.pages) - request.shared for request in self.requests)
        assert self.pages.available == CAPACITY - own - len(read)
        assert self.pages.freed_by(heads) == len(read)
        for request in self.requests:
            others = {page for other in self.requests if other is not request for page in other.head}
            assert self.pages.freed_by([request.head]) == len(set(request.head) - others)


TestPromptPages = PromptPagesMachine.TestCase
TestPromptPages.settings = settings(max_examples=120, stateful_step_count=40)


# --- in words -----------------------------------------------------------------------------------------------------


def pool(pages: int, *prompts: str, prefix_cache: bool = True) -> tuple[Ledger, PromptPages]:
    """A pool in which these prompts were whole, one after another."""
    ledger = Ledger(pages)
    block = PromptPages(ledger, Limits(pages=pages, page_size=SIZE, prefix_cache=prefix_cache))
    for number, text in enumerate(prompts):
        run(block, prompt(text), Owner(f"r{number}"))
    return ledger, block


def run(block: PromptPages, wanted: Prompt, owner: Owner) -> Taken:
    taken = block.take(wanted, Page.GRANTED, owner)
    block.keep(wanted, taken.pages, taken.shared, owner, Page.GRANTED)
    block.release(taken.pages[: taken.shared])
    return taken


def test_a_prompt_that_is_all_there_takes_no_page_of_its_own() -> None:
    ledger, block = pool(4, "ab")
    taken = block.take(prompt("ab"), Page.GRANTED, Owner("again"))
    assert (taken.shared, taken.own) == (2, 0)
    assert ledger.counts[Page.GRANTED] == 0
    block.keep(prompt("ab"), taken.pages, taken.shared, Owner("again"), Page.GRANTED)
    block.release(taken.pages)
    assert block.available == 4


def test_the_page_of_the_last_token_is_not_shared_where_it_is_computed() -> None:
    _, block = pool(6, "abc")
    assert block.hits(prompt("abc")) == 3
    assert block.hits(prompt("abc", last_computed=True)) == 2
    assert block.hits(prompt("abc", 1, last_computed=True)) == 3
    assert block.hits(Prompt(3 * SIZE, prompt("abc").page_keys)) == 0


def test_what_a_prompt_shares_is_no_room_for_its_own_pages() -> None:
    """Of 4 pages 3 are cached. Sharing two of them leaves two: the free one, and the third."""
    _, block = pool(4, "abc")
    assert block.fits(prompt("abxy"))
    assert not block.fits(prompt("abxy", 1))
    assert not block.fits(prompt("abxy"), spare=1)


def test_growth_takes_idle_cached_pages_and_leaves_what_is_read() -> None:
    _, block = pool(4, "abcd")
    block.take(prompt("ab"), Page.GRANTED, Owner("reader"))
    assert block.available == 2
    block.take_more(2, Page.ACTIVE, Owner("reader"))
    assert block.available == 0
    assert block.hits(prompt("abcd")) == 2


def test_pages_behind_the_prompt_are_not_kept() -> None:
    ledger, block = pool(6)
    taken = block.take(prompt("ab", 2), Page.ACTIVE, Owner("r"))
    pages = [*taken.pages, *block.take_more(2, Page.ACTIVE, Owner("r"))]
    block.keep(prompt("ab", 2), pages, 0, Owner("r"), Page.ACTIVE)
    assert (ledger.counts[Page.CACHED], ledger.free_count) == (2, 4)


def test_without_a_prefix_cache_nothing_is_shared_or_kept() -> None:
    ledger, block = pool(4, "ab", prefix_cache=False)
    assert (ledger.free_count, block.hits(prompt("ab"))) == (4, 0)
    assert block.take(prompt("ab"), Page.GRANTED, Owner("r")).own == 2


def test_keys_of_pages_that_are_not_there_are_a_fault() -> None:
    _, block = pool(4)
    taken = block.take(prompt("a"), Page.GRANTED, Owner("r"))
    with pytest.raises(AssertionError, match="1 pages for 2 keys"):
        block.keep(prompt("ab"), taken.pages, 0, Owner("r"), Page.GRANTED)


def test_pages_that_several_share_come_back_with_the_last_of_them() -> None:
    _, block = pool(4, "ab")
    first = block.take(prompt("ab"), Page.GRANTED, Owner("first"))
    second = block.take(prompt("a"), Page.GRANTED, Owner("second"))
    assert block.freed_by([first.pages]) == 1
    assert block.freed_by([second.pages]) == 0
    assert block.freed_by([first.pages, second.pages]) == 2
