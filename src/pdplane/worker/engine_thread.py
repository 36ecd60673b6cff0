"""The one thread that owns the engine. Messages go in, emissions come out: tokens as text, ends, and releases.

An end and a release are two things. The end (`finish`) is the client's: a stop string ends a request here, while the
engine may still be writing its next row. The release is the pages': only when it is true does the engine touch them no
more (the "own completion" proof), and it comes exactly once for each request that was added.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import msgspec

from pdplane.core.ids import PageId, Rid

from .engine import Engine, EngineRequest, StepOutput, Token, Tokenizer
from .text import Spelling, TextOptions

log = logging.getLogger(__name__)

FAILED_STEPS_LIMIT = 3


class Emission(msgspec.Struct, kw_only=True):
    """What one turn did for one request. `computed`: tokens whose KV is in the pages. `finish`, given at most once:
    "stop" | "length" | "abort" | "error" (with `error`). `ended`: the real end of a prefill_only request.
    `matched_stop`: the stop string or stop token. `released`: the engine touches the request's pages no more."""

    rid: Rid
    computed: int = 0
    tokens: list[Token] = []
    text: str = ""
    finish: str | None = None
    ended: str | None = None
    matched_stop: str | int | None = None
    error: str = ""
    released: bool = False


class _Add(msgspec.Struct):
    request: EngineRequest
    text: TextOptions
    prior: Sequence[Token]


class _Extend(msgspec.Struct):
    rid: Rid
    pages: Sequence[PageId]


class _Wake(msgspec.Struct):
    """Something happened that the engine knows already: look again."""


class _Sample(msgspec.Struct):
    spelling: Spelling
    computed: int
    prefill_only: bool
    finished: bool = False


class EngineThread:
    """`post` is called on this thread, after an add that has something to say and after each step, and on that of
    whoever aborts what the engine is not at work on; it must not block.

    Without `start`, a test drives the loop by `turn`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        post: Callable[[list[Emission]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        engine.on_dropped = lambda rid: self._send([self._let_go(rid)])
        self._tokenizer = tokenizer
        self._post = post
        self._clock = clock
        self._inbox: SimpleQueue[_Add | _Extend | _Wake] = SimpleQueue()
        self._lock = threading.Lock()  # guards _live, _queued and _aborted: callers' threads and this one
        self._live: set[Rid] = set()
        self._queued: set[Rid] = set()  # of these, in the inbox: the engine has never seen them
        self._aborted: set[Rid] = set()
        self._samples: dict[Rid, _Sample] = {}  # this thread's own: what the engine holds
        self._stopping = False
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
        with self._lock:
            if self._stopping:
                raise RuntimeError("the engine thread is stopping")
            if request.rid in self._live:
                raise ValueError(f"rid {request.rid!r} is already running")
            self._live.add(request.rid)
            self._queued.add(request.rid)
        self._inbox.put(_Add(request, text, prior or [Token(token) for token in request.prior]))

    def extend(self, rid: Rid, pages: Sequence[PageId]) -> None:
        self._inbox.put(_Extend(rid, pages))

    def abort(self, rid: Rid) -> None:
        """Effective at once. What the running step is not at work on (in the inbox, or waiting in the engine) is
        released at once too: it does not wait for other requests' step. A rid that is not live is ignored."""
        with self._lock:
            if rid not in self._live:
                return
            queued = rid in self._queued
            if queued:
                self._drop(rid)
            else:
                self._aborted.add(rid)
        if queued or self._engine.abort(rid):
            self._send([self._let_go(rid)])
        else:
            self._inbox.put(_Wake())

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends after the running step; what is live is emitted as aborted and released. Waits up to `timeout_s`."""
        with self._lock:
            self._stopping = True
        self._inbox.put(_Wake())
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def running(self) -> int:
        """Requests whose pages the engine may still touch, queued ones included."""
        return len(self._live)

    def step_age(self, now: float) -> float:
        """Seconds since the running step began; 0 between steps."""
        started = self.step_started_at
        return 0.0 if started is None else max(0.0, now - started)

    # --- on the engine's thread ---

    def turn(self, *, wait: bool = False) -> bool:
        """Take the messages, then one step if there is one to do. `wait`: block for a message where there is neither.
        Returns whether anything was done."""
        emissions: list[Emission] = []
        took = self._take_messages(emissions, wait=wait and (bool(self.broken) or not self._engine.busy()))
        self._send(emissions)
        if not (self._engine.busy() or self._aborted) or self._stopping or self.broken:
            return took
        self._send(self._step())
        return True

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.turn(wait=True)
            except Exception as error:  # a fault of ours: without this thread every request would wait for ever
                log.exception("the engine thread failed")
                self.broken = f"the engine thread failed: {_reason(error)}"
                self._send(self._give_up("error", self.broken))
        self._send(self._give_up("abort", ""))

    def _take_messages(self, emissions: list[Emission], *, wait: bool) -> bool:
        took = False
        while True:
            try:
                message = self._inbox.get(block=wait and not took)
            except Empty:
                return took
            took = True
            if isinstance(message, _Add):
                emissions.extend(self._admit(message))
            elif isinstance(message, _Extend) and message.rid in self._samples:
                self._engine.extend(message.rid, message.pages)

    def _admit(self, message: _Add) -> list[Emission]:
        request = message.request
        with self._lock:
            if request.rid not in self._queued:  # aborted or given up while it was in the inbox
                return []
            self._queued.discard(request.rid)
        spelling = Spelling(self._tokenizer, message.text, request.sampling.min_tokens)
        sample = _Sample(spelling, request.computed, request.prefill_only)
        opening = self._open(request, sample, message.prior)
        if self.broken:
            opening = self._final(request, finish="error", error=self.broken)
        elif self._was_aborted(request.rid):
            opening = self._final(request, finish="abort")
        elif not sample.finished:
            return self._hand_over(request, sample, opening)
        opening.released = True
        self._forget(request.rid)
        return [opening]

    def _open(self, request: EngineRequest, sample: _Sample, prior: Sequence[Token]) -> Emission:
        """The tokens that came with the hand-off. A stop string that they complete ends the request before the engine
        has seen it."""
        opening = Emission(rid=request.rid, computed=request.computed, tokens=list(prior))
        for token in prior:
            opening.text += sample.spelling.push(token.id)
            if sample.spelling.matched is not None:
                opening.finish, opening.matched_stop, sample.finished = "stop", sample.spelling.matched, True
                break
        return opening

    def _hand_over(self, request: EngineRequest, sample: _Sample, opening: Emission) -> list[Emission]:
        self._samples[request.rid] = sample
        try:
            self._engine.add(request)
        except Exception as error:
            log.exception("the engine refused request %s", request.rid)
            self._forget(request.rid)
            return [self._final(request, finish="error", error=_reason(error))]
        # An abort between the look and the add fell on a rid that the engine did not know.
        if self._was_aborted(request.rid) and self._engine.abort(request.rid):
            return [self._let_go(request.rid)]
        return [opening] if opening.tokens else []

    def _step(self) -> list[Emission]:
        self.step_started_at = self._clock()
        try:
            outputs = self._engine.step()
        except Exception as error:
            log.exception("an engine step failed")
            return self._step_failed(_reason(error))
        finally:
            self.step_started_at = None
        self.steps += 1
        self._failed_steps = 0
        return [emission for output in outputs for emission in self._tell(output)]

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
        emission = self._spell(sample, output)
        emission.released = released
        sample.finished = emission.finish is not None
        if sample.finished and not released and self._engine.abort(output.rid):
            emission.released = True
            self._forget(output.rid)
        return [emission]

    def _spell(self, sample: _Sample, output: StepOutput) -> Emission:
        emission = Emission(
            rid=output.rid, computed=output.computed, finish=output.finish, ended=output.ended, error=output.error
        )
        end = output.ended or output.finish
        if output.token is not None:
            emission.tokens = [output.token]
            if end != "stop":
                emission.text = sample.spelling.push(output.token.id)
        over = output.ended if sample.prefill_only else output.finish  # a handed-off sample's text goes on elsewhere
        if sample.spelling.matched is None and over is not None:
            last = output.token.id if output.token is not None and end == "stop" else None
            emission.text += sample.spelling.end(last)
            emission.matched_stop = last
        if sample.spelling.matched is not None:
            _stop_by_text(emission, sample)
        return emission

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
        with self._lock:
            rids = sorted(self._live)
            self._live, self._queued, self._aborted = set(), set(), set()
        samples, self._samples = self._samples, {}
        emissions = []
        for rid in rids:
            sample = samples.get(rid)
            said = sample is not None and sample.finished
            computed = 0 if sample is None else sample.computed
            emission = Emission(rid=rid, computed=computed, released=True)
            emissions.append(emission if said else msgspec.structs.replace(emission, finish=finish, error=error))
        return emissions

    def _was_aborted(self, rid: Rid) -> bool:
        with self._lock:
            return rid in self._aborted

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
        with self._lock:
            self._drop(rid)

    def _drop(self, rid: Rid) -> None:
        """Under the lock."""
        self._live.discard(rid)
        self._queued.discard(rid)
        self._aborted.discard(rid)

    def _final(self, request: EngineRequest, *, finish: str, error: str = "") -> Emission:
        return Emission(rid=request.rid, computed=request.computed, finish=finish, error=error, released=True)

    def _send(self, emissions: list[Emission]) -> None:
        if emissions:
            self._post(emissions)


def _stop_by_text(emission: Emission, sample: _Sample) -> None:
    """A stop string ends a sample. A prefill_only request finishes as it does, and reports it as its real end."""
    emission.matched_stop = sample.spelling.matched
    if sample.prefill_only:
        emission.ended = "stop"
    elif emission.finish not in ("abort", "error"):
        emission.finish = "stop"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
