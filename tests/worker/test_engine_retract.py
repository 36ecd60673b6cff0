"""Retract, restore and early ends on the engine's thread, with an engine that sees every wrong byte of its KV."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pdplane.core.ids import PageId, Rid
from pdplane.core.layout import LayoutGroup
from pdplane.core.slices import shard_bytes
from pdplane.worker.engine import EngineRequest, ModelSpec, Sampling
from pdplane.worker.engine_thread import Emission, EngineThread
from pdplane.worker.text import TextOptions

from .fake_engine import RuleEngine, spec
from .http_fakes import ByteTokenizer

A = Rid("a.0.0")
B = Rid("b.0.0")
PAGES = 32
PROMPT = b"once upon a time"  # four pages
THREE_HEADS = spec(heads=3, row_bytes=1536)
MLA = spec(groups=[LayoutGroup("kv", 656, (0, 1, 2), "fp8"), LayoutGroup("index", 132, (0, 2), "fp8")])


def pages(*numbers: int) -> list[PageId]:
    return [PageId(number) for number in numbers]


class Bench:
    """A thread turned by hand."""

    def __init__(self, model: ModelSpec | None = None, ranks: int = 1, engine: RuleEngine | None = None) -> None:
        self.engine = engine or RuleEngine(model or spec())
        model = self.engine.model
        sizes = [PAGES * shard_bytes(model.groups, model.page_size, rank, ranks) for rank in range(ranks)]
        self.pools = [memoryview(bytearray(size)) if size else None for size in sizes]
        self.engine.attach(self.pools, PAGES)
        self.posted: list[Emission] = []
        self.on_post: Callable[[list[Emission]], None] = lambda emissions: None
        self.thread = EngineThread(self.engine, ByteTokenizer(), self._take, self.pools)

    def _take(self, emissions: list[Emission]) -> None:
        self.posted.extend(emissions)
        self.on_post(emissions)

    def add(self, rid: Rid = A, own: Sequence[PageId] = (), *, tokens: int = 40, stop: tuple[str, ...] = ()) -> None:
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = EngineRequest(rid=rid, prompt=list(PROMPT), sampling=sampling, pages=list(own or pages(*range(16))))
        self.thread.add(request, TextOptions(stop=stop))

    def turn(self, count: int = 1) -> list[Emission]:
        before = len(self.posted)
        for _ in range(count):
            self.thread.turn()
        return self.posted[before:]

    def end(self, rid: Rid = A) -> None:
        """Turns until it is released."""
        for _ in range(200):
            if self.releases(rid):
                return
            self.thread.turn()
        raise AssertionError(f"{rid} was never released")

    def scribble(self) -> None:
        """Others use all pages meanwhile."""
        for pool in self.pools:
            if pool is not None:
                pool[:] = b"\xa5" * pool.nbytes

    def of(self, rid: Rid = A) -> list[Emission]:
        return [emission for emission in self.posted if emission.rid == rid]

    def text(self, rid: Rid = A) -> str:
        return "".join(emission.text for emission in self.of(rid))

    def finishes(self, rid: Rid = A) -> list[str]:
        return [emission.finish for emission in self.of(rid) if emission.finish]

    def releases(self, rid: Rid = A) -> int:
        return sum(emission.released for emission in self.of(rid))

    def retracts(self, rid: Rid = A) -> list[int]:
        return [emission.retracted for emission in self.of(rid) if emission.retracted is not None]

    def retracted(self, after: int = 4) -> list[PageId]:
        """A request retracted after so many turns; returns the pages that it had."""
        held = pages(*range(16))
        self.add(A, held)
        self.turn(after)
        self.thread.retract(A, held)
        self.turn()
        assert len(self.retracts()) == 1
        return held


def whole(model: ModelSpec | None = None) -> str:
    bench = Bench(model)
    bench.add()
    bench.end()
    assert bench.finishes() == ["length"]
    return bench.text()


@pytest.mark.parametrize(
    ("model", "ranks"), [(spec(), 1), (spec(), 2), (spec(), 4), (THREE_HEADS, 2), (THREE_HEADS, 4), (MLA, 2)]
)
@pytest.mark.parametrize("after", [2, 3, 6, 7])
def test_a_restored_request_has_every_byte_of_its_kv_and_goes_on(model: ModelSpec, ranks: int, after: int) -> None:
    bench = Bench(model, ranks)
    bench.retracted(after)
    bench.scribble()
    bench.thread.restore(A, pages(*range(31, 15, -1)))
    bench.end()
    assert bench.text() == whole(model)
    assert (bench.finishes(), bench.releases(), len(bench.retracts())) == (["length"], 1, 1)


def test_it_can_be_retracted_again_and_again() -> None:
    bench = Bench(ranks=2)
    held = bench.retracted(2)
    for number in range(5):
        bench.scribble()
        held = held[1:] + held[:1]
        bench.thread.restore(A, held)
        bench.turn(2)
        bench.thread.retract(A, held)
        bench.turn()
        assert len(bench.retracts()) == number + 2
    bench.thread.restore(A, held)
    bench.end()
    assert bench.text() == whole()
    assert bench.thread.retracted_bytes == 0


def test_a_retract_says_how_far_the_kv_is_and_copies_no_other_page() -> None:
    bench = Bench(ranks=2)
    bench.retracted(4)
    assert bench.retracts() == [18]  # the prompt, and two tokens of three
    assert bench.thread.retracted_bytes == 5 * bench.engine.model.page_bytes
    bench.thread.restore(A, pages(*range(16)))
    bench.turn()
    assert bench.thread.retracted_bytes == 0


def test_a_restore_writes_no_page_but_those_that_held_kv() -> None:
    bench = Bench()
    bench.retracted(4)
    bench.scribble()
    bench.engine.allow = 0
    bench.thread.restore(A, pages(20, 21, 22, 23, 24, 25, 26))
    bench.turn()
    (pool,) = bench.pools
    assert pool is not None
    size = bench.engine.model.page_bytes
    touched = [page for page in range(PAGES) if bytes(pool[page * size : (page + 1) * size]) != b"\xa5" * size]
    assert touched == [20, 21, 22, 23, 24]


def test_others_go_on_while_one_is_retracted() -> None:
    bench = Bench()
    bench.add(A, pages(*range(16)))
    bench.add(B, pages(*range(16, 32)))
    bench.turn(4)
    bench.thread.retract(A, pages(*range(16)))
    bench.turn()
    before = len(bench.of())
    bench.end(B)
    assert (bench.text(B), len(bench.of())) == (whole(), before)
    bench.thread.restore(A, pages(*range(16, 32)))
    bench.end()
    assert bench.text() == whole()


def test_the_thread_sleeps_while_all_are_retracted() -> None:
    bench = Bench()
    bench.retracted()
    assert not bench.thread.turn()
    assert bench.thread.running == 1


def test_pages_on_the_way_to_a_retracted_request_are_dropped() -> None:
    bench = Bench()
    bench.add(A, pages(*range(5)))
    bench.turn(3)
    bench.thread.retract(A, pages(*range(5)))
    bench.thread.extend(A, pages(30))
    bench.turn()
    bench.scribble()
    bench.thread.restore(A, pages(*range(10, 16)))
    bench.thread.extend(A, pages(*range(16, 26)))
    bench.end()
    assert bench.text() == whole()


# --- what ends while it is retracted, or just before ---------------------------------------------------------------


def test_a_retract_of_what_has_ended_says_nothing_more() -> None:
    bench = Bench()
    bench.add(tokens=2)
    bench.end()
    bench.thread.retract(A, pages(*range(16)))
    bench.thread.restore(A, pages(*range(16)))
    bench.thread.finish(A)
    assert bench.turn() == []
    assert (bench.retracts(), bench.releases()) == ([], 1)


def test_a_stop_string_before_the_retract_is_all_that_comes() -> None:
    bench = Bench()
    bench.add(stop=(whole()[1],))
    bench.turn(3)
    bench.thread.retract(A, pages(*range(16)))
    bench.end()
    assert (bench.finishes(), bench.retracts(), bench.releases()) == (["stop"], [], 1)


def test_an_abort_before_the_retract_is_all_that_comes() -> None:
    bench = Bench()
    bench.add()
    bench.turn(3)
    bench.thread.abort(A)
    bench.thread.retract(A, pages(*range(16)))
    bench.end()
    assert (bench.finishes(), bench.retracts(), bench.releases()) == (["abort"], [], 1)


def test_an_abort_while_retracted_releases_at_once_and_drops_the_copy() -> None:
    bench = Bench()
    bench.retracted()
    assert bench.thread.retracted_bytes > 0
    bench.thread.abort(A)
    assert (bench.finishes(), bench.releases(), bench.thread.retracted_bytes) == (["abort"], 1, 0)
    bench.scribble()
    bench.thread.restore(A, pages(*range(16)))
    assert bench.turn() == []
    assert bytes(bench.pools[0] or b"") == b"\xa5" * (PAGES * bench.engine.model.page_bytes)
    assert bench.thread.running == 0


class Meddled(RuleEngine):
    """`meanwhile` runs in the midst of a park or resume, as another thread might."""

    def __init__(self, model: ModelSpec | None = None) -> None:
        super().__init__(model)
        self.meanwhile: Callable[[], None] = lambda: None

    def park(self, rid: Rid) -> bool:
        self.meanwhile()
        done = super().park(rid)
        self.meanwhile()
        return done

    def resume(self, rid: Rid, pages: Sequence[PageId]) -> None:
        self.meanwhile()
        super().resume(rid, pages)
        self.meanwhile()


def meddled(meanwhile: Callable[[Bench], None]) -> Bench:
    engine = Meddled()
    bench = Bench(engine=engine)
    engine.meanwhile = lambda: meanwhile(bench)
    return bench


def test_an_abort_in_the_midst_of_a_retract_waits_for_it_and_releases_once() -> None:
    seen: list[int] = []

    def abort(bench: Bench) -> None:
        bench.thread.abort(A)
        seen.append(bench.releases())

    bench = meddled(abort)
    bench.add()
    bench.turn(4)
    bench.thread.retract(A, pages(*range(16)))
    bench.turn()
    assert seen == [0, 0]
    assert (bench.finishes(), bench.retracts(), bench.releases()) == (["abort"], [], 1)
    assert (bench.thread.running, bench.thread.retracted_bytes) == (0, 0)


def test_an_abort_on_the_news_of_a_retract_comes_after_it() -> None:
    bench = Bench()

    def abort(emissions: list[Emission]) -> None:
        if any(emission.retracted is not None for emission in emissions):
            bench.thread.abort(A)

    bench.on_post = abort
    bench.retracted()
    assert [(e.retracted, e.finish, e.released) for e in bench.of()[-2:]] == [(18, None, False), (None, "abort", True)]
    assert bench.thread.retracted_bytes == 0


def test_an_abort_in_the_midst_of_a_restore_gives_the_pages_back_only_when_nothing_is_written_any_more() -> None:
    """Whoever hears of the release may give them away at once."""
    bench = meddled(lambda it: None)
    bench.retracted()
    assert isinstance(bench.engine, Meddled)
    seen: list[int] = []

    def abort() -> None:
        bench.thread.abort(A)
        seen.append(bench.releases())

    bench.engine.meanwhile = abort
    bench.thread.restore(A, pages(*range(16, 32)))
    bench.end()
    assert seen == [0, 0]
    assert (bench.finishes(), bench.releases(), bench.thread.running) == (["abort"], 1, 0)


def test_a_failed_step_ends_the_retracted_too() -> None:
    bench = Bench()
    bench.retracted()
    bench.add(B, pages(*range(16, 32)))
    bench.engine.fail = [RuntimeError("boom")]
    bench.turn()
    assert (bench.finishes(), bench.releases(), bench.thread.retracted_bytes) == (["error"], 1, 0)


# --- an early end ---------------------------------------------------------------------------------------------------


def test_an_early_end_is_a_length_with_what_was_held_back() -> None:
    bench = Bench()
    text = whole()
    bench.add(stop=(text[2:4] + "\x00",))
    bench.turn(3)
    held = bench.text()
    bench.turn()
    assert bench.text() == held == text[:2]
    bench.thread.finish(A)
    bench.end()
    assert (bench.text(), bench.finishes(), bench.releases()) == (text[:3], ["length"], 1)


def test_an_early_end_of_a_retracted_request_releases_it() -> None:
    bench = Bench()
    bench.retracted()
    bench.thread.finish(A)
    bench.turn()
    assert (bench.finishes(), bench.releases(), bench.thread.retracted_bytes) == (["length"], 1, 0)


def test_an_early_end_and_an_abort_are_one_end() -> None:
    bench = Bench()
    bench.add()
    bench.turn(3)
    bench.thread.finish(A)
    bench.thread.abort(A)
    bench.end()
    bench.turn()
    assert (bench.finishes(), bench.releases()) == (["abort"], 1)


# --- with the thread running -----------------------------------------------------------------------------------------


class Running(Bench):
    """A thread that runs; what it says wakes whoever waits."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._said = threading.Condition()
        self.on_post = self._wake

    def _wake(self, emissions: list[Emission]) -> None:
        with self._said:
            self._said.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self._said:
            assert self._said.wait_for(condition, timeout=30)


def test_a_stop_releases_the_retracted_once_and_keeps_no_copy() -> None:
    bench = Running()
    bench.thread.start()
    bench.add()
    bench.until(lambda: any(emission.tokens for emission in bench.of()))
    bench.thread.retract(A, pages(*range(16)))
    bench.until(lambda: bool(bench.retracts() or bench.releases()))
    bench.thread.stop(timeout_s=30)
    assert (bench.releases(), len(bench.finishes()), bench.thread.retracted_bytes) == (1, 1, 0)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_races_each_request_ends_and_is_released_once(seed: int) -> None:
    """Retracts, restores, aborts and early ends from three threads at once."""
    bench = Running()
    rids = [Rid(f"r{number}.0.0") for number in range(8)]
    own = {rid: pages(*range(4 * number, 4 * number + 4)) for number, rid in enumerate(rids)}
    bench.thread.start()
    for rid in rids:
        sampling = Sampling(max_tokens=1000, temperature=0.0, ignore_eos=True)
        request = EngineRequest(rid=rid, prompt=list(PROMPT[:8]), sampling=sampling, pages=own[rid][:3])
        bench.thread.add(request, TextOptions())

    def meddle(turn: int) -> None:
        for number, rid in enumerate(rids):
            what = (seed + turn + number) % 4
            bench.thread.retract(rid, own[rid])
            if what == 0:
                bench.thread.abort(rid)
            bench.thread.restore(rid, own[rid])
            if what == 1:
                bench.thread.finish(rid)
            bench.thread.abort(rid)

    threads = [threading.Thread(target=meddle, args=(turn,)) for turn in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    bench.until(lambda: all(bench.releases(rid) for rid in rids))
    bench.thread.stop(timeout_s=30)
    for rid in rids:
        assert bench.releases(rid) == 1
        assert len(bench.finishes(rid)) == 1
        assert bench.finishes(rid)[0] in ("abort", "length")
    assert (bench.thread.running, bench.thread.retracted_bytes) == (0, 0)
