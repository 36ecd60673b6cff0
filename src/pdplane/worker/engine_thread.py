"""The one thread that owns the engine. Messages go in, emissions come out: tokens as text, ends, and releases.

An end and a release are two things. The end (`finish`) is the client's: a stop string ends a request here, while the
engine may still be writing its next row. The release is the pages': only when it is true does the engine touch them no
more (the "own completion" proof), and it comes exactly once for each request that was added.

No emission of a request follows its release, from whichever thread that comes: the same rid may be added anew at once.

A retract is neither: the request is laid aside between two steps and its KV kept in host memory, so that its pages are
free for others. While this thread has it in its hands to do so, or to put it back, an abort from another thread waits
until it is put down: whoever is told of a release may give the pages away at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import msgspec

from pdplane.core.ids import PageId, Rid
from pdplane.core.layout import pages_for

from .engine import Engine, EngineRequest, StepOutput, Token, Tokenizer
from .host_copy import Pools
from .live import Abort, Live
from .sample import Emission as Emission
from .sample import Sample
from .text import Spelling, TextOptions

log = logging.getLogger(__name__)

FAILED_STEPS_LIMIT = 3


class _Add(msgspec.Struct):
    request: EngineRequest
    text: TextOptions
    prior: Sequence[Token]


class _Extend(msgspec.Struct):
    rid: Rid
    pages: Sequence[PageId]


class _Retract(msgspec.Struct):
    rid: Rid
    pages: Sequence[PageId]


class _Restore(msgspec.Struct):
    rid: Rid
    pages: Sequence[PageId]


class _Finish(msgspec.Struct):
    rid: Rid


class _Wake(msgspec.Struct):
    """Something happened that the engine knows already: look again."""


_Message = _Add | _Extend | _Retract | _Restore | _Finish | _Wake


class EngineThread:
    """`post` is called on this thread, after an add that has something to say and after each step, and on that of
    whoever aborts what the engine is not at work on; it must not block. `pools` are those that the engine is attached
    to; without them nothing can be retracted.

    Without `start`, a test drives the loop by `turn`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        post: Callable[[list[Emission]], None],
        pools: Sequence[memoryview | None] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        engine.on_dropped = lambda rid: self._send([self._let_go(rid)])
        self._tokenizer = tokenizer
        self._post = post
        self._pools = Pools(pools, engine.model)
        self._clock = clock
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._live = Live()
        self._saying = threading.RLock()  # what a step did is said before an abort from another thread can follow it
        self._samples: dict[Rid, Sample] = {}  # this thread's own: what the engine holds
        self._failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.step_started_at: float | None = None
        self.steps = 0
        self.broken = ""

    # --- from any thread ---

    def start(self) -> None:
        self._thread.start()

    def add(self, request: EngineRequest, text: TextOptions, prior: Sequence[Token] = ()) -> None:
        """Queue a request. `prior`: request.prior as tokens with their logprobs, where these are known; they are
        emitted at once. Raises ValueError where the rid is still live, RuntimeError after `stop`."""
        self._live.add(request.rid)
        self._inbox.put(_Add(request, text, prior or [Token(token) for token in request.prior]))

    def extend(self, rid: Rid, pages: Sequence[PageId]) -> None:
        self._inbox.put(_Extend(rid, pages))

    def retract(self, rid: Rid, pages: Sequence[PageId]) -> None:
        """After the running step: copy the KV of this running request, which is in these pages, to host memory and lay
        it aside. Says `retracted`; where the request has ended or was aborted, its release is all that comes."""
        self._inbox.put(_Retract(rid, pages))

    def restore(self, rid: Rid, pages: Sequence[PageId]) -> None:
        """Copy the KV of a retracted request back, bit for bit, into these pages, its own from now on, and go on. Where
        it has ended meanwhile they are not touched."""
        self._inbox.put(_Restore(rid, pages))

    def finish(self, rid: Rid) -> None:
        """After the running step: end this request, also a retracted one, with `length`. Nothing where it has ended."""
        self._inbox.put(_Finish(rid))

    def abort(self, rid: Rid) -> None:
        """Effective at once. What the running step is not at work on (in the inbox, waiting in the engine, retracted)
        is released at once too, without waiting for other requests' step. A rid that is not live is ignored."""
        with self._saying:
            match self._live.abort(rid):
                case Abort.UNSEEN:
                    self._send([self._let_go(rid)])
                case Abort.WITH_ENGINE if self._engine.abort(rid):
                    self._send([self._let_go(rid)])
                case Abort.WITH_ENGINE:
                    self._inbox.put(_Wake())

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends after the running step; what is live is emitted as aborted and released. Waits up to `timeout_s`."""
        self._live.close()
        self._inbox.put(_Wake())
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def running(self) -> int:
        """Requests whose pages the engine may still touch, queued ones included."""
        return len(self._live)

    @property
    def retracted_bytes(self) -> int:
        """Host memory that holds the KV of retracted requests."""
        return sum(sample.host.size_bytes for sample in list(self._samples.values()) if sample.host is not None)

    def step_age(self, now: float) -> float:
        """Seconds since the running step began; 0 between steps."""
        started = self.step_started_at
        return 0.0 if started is None else max(0.0, now - started)

    # --- on the engine's thread ---

    def turn(self, *, wait: bool = False) -> bool:
        """Take the messages, then one step if there is one to do. `wait`: block for a message where there is neither.
        Returns whether anything was done."""
        took = self._take_messages(wait=wait and (bool(self.broken) or not self._engine.busy()))
        if not (self._engine.busy() or self._live.any_aborted) or self._live.closed or self.broken:
            return took
        self._step()
        return True

    def _run(self) -> None:
        while not self._live.closed:
            try:
                self.turn(wait=True)
            except Exception as error:  # a fault of ours: without this thread every request would wait for ever
                log.exception("the engine thread failed")
                self.broken = f"the engine thread failed: {_reason(error)}"
                self._send(self._give_up("error", self.broken))
        self._send(self._give_up("abort", ""))

    def _take_messages(self, *, wait: bool) -> bool:
        took = False
        while True:
            try:
                message = self._inbox.get(block=wait and not took)
            except Empty:
                return took
            took = True
            self._carry_out(message)

    def _carry_out(self, message: _Message) -> None:
        match message:
            case _Add():
                with self._saying:
                    self._send(self._admit(message))
            case _Extend(rid, pages):
                if rid in self._samples:
                    self._engine.extend(rid, pages)
            case _Retract(rid, pages):
                self._retract(rid, pages)
            case _Restore(rid, pages):
                self._restore(rid, pages)
            case _Finish(rid):
                self._end_early(rid)

    def _retract(self, rid: Rid, pages: Sequence[PageId]) -> None:
        sample = self._pick_up(rid)
        if sample is None:
            return
        if self._engine.park(rid):
            filled = pages_for(sample.computed, self._engine.model.page_size)
            assert len(pages) >= filled, f"{rid} has KV in {filled} pages, and {len(pages)} were named"
            sample.host = self._pools.save(pages[:filled])
            if not self._live.aborted(rid):
                self._send([Emission(rid=rid, retracted=sample.computed)])
        self._put_down()

    def _restore(self, rid: Rid, pages: Sequence[PageId]) -> None:
        sample = self._pick_up(rid)
        if sample is None:
            return
        if sample.host is not None:
            self._pools.load(sample.host, pages)
            sample.host = None
            self._engine.resume(rid, pages)
        self._put_down()

    def _end_early(self, rid: Rid) -> None:
        sample = self._pick_up(rid)
        if sample is None:
            return
        emission = sample.spell(StepOutput(rid, sample.computed, finish="length"))
        emission.released = self._engine.abort(rid)
        if emission.released:
            self._forget(rid)
        self._send([emission])
        self._put_down()

    def _pick_up(self, rid: Rid) -> Sample | None:
        """None where its end has come, or is on its way."""
        sample = self._samples.get(rid)
        return sample if sample is not None and not sample.finished and self._live.pick_up(rid) else None

    def _put_down(self) -> None:
        rid = self._live.put_down()
        if rid is not None and self._engine.abort(rid):
            self._send([self._let_go(rid)])

    def _admit(self, message: _Add) -> list[Emission]:
        request = message.request
        if not self._live.see(request.rid):
            return []
        spelling = Spelling(self._tokenizer, message.text, request.sampling.min_tokens)
        sample = Sample(spelling, request.computed, request.prefill_only)
        opening = sample.open(request, message.prior)
        if self.broken:
            opening = self._final(request, finish="error", error=self.broken)
        elif self._live.aborted(request.rid):
            opening = self._final(request, finish="abort")
        elif not sample.finished:
            return self._hand_over(request, sample, opening)
        opening.released = True
        self._forget(request.rid)
        return [opening]

    def _hand_over(self, request: EngineRequest, sample: Sample, opening: Emission) -> list[Emission]:
        self._samples[request.rid] = sample
        try:
            self._engine.add(request)
        except Exception as error:
            log.exception("the engine refused request %s", request.rid)
            self._forget(request.rid)
            return [self._final(request, finish="error", error=_reason(error))]
        # An abort between the look and the add fell on a rid that the engine did not know.
        if self._live.aborted(request.rid) and self._engine.abort(request.rid):
            return [self._let_go(request.rid)]
        return [opening] if opening.tokens else []

    def _step(self) -> None:
        self.step_started_at = self._clock()
        try:
            outputs = self._engine.step()
        except Exception as error:
            log.exception("an engine step failed")
            with self._saying:
                self._send(self._step_failed(_reason(error)))
            return
        finally:
            self.step_started_at = None
        self.steps += 1
        self._failed_steps = 0
        with self._saying:
            self._send([emission for output in outputs for emission in self._tell(output)])

    def _tell(self, output: StepOutput) -> list[Emission]:
        sample = self._samples.get(output.rid)
        if sample is None:
            return []
        sample.computed = output.computed
        released = output.finish is not None
        if released:
            self._forget(output.rid)
        if sample.finished:
            return [Emission(rid=output.rid, computed=output.computed, released=True)] if released else []
        emission = sample.spell(output)
        emission.released = released
        if sample.finished and not released and self._engine.abort(output.rid):
            emission.released = True
            self._forget(output.rid)
        return [emission]

    def _step_failed(self, reason: str) -> list[Emission]:
        """Every request ends with the error. The engine is told to abort them and releases each by its last output; one
        whose steps go on failing is not stepped again, so that nothing is touched any more."""
        self._failed_steps += 1
        if self._failed_steps >= FAILED_STEPS_LIMIT:
            self.broken = f"the engine failed {self._failed_steps} steps in a row: {reason}"
            return self._give_up("error", self.broken)
        emissions = []
        for rid, sample in list(self._samples.items()):
            emission = Emission(rid=rid, computed=sample.computed, released=self._engine.abort(rid))
            if emission.released:
                self._forget(rid)
            if not sample.finished:
                sample.finished = True
                emission.finish, emission.error = "error", reason
            if emission.released or emission.finish:
                emissions.append(emission)
        return emissions

    def _give_up(self, finish: str, error: str) -> list[Emission]:
        """No step follows: all that is live ends and is released."""
        rids = self._live.give_up()
        samples, self._samples = self._samples, {}
        emissions = []
        for rid in rids:
            sample = samples.get(rid)
            said = sample is not None and sample.finished
            computed = 0 if sample is None else sample.computed
            emission = Emission(rid=rid, computed=computed, released=True)
            emissions.append(emission if said else msgspec.structs.replace(emission, finish=finish, error=error))
        return emissions

    def _let_go(self, rid: Rid) -> Emission:
        """The release of what the engine has just dropped, or never had."""
        sample = self._samples.get(rid)
        self._forget(rid)
        emission = Emission(rid=rid, released=True, computed=sample.computed if sample else 0)
        if sample is None or not sample.finished:
            emission.finish = "abort"
        return emission

    def _forget(self, rid: Rid) -> None:
        self._samples.pop(rid, None)
        self._live.drop(rid)

    def _final(self, request: EngineRequest, *, finish: str, error: str = "") -> Emission:
        return Emission(rid=request.rid, computed=request.computed, finish=finish, error=error, released=True)

    def _send(self, emissions: list[Emission]) -> None:
        if emissions:
            self._post(emissions)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
