"""The engine thread, turned by hand; one test lets it run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pdplane.core.ids import PageId, Rid
from pdplane.worker.engine import EngineRequest, ModelSpec, Sampling, StepOutput, Token
from pdplane.worker.engine_thread import FAILED_STEPS_LIMIT, Emission, EngineThread
from pdplane.worker.text import TextOptions

from .fake_engine import spec
from .http_fakes import ByteTokenizer

A = Rid("a.0.0")
B = Rid("b.0.0")


class ScriptedEngine:
    """Each step plays the next entry of `script`: outputs, or an exception. Aborted rids end with the next step."""

    model: ModelSpec = spec()
    on_dropped: Callable[[Rid], None] | None = None

    def __init__(self, *script: list[StepOutput] | Exception) -> None:
        self.script = list(script)
        self.held: dict[Rid, EngineRequest] = {}
        self.aborts: list[Rid] = []
        self.extended: list[tuple[Rid, list[PageId]]] = []
        self._ending: list[Rid] = []

    def attach(self, pool: memoryview, pages: int) -> None: ...

    def add(self, request: EngineRequest) -> None:
        if not request.pages:
            raise ValueError("no pages")
        self.held[request.rid] = request

    def extend(self, rid: Rid, pages: Sequence[PageId]) -> None:
        self.extended.append((rid, list(pages)))

    def abort(self, rid: Rid) -> bool:
        self.aborts.append(rid)
        if rid in self.held:
            self._ending.append(rid)
        return False

    def busy(self) -> bool:
        return bool(self.script or self._ending)

    def step(self) -> list[StepOutput]:
        planned = self.script.pop(0) if self.script else []
        if isinstance(planned, Exception):
            raise planned
        outputs = [output for output in planned if output.rid not in self._ending]
        ended, self._ending = dict.fromkeys(self._ending), []
        outputs += [StepOutput(rid, 0, finish="abort") for rid in ended if self.held.pop(rid, None)]
        for output in outputs:
            if output.finish:
                self.held.pop(output.rid, None)
        return outputs


def out(rid: Rid, text: str, computed: int = 1, **more: Any) -> StepOutput:
    return StepOutput(rid, computed, token=Token(ord(text)), **more)


def request(rid: Rid = A, **more: Any) -> EngineRequest:
    sampling = more.pop("sampling", Sampling(max_tokens=8))
    return EngineRequest(rid=rid, prompt=[1, 2, 3], sampling=sampling, pages=[PageId(0)], **more)


class Bench:
    def __init__(self, *script: list[StepOutput] | Exception) -> None:
        self.engine = ScriptedEngine(*script)
        self.posted: list[Emission] = []
        self.now = 0.0
        self.thread = EngineThread(self.engine, ByteTokenizer(), self.posted.extend, clock=lambda: self.now)

    def add(self, req: EngineRequest, *stop: str, prior: Sequence[Token] = ()) -> None:
        self.thread.add(req, TextOptions(stop=stop), prior)

    def turn(self) -> list[Emission]:
        before = len(self.posted)
        self.thread.turn()
        return self.posted[before:]

    def run(self) -> list[Emission]:
        while self.thread.turn():
            pass
        return self.posted


def text_of(emissions: list[Emission]) -> str:
    return "".join(emission.text for emission in emissions)


def releases(emissions: list[Emission], rid: Rid = A) -> int:
    return sum(emission.released for emission in emissions if emission.rid == rid)


def finishes(emissions: list[Emission], rid: Rid = A) -> list[str]:
    return [emission.finish for emission in emissions if emission.rid == rid and emission.finish]


def test_tokens_come_out_as_text_and_the_last_one_releases() -> None:
    bench = Bench([out(A, "h")], [out(A, "i", 4, finish="length")])
    bench.add(request())
    emissions = bench.run()
    assert text_of(emissions) == "hi"
    assert finishes(emissions) == ["length"]
    assert [emission.released for emission in emissions] == [False, True]
    assert bench.thread.running == 0


def test_a_prefill_chunk_reports_how_far_the_pages_are_filled() -> None:
    bench = Bench([StepOutput(A, 2)])
    bench.add(request())
    [emission] = bench.run()
    assert (emission.computed, emission.tokens, emission.finish, emission.released) == (2, [], None, False)


def test_a_stop_token_is_counted_but_not_shown() -> None:
    bench = Bench([out(A, "h")], [out(A, "!", finish="stop")])
    bench.add(request())
    emissions = bench.run()
    assert text_of(emissions) == "h"
    assert emissions[-1].matched_stop == ord("!")
    assert len(emissions[-1].tokens) == 1


def test_held_back_text_comes_with_the_end() -> None:
    bench = Bench([out(A, "S")], [out(A, "T", finish="length")])
    bench.add(request(), "STOP")
    assert text_of(bench.run()) == "ST"


def test_a_stop_string_ends_the_request_before_its_pages_are_released() -> None:
    bench = Bench([out(A, "a")], [out(A, "b")], [])
    bench.add(request(), "b")
    assert text_of(bench.turn()) == "a"
    [ended] = bench.turn()
    assert (ended.finish, ended.matched_stop, ended.text, ended.released) == ("stop", "b", "", False)
    assert len(ended.tokens) == 1
    assert bench.engine.aborts == [A]
    [released] = bench.turn()
    assert (released.finish, released.tokens, released.released) == (None, [], True)


def test_tokens_after_a_stop_string_are_swallowed_until_the_engine_lets_go() -> None:
    class Slow(ScriptedEngine):
        def abort(self, rid: Rid) -> bool:
            self.aborts.append(rid)
            return False

    bench = Bench()
    engine = Slow([out(A, "b")], [out(A, "c", 9)], [out(A, "d", 10, finish="length")])
    bench.thread = EngineThread(engine, ByteTokenizer(), bench.posted.extend)
    bench.add(request(), "b")
    emissions = bench.run()
    assert text_of(emissions) == ""
    assert finishes(emissions) == ["stop"]
    assert [(e.computed, e.released) for e in emissions] == [(1, False), (10, True)]


def test_a_stop_string_completed_by_the_engines_last_token_is_a_stop_and_a_release() -> None:
    bench = Bench([out(A, "b", finish="length")])
    bench.add(request(), "b")
    [emission] = bench.run()
    assert (emission.finish, emission.matched_stop, emission.released) == ("stop", "b", True)
    assert bench.engine.aborts == []


def test_the_first_token_of_a_hand_off_is_emitted_at_once_with_its_logprob() -> None:
    bench = Bench([out(A, "i", finish="length")])
    bench.add(request(computed=3, prior=(ord("h"),)), prior=[Token(ord("h"), -0.5)])
    emissions = bench.run()
    assert (emissions[0].text, emissions[0].tokens[0].logprob, emissions[0].computed) == ("h", -0.5, 3)
    assert text_of(emissions) == "hi"


def test_prior_tokens_without_logprobs_are_taken_from_the_request() -> None:
    bench = Bench([out(A, "i", finish="length")])
    bench.add(request(prior=(ord("h"),)))
    assert [token.id for token in bench.run()[0].tokens] == [ord("h")]


def test_a_stop_string_over_the_seam_still_stops() -> None:
    bench = Bench([out(A, "O")], [])
    bench.add(request(prior=(ord("N"),)), "NO")
    emissions = bench.run()
    assert text_of(emissions) == ""
    assert finishes(emissions) == ["stop"]
    assert releases(emissions) == 1


def test_a_hand_off_that_already_holds_the_stop_string_never_reaches_the_engine() -> None:
    bench = Bench()
    bench.add(request(prior=(ord("x"),)), "x")
    [emission] = bench.run()
    assert (emission.finish, emission.matched_stop, emission.text, emission.released) == ("stop", "x", "", True)
    assert bench.engine.held == {}
    assert bench.thread.running == 0


def test_a_prefill_reports_a_stop_string_in_its_only_token_as_the_real_end() -> None:
    bench = Bench([out(A, "x", 3, finish="length")])
    bench.add(request(prefill_only=True), "x")
    [emission] = bench.run()
    assert (emission.finish, emission.ended, emission.matched_stop, emission.released) == ("length", "stop", "x", True)


def test_a_prefill_passes_the_engines_word_on_the_end() -> None:
    bench = Bench([out(A, "x", 3, finish="length", ended="stop")])
    bench.add(request(prefill_only=True))
    [emission] = bench.run()
    assert (emission.finish, emission.ended, emission.matched_stop) == ("length", "stop", ord("x"))


def test_a_prefill_does_not_take_a_character_that_has_only_begun_for_a_stop_string() -> None:
    """Its other bytes are decode's to sample; only an end here makes it a broken one, which reads as U+FFFD."""
    begun = StepOutput(A, 3, token=Token("é".encode()[0]), finish="length")
    bench = Bench([begun])
    bench.add(request(prefill_only=True), "\ufffd")
    assert [emission.ended for emission in bench.run()] == [None]
    begun.ended = "length"
    bench = Bench([begun])
    bench.add(request(prefill_only=True), "\ufffd")
    assert [emission.ended for emission in bench.run()] == ["stop"]


def test_min_tokens_holds_a_stop_string_off() -> None:
    bench = Bench([out(A, "b")], [out(A, "b", finish="length")])
    bench.add(request(sampling=Sampling(max_tokens=2, min_tokens=2)), "b")
    emissions = bench.run()
    assert text_of(emissions) == "b"
    assert finishes(emissions) == ["stop"]


def test_an_abort_reaches_the_engine_from_the_calling_thread() -> None:
    bench = Bench([out(A, "h")], [])
    bench.add(request())
    bench.turn()
    bench.thread.abort(A)
    assert bench.engine.aborts == [A]
    [emission] = bench.turn()
    assert (emission.finish, emission.released) == ("abort", True)


def test_an_abort_before_the_add_was_seen_keeps_the_request_from_the_engine() -> None:
    bench = Bench()
    bench.add(request(prior=(ord("h"),)))
    bench.thread.abort(A)
    [emission] = bench.run()
    assert (emission.finish, emission.tokens, emission.released) == ("abort", [], True)
    assert bench.engine.held == {}


def test_an_abort_that_falls_between_the_look_and_the_add_is_not_lost() -> None:
    bench = Bench()
    add = bench.engine.add

    def abort_just_before(req: EngineRequest) -> None:
        bench.thread.abort(req.rid)
        add(req)

    bench.engine.add = abort_just_before  # type: ignore[method-assign]
    bench.add(request())
    assert finishes(bench.run()) == ["abort"]
    assert releases(bench.posted) == 1


def test_an_abort_wakes_a_request_that_waits_for_a_page() -> None:
    class Starved(ScriptedEngine):
        def busy(self) -> bool:
            return False

    bench = Bench()
    bench.thread = EngineThread(Starved(), ByteTokenizer(), bench.posted.extend)
    bench.add(request())
    bench.turn()
    bench.thread.abort(A)
    [emission] = bench.turn()
    assert (emission.finish, emission.released) == ("abort", True)


def test_an_abort_of_an_unknown_rid_is_nothing() -> None:
    bench = Bench()
    bench.thread.abort(B)
    assert bench.engine.aborts == []
    assert bench.run() == []


def test_a_rid_that_is_live_cannot_be_added_again() -> None:
    bench = Bench()
    bench.add(request())
    with pytest.raises(ValueError, match="already running"):
        bench.add(request())


def test_pages_reach_the_engine_while_it_has_the_request_and_not_after() -> None:
    bench = Bench([out(A, "h", finish="length")])
    bench.add(request())
    bench.thread.extend(A, [PageId(7)])
    bench.thread.extend(B, [PageId(8)])
    bench.turn()
    bench.thread.extend(A, [PageId(9)])
    bench.turn()
    assert bench.engine.extended == [(A, [PageId(7)])]


def test_a_request_that_the_engine_refuses_ends_with_its_reason() -> None:
    bench = Bench()
    req = request()
    req.pages = []
    bench.add(req)
    [emission] = bench.run()
    assert (emission.finish, emission.error, emission.released) == ("error", "ValueError: no pages", True)
    assert bench.thread.running == 0


def test_a_failed_step_ends_every_request_and_the_next_one_is_served(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(RuntimeError("boom"))
    bench.add(request(A))
    bench.add(request(B))
    with caplog.at_level(logging.CRITICAL):
        failed = bench.turn()
    assert {(e.rid, e.finish, e.error, e.released) for e in failed} == {
        (A, "error", "RuntimeError: boom", False),
        (B, "error", "RuntimeError: boom", False),
    }
    released = bench.turn()
    assert {(e.rid, e.finish, e.released) for e in released} == {(A, None, True), (B, None, True)}
    bench.engine.script = [[out(Rid("c"), "k", finish="length")]]
    bench.add(request(Rid("c")))
    assert text_of(bench.turn()) == "k"


def test_an_engine_that_keeps_failing_is_stepped_no_more_so_that_its_pages_are_safe(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(*[RuntimeError("boom")] * (FAILED_STEPS_LIMIT + 1))
    bench.add(request())
    with caplog.at_level(logging.CRITICAL):
        for _ in range(FAILED_STEPS_LIMIT):
            bench.turn()
    assert finishes(bench.posted) == ["error"]
    assert releases(bench.posted) == 1
    assert "boom" in bench.thread.broken
    bench.add(request(B))
    [refused] = bench.turn()
    assert (refused.finish, refused.released) == ("error", True)
    assert len(bench.engine.script) == 1


def test_the_age_of_a_step_counts_while_it_runs() -> None:
    bench = Bench()
    ages: list[float] = []

    class Timed(ScriptedEngine):
        def step(self) -> list[StepOutput]:
            bench.now += 3.0
            ages.append(bench.thread.step_age(bench.now))
            return super().step()

    bench.thread = EngineThread(Timed([]), ByteTokenizer(), bench.posted.extend, clock=lambda: bench.now)
    bench.turn()
    assert ages == [3.0]
    assert bench.thread.step_age(bench.now) == 0.0
    assert bench.thread.steps == 1


def test_a_running_thread_serves_wakes_for_an_abort_and_ends_what_is_live_when_stopped() -> None:
    posted: list[Emission] = []
    ended = threading.Event()

    def post(emissions: list[Emission]) -> None:
        posted.extend(emissions)
        if any(emission.rid == A and emission.released for emission in emissions):
            ended.set()

    thread = EngineThread(ScriptedEngine(), ByteTokenizer(), post)
    thread.start()
    thread.add(request(A), TextOptions())
    thread.add(request(B), TextOptions())
    thread.abort(A)
    assert ended.wait(timeout=30)
    thread.stop(timeout_s=30)
    assert finishes(posted, A) == ["abort"]
    assert finishes(posted, B) == ["abort"]
    assert releases(posted, B) == 1
    with pytest.raises(RuntimeError, match="stopping"):
        thread.add(request(Rid("late")), TextOptions())


class Obliging(ScriptedEngine):
    """Drops an aborted request at once: it is between two steps, or at work on others."""

    def abort(self, rid: Rid) -> bool:
        self.aborts.append(rid)
        return self.held.pop(rid, None) is not None


def obliging(*script: list[StepOutput] | Exception) -> Bench:
    bench = Bench()
    bench.engine = Obliging(*script)
    bench.thread = EngineThread(bench.engine, ByteTokenizer(), bench.posted.extend)
    return bench


def test_what_the_engine_drops_is_released_by_the_abort_itself_and_once() -> None:
    bench = obliging([out(A, "h", 4)], [out(A, "i", 5)])
    bench.add(request())
    bench.turn()
    bench.thread.abort(A)
    last = bench.posted[-1]
    assert (last.finish, last.computed, last.released, bench.thread.running) == ("abort", 4, True, 0)
    bench.thread.abort(A)
    bench.run()
    assert releases(bench.posted) == 1


def test_an_abort_of_what_is_still_in_the_inbox_releases_it_without_the_engine() -> None:
    bench = obliging()
    bench.add(request())
    bench.thread.abort(A)
    assert [(e.finish, e.released) for e in bench.posted] == [("abort", True)]
    bench.run()
    assert (releases(bench.posted), bench.engine.held) == (1, {})


def test_a_stop_string_releases_with_its_last_text_where_the_engine_drops_it() -> None:
    bench = obliging([out(A, "b")])
    bench.add(request(), "b")
    [ended] = bench.run()
    assert (ended.finish, ended.released, bench.thread.running) == ("stop", True, 0)


def test_a_failed_step_releases_what_the_engine_drops(caplog: pytest.LogCaptureFixture) -> None:
    bench = obliging(RuntimeError("boom"))
    bench.add(request())
    with caplog.at_level(logging.CRITICAL):
        [failed] = bench.run()
    assert (failed.finish, failed.released, bench.thread.running) == ("error", True, 0)


def test_what_leaves_a_shared_step_is_released_before_that_step_is_over() -> None:
    bench = Bench([out(A, "h"), out(B, "h")])
    bench.add(request(A))
    bench.add(request(B))
    bench.turn()
    assert bench.engine.on_dropped is not None
    bench.engine.on_dropped(A)
    assert (bench.posted[-1].rid, bench.posted[-1].finish, bench.posted[-1].released) == (A, "abort", True)
    assert bench.thread.running == 1


def test_a_broken_engine_that_still_says_busy_does_not_keep_the_thread_turning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(*[RuntimeError("no more bits")] * (FAILED_STEPS_LIMIT + 1))
    bench.add(request())
    bench.run()
    assert bench.thread.broken
    assert bench.engine.busy()
    looked: list[bool] = []
    inbox = bench.thread._inbox

    class Watched:
        @staticmethod
        def get(block: bool) -> Any:
            looked.append(block)
            return inbox.get(block=False)

    bench.thread._inbox = Watched()  # type: ignore[assignment]
    bench.thread.turn(wait=True)
    assert looked == [True]


def test_a_fault_on_the_thread_itself_ends_every_request_and_later_ones_too(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench([out(A, "h")], [out(A, "i")])
    ended = threading.Event()

    def post(emissions: list[Emission]) -> None:
        bench.posted.extend(emissions)
        if any(emission.released for emission in emissions):
            ended.set()

    bench.thread = EngineThread(bench.engine, WordlessTokenizer(), post)
    for rid in (A, B):
        ended.clear()
        bench.add(request(rid))
        if rid == A:
            bench.thread.start()
        assert ended.wait(30)
        assert finishes(bench.posted, rid) == ["error"]
        assert releases(bench.posted, rid) == 1
    assert "no word for 104" in bench.thread.broken
    bench.thread.stop()


class WordlessTokenizer(ByteTokenizer):
    def stream(self, *, skip_special: bool = True) -> Any:
        class Stream:
            @staticmethod
            def push(token: int) -> str:
                raise LookupError(f"no word for {token}")

        return Stream()
