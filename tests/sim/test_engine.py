"""The simulated engine writes whose pages are whose, and lets go of them only when it says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdplane.core.events import Computed, Event, Released, Retracted, Sampled
from pdplane.core.frames import Row
from pdplane.core.ids import PageId, Rid, Room
from pdplane.core.slices import shard_bytes
from pdplane.sim.content import GROUP, PAGE_SIZE, Work
from pdplane.sim.engine import SimEngine
from pdplane.transport.pool import PagePool


class Foreign(Exception):
    pass


class Host:
    """Time goes on only when the test says so. `ranks`: tensor parallel ones."""

    def __init__(self, ranks: int = 1) -> None:
        self.now = 0.0
        self.running = True
        self.due: list[Callable[[], None]] = []
        self.said: list[Event] = []
        self.ranks = ranks
        sizes = [shard_bytes((GROUP,), PAGE_SIZE, rank, ranks) for rank in range(ranks)]
        self.pools = [PagePool(8, size) if size else None for size in sizes]
        self.engine = SimEngine(self, self.pools, chunk=8)

    def at(self, when: float, do: Callable[[], None]) -> None:
        self.due.append(do)

    def uniform(self, low: float, high: float) -> float:
        return high

    def post(self, event: Event) -> None:
        self.said.append(event)

    def foreign_tag(self, where: str, work: Work, page: PageId, index: int) -> None:
        raise Foreign(f"{where}: page {page}")

    def short_restore(self, work: Work, needed: int, given: int) -> None:
        raise Foreign(f"{given} pages for {needed}")

    def go(self) -> None:
        while self.due:
            self.due.pop(0)()

    def go_until_it_can_say(self, tokens: int) -> None:
        while self.said[-1:] != [Computed(rid=Rid("a"), tokens=tokens)]:
            self.due.pop(0)()

    def holds(self, page: int, rank: int = 0) -> bytes:
        pool = self.pools[rank]
        assert pool is not None
        return bytes(pool.page(PageId(page)))

    def fill(self, work: Work, *numbers: int) -> None:
        for index, page in enumerate(numbers):
            for rank, pool in enumerate(self.pools):
                if pool is not None:
                    pool.page(PageId(page))[:] = work.tag(index, rank, self.ranks)

    def spoil(self, page: int) -> None:
        pool = self.pools[0]
        assert pool is not None
        pool.page(PageId(page))[:] = bytes(pool.page_bytes)


def work(max_new: int = 3) -> Work:
    return Work(Rid("a"), Room(5), 1, 10, max_new, max_new)


def pages(*numbers: int) -> list[PageId]:
    return [PageId(number) for number in numbers]


ROW = Row(first_token=7, prompt_tokens=10, prompt_digest=b"")


def test_a_prefill_tags_its_pages_chunk_by_chunk_and_then_lets_go() -> None:
    host = Host()
    host.engine.prefill(work(), pages(5, 2, 0))
    host.go()
    assert [host.holds(page) for page in (5, 2, 0)] == [work().tag(index) for index in range(3)]
    assert host.said == [
        Computed(rid=Rid("a"), tokens=8),
        Sampled(rid=Rid("a"), token=7, ended=None),
        Released(rid=Rid("a")),
    ]


def test_each_rank_holds_its_heads_and_one_without_any_has_no_pool() -> None:
    host = Host(ranks=4)
    assert host.pools[0] is None
    host.engine.prefill(work(), pages(5, 2, 0))
    host.go()
    parts = [host.holds(5, rank) for rank in (1, 2, 3)]
    assert parts == [work().tag(0, rank, 4) for rank in (1, 2, 3)]
    assert sorted(b"".join(parts)) == sorted(work().tag(0))


def test_shared_pages_are_read_and_not_written() -> None:
    host = Host()
    host.engine.prefill(work(), pages(5, 2, 0), cached_tokens=4)
    with pytest.raises(Foreign, match="prefill goes on: page 5"):
        host.go()
    again = Host()
    again.fill(work(), 5)
    again.engine.prefill(work(), pages(5, 2, 0), cached_tokens=4)
    again.go()
    assert again.said[-1] == Released(rid=Rid("a"))


def test_a_step_that_runs_when_its_request_is_aborted_still_writes() -> None:
    host = Host()
    host.engine.prefill(work(), pages(5, 2, 0))
    host.engine.abort(Rid("a"))
    assert host.said == []
    host.go()
    assert host.holds(5) == work().tag(0)
    assert host.said == [Released(rid=Rid("a"))]


def test_decode_stops_where_it_has_no_page_and_goes_on_when_it_gets_one() -> None:
    host = Host()
    host.fill(work(9), 5, 2, 0)
    host.engine.decode(work(9), pages(5, 2, 0), ROW, 9)
    host.go()
    assert host.said[-1] == Computed(rid=Rid("a"), tokens=12)
    host.engine.extend(Rid("a"), pages(3, 4))
    host.go()
    assert host.holds(3) == work(9).tag(3)
    assert host.said[-1] == Released(rid=Rid("a"))


def test_an_aggregated_request_computes_its_prompt_and_then_its_answer() -> None:
    host = Host()
    host.engine.whole(work(), pages(5, 2, 0), 3)
    host.go()
    assert host.said == [
        Computed(rid=Rid("a"), tokens=8),
        Computed(rid=Rid("a"), tokens=10),
        Computed(rid=Rid("a"), tokens=11),
        Released(rid=Rid("a")),
    ]


def test_what_is_laid_aside_comes_back_in_other_pages_and_goes_on() -> None:
    host = Host()
    host.fill(work(9), 5, 2, 0)
    host.engine.decode(work(9), pages(5, 2, 0), ROW, 9)
    host.go_until_it_can_say(11)
    host.engine.retract(Rid("a"))
    host.go()
    assert host.said[-1] == Retracted(rid=Rid("a"), tokens=12)
    for page in (5, 2, 0):
        host.spoil(page)
    host.engine.restore(Rid("a"), pages(1, 4, 7, 6, 3))
    assert [host.holds(page) for page in (1, 4, 7)] == [work(9).tag(index) for index in range(3)]
    host.go()
    assert host.said[-1] == Released(rid=Rid("a"))


def test_a_page_that_changed_while_it_was_copied_is_seen() -> None:
    host = Host()
    host.fill(work(9), 5, 2, 0)
    host.engine.decode(work(9), pages(5, 2, 0), ROW, 9)
    host.go_until_it_can_say(11)
    host.engine.retract(Rid("a"))
    host.spoil(2)
    with pytest.raises(Foreign, match="page 2"):
        host.go()


def test_a_request_does_not_come_back_to_fewer_pages_than_its_copy_fills() -> None:
    host = Host()
    host.fill(work(9), 5, 2, 0)
    host.engine.decode(work(9), pages(5, 2, 0), ROW, 9)
    host.engine.retract(Rid("a"))
    host.go()
    with pytest.raises(Foreign, match="2 pages for 3"):
        host.engine.restore(Rid("a"), pages(1, 4))


def test_decode_will_not_start_on_anothers_page() -> None:
    host = Host()
    with pytest.raises(Foreign, match="decode starts: page 5"):
        host.engine.decode(work(), pages(5, 2, 0), ROW, 3)


def test_a_foreign_write_into_a_running_request_is_seen_at_its_next_step() -> None:
    host = Host()
    host.fill(work(), 5, 2, 0)
    host.engine.decode(work(), pages(5, 2, 0), ROW, 3)
    host.spoil(2)
    with pytest.raises(Foreign, match="decode goes on: page 2"):
        host.go()


def test_a_frozen_engine_does_nothing_until_it_is_woken() -> None:
    host = Host()
    host.running = False
    host.engine.prefill(work(), pages(5, 2, 0))
    assert host.due == []
    host.running = True
    host.engine.wake()
    host.go()
    assert host.said[-1] == Released(rid=Rid("a"))
