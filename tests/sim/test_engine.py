"""The simulated engine writes whose pages are whose, and lets go of them only when it says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdplane.core.events import Computed, Event, Released, Sampled
from pdplane.core.frames import Row
from pdplane.core.ids import PageId, Rid, Room
from pdplane.sim.engine import PAGE_BYTES, SimEngine, Work
from pdplane.transport.pool import PagePool


class Foreign(Exception):
    pass


class Host:
    """Time goes on only when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running = True
        self.due: list[Callable[[], None]] = []
        self.said: list[Event] = []
        self.pool = PagePool(8, PAGE_BYTES)
        self.engine = SimEngine(self, self.pool, page_size=4, chunk=8)

    def at(self, when: float, do: Callable[[], None]) -> None:
        self.due.append(do)

    def uniform(self, low: float, high: float) -> float:
        return high

    def post(self, event: Event) -> None:
        self.said.append(event)

    def foreign_tag(self, where: str, work: Work, page: PageId, index: int) -> None:
        raise Foreign(f"{where}: page {page}")

    def go(self) -> None:
        while self.due:
            self.due.pop(0)()

    def holds(self, page: int) -> bytes:
        return bytes(self.pool.page(PageId(page)))


def work(max_new: int = 3, **changes: int) -> Work:
    return Work(Rid("a"), Room(5), 1, 10, max_new, changes.get("stops_at", max_new))


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
    for index, page in enumerate((5, 2, 0)):
        host.pool.page(PageId(page))[:] = work(9).tag(index)
    host.engine.decode(work(9), pages(5, 2, 0), ROW, 9)
    host.go()
    assert host.said[-1] == Computed(rid=Rid("a"), tokens=12)
    host.engine.extend(Rid("a"), pages(3, 4))
    host.go()
    assert host.holds(3) == work(9).tag(3)
    assert host.said[-1] == Released(rid=Rid("a"))


def test_decode_will_not_start_on_anothers_page() -> None:
    host = Host()
    with pytest.raises(Foreign, match="decode starts: page 5"):
        host.engine.decode(work(), pages(5, 2, 0), ROW, 3)


def test_a_foreign_write_into_a_running_request_is_seen_at_its_next_step() -> None:
    host = Host()
    for index, page in enumerate((5, 2, 0)):
        host.pool.page(PageId(page))[:] = work().tag(index)
    host.engine.decode(work(), pages(5, 2, 0), ROW, 3)
    host.pool.page(PageId(2))[:] = bytes(PAGE_BYTES)
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
