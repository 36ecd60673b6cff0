"""The prefix cache against a naive model, and what it says of what it holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdplane.core.ids import PageId
from pdplane.core.pages import CACHE, Ledger, Owner, Page
from pdplane.core.prefix import PrefixCache

CAPACITY = 12
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(bytes)  # one token a page


def keys_of(prompt: bytes) -> list[bytes]:
    """Chained: each is all of the prompt up to there."""
    return [prompt[: end + 1] for end in range(len(prompt))]


class Request(msgspec.Struct):
    owner: Owner
    prompt: bytes
    shared: tuple[PageId, ...]
    own: tuple[PageId, ...]  # the last one is of the part that fills no page
    orphan: bool = False  # the cache was cleared since


class Known(msgspec.Struct):
    used_at: int
    refs: int = 0


class PrefixMachine(RuleBasedStateMachine):
    """The model: cached prefixes by their tokens, with the time of their last use and their references."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CAPACITY)
        self.cache = PrefixCache(self.ledger)
        self.model: dict[bytes, Known] = {}
        self.running: list[Request] = []
        self.time = 0

    def touch(self, prefix: bytes) -> None:
        self.time += 1
        for key in keys_of(prefix):
            self.model[key].used_at = self.time

    def longest(self, prompt: bytes) -> bytes:
        return max((key for key in self.model if prompt.startswith(key)), key=len, default=b"")

    def evict(self) -> None:
        """The least recently used of what nobody holds and nothing follows."""
        leaves = [key for key in self.model if not any(other[:-1] == key for other in self.model)]
        del self.model[min((key for key in leaves if not self.model[key].refs), key=lambda k: self.model[k].used_at)]

    @rule(prompt=prompts)
    def ask(self, prompt: bytes) -> None:
        found = self.longest(prompt)
        assert len(self.cache.match(keys_of(prompt))) == len(found)
        self.touch(found)

    @rule(prompt=prompts)
    def admit(self, prompt: bytes) -> None:
        found = self.longest(prompt)
        shared = self.cache.match(keys_of(prompt))
        assert len(shared) == len(found)
        self.cache.hold(shared)
        self.touch(found)
        for key in keys_of(found):
            self.model[key].refs += 1
        missing = len(prompt) - len(shared) + 1
        assert self.cache.available == self.ledger.free_count + sum(not known.refs for known in self.model.values())
        if missing > self.cache.available:
            with pytest.raises(AssertionError, match="wanted"):
                self.cache.take(missing, Page.COMPUTING, Owner("greedy"))
            self.leave(Request(Owner("greedy"), prompt, shared, ()))
            return
        for _ in range(missing - self.ledger.free_count):
            self.evict()
        owner = Owner(f"r{self.time}.{len(self.running)}")
        own = self.cache.take(missing, Page.COMPUTING, owner)
        self.running.append(Request(owner, prompt, shared, own))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        found = self.longest(request.prompt)
        grows = len(found) >= len(request.shared)
        kept = self.cache.keep(keys_of(request.prompt), request.own[:-1], request.owner, Page.COMPUTING)
        assert kept == (len(request.prompt) - len(found) if grows else 0)
        if grows:
            self.model |= {key: Known(0) for key in keys_of(request.prompt)[len(found) :]}
        self.touch(request.prompt if grows else found)
        self.ledger.free(request.own[-1:], request.owner)
        self.leave(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.ledger.free(request.own, request.owner)
        self.leave(request)

    def leave(self, request: Request) -> None:
        self.cache.release(request.shared)
        if request.orphan:
            return
        self.time += 1
        for key in keys_of(request.prompt)[: len(request.shared)]:
            self.model[key].refs -= 1
            if not self.model[key].refs:
                self.model[key].used_at = self.time

    @rule()
    def clear(self) -> None:
        assert self.cache.clear() == sum(not known.refs for known in self.model.values())
        self.model.clear()
        for request in self.running:
            request.orphan = True

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        holders: dict[PageId, int] = {}
        for request in self.running:
            for page in request.shared:
                holders[page] = holders.get(page, 0) + 1
        assert self.cache.audit_all(holders) == []
        assert self.ledger.audit() == []
        assert set(self.cache._by_key) == set(self.model)
        assert self.cache.evictable == sum(not known.refs for known in self.model.values())
        orphans = {page for request in self.running if request.orphan for page in request.shared}
        assert len(self.cache) == len(self.model) + len(orphans)
        assert self.ledger.counts[Page.CACHED] == len(self.cache)
        assert self.ledger.counts[Page.COMPUTING] == sum(len(request.own) for request in self.running)
        for key, known in self.model.items():
            assert self.cache._by_key[key].refs == known.refs


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=150, stateful_step_count=40)


# --- in words -----------------------------------------------------------------------------------------------------


def filled(capacity: int, *prompts: bytes) -> tuple[Ledger, PrefixCache]:
    """A cache in which these prompts have succeeded, one after another."""
    ledger = Ledger(capacity)
    cache = PrefixCache(ledger)
    for number, prompt in enumerate(prompts):
        done(cache, prompt, Owner(f"r{number}"))
    return ledger, cache


def done(cache: PrefixCache, prompt: bytes, owner: Owner) -> int:
    keys = keys_of(prompt)
    shared = cache.match(keys)
    cache.hold(shared)
    own = cache.take(len(keys) - len(shared), Page.SENDING, owner) if len(shared) < len(keys) else ()
    kept = cache.keep(keys, own, owner, Page.SENDING)
    cache.release(shared)
    return kept


def test_a_prompt_that_succeeded_is_found_again_and_nothing_else_is() -> None:
    _, cache = filled(8, b"abc")
    assert len(cache.match(keys_of(b"abcd"))) == 3
    assert len(cache.match(keys_of(b"abx"))) == 2
    assert cache.match(keys_of(b"bc")) == ()
    assert cache.match([]) == ()


def test_pages_that_another_request_cached_first_go_free() -> None:
    ledger, cache = filled(8)
    pages = [cache.take(3, Page.SENDING, Owner(rid)) for rid in ("first", "second")]
    assert cache.keep(keys_of(b"abc"), pages[0], Owner("first"), Page.SENDING) == 3
    assert cache.keep(keys_of(b"abd"), pages[1], Owner("second"), Page.SENDING) == 1
    assert cache.match(keys_of(b"abd")) == (*pages[0][:2], pages[1][2])
    assert (ledger.counts[Page.CACHED], ledger.free_count) == (4, 4)


def test_cached_pages_belong_to_the_cache() -> None:
    ledger, cache = filled(8, b"ab")
    assert ledger.holders() == {CACHE: {"cached": 2}}
    assert {ledger.owner_of(page) for page in cache.match(keys_of(b"ab"))} == {CACHE}


def test_leaves_go_before_their_parents_and_the_least_recently_used_first() -> None:
    ledger, cache = filled(6, b"abc", b"xyz")
    cache.match(keys_of(b"abc"))
    cache.take(2, Page.COMPUTING, Owner("r"))
    assert (len(cache.match(keys_of(b"xyz"))), len(cache.match(keys_of(b"abc")))) == (1, 3)
    assert ledger.free_count == 0


def test_only_as_many_are_evicted_as_are_missing() -> None:
    ledger, cache = filled(6, b"abc")
    cache.take(4, Page.COMPUTING, Owner("r"))
    assert (len(cache), ledger.free_count, cache.available) == (2, 0, 2)


def test_what_is_held_is_never_evicted() -> None:
    _, cache = filled(4, b"abcd")
    shared = cache.match(keys_of(b"ab"))
    cache.hold(shared)
    assert (cache.evictable, cache.available) == (2, 2)
    assert not set(cache.take(2, Page.COMPUTING, Owner("r"))) & set(shared)
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free or evictable"):
        cache.take(1, Page.COMPUTING, Owner("r"))
    assert cache.match(keys_of(b"abcd")) == shared


def test_a_prefix_can_only_be_held_whole() -> None:
    _, cache = filled(4, b"abc")
    with pytest.raises(AssertionError, match="a prefix is held whole"):
        cache.hold(cache.match(keys_of(b"abc"))[1:])


def test_what_was_not_held_cannot_be_released() -> None:
    _, cache = filled(4, b"ab")
    with pytest.raises(AssertionError, match="is not held"):
        cache.release(cache.match(keys_of(b"ab")))


def test_clear_forgets_at_once_and_frees_what_is_held_when_it_is_released() -> None:
    ledger, cache = filled(4, b"abc")
    shared = cache.match(keys_of(b"ab"))
    cache.hold(shared)
    assert cache.clear() == 1
    assert cache.match(keys_of(b"ab")) == ()
    assert ledger.counts[Page.CACHED] == 2
    assert cache.audit_all(dict.fromkeys(shared, 1)) == []
    cache.release(shared)
    assert (len(cache), ledger.free_count) == (0, 4)


def test_what_followed_a_cleared_prefix_is_not_cached() -> None:
    ledger, cache = filled(6, b"ab")
    shared = cache.match(keys_of(b"ab"))
    cache.hold(shared)
    own = cache.take(1, Page.SENDING, Owner("r"))
    cache.clear()
    assert cache.keep(keys_of(b"abc"), own, Owner("r"), Page.SENDING) == 0
    cache.release(shared)
    assert (len(cache), ledger.free_count) == (0, 6)


def test_the_audit_names_the_page_whose_references_are_not_what_requests_hold() -> None:
    _, cache = filled(4, b"ab")
    shared = cache.match(keys_of(b"ab"))
    cache.hold(shared)
    assert cache.audit(dict.fromkeys(shared, 1)) == []
    wrong = f"page {shared[0]}: 2 requests hold it, the prefix cache counts 1"
    assert cache.audit({shared[0]: 2, shared[1]: 1}) == [wrong]
    assert cache.audit({}) == ["the prefix cache counts 2 pages as held, requests hold 0"]


def test_the_audit_sees_a_page_that_is_not_the_ledgers_cached_one() -> None:
    ledger, cache = filled(4, b"ab")
    (page, *_) = cache.match(keys_of(b"ab"))
    ledger.free((page,), CACHE)
    faults = cache.audit_all({})
    assert "the prefix cache has 2 pages, the ledger counts 1 cached" in faults
    assert f"page {page} is in the prefix cache and free of ''" in faults
