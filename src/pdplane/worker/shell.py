"""What the three roles' shells share: they carry out the core's effects and feed back what happened.

Everything here runs on the loop's thread. The engine and the transport have threads of their own; what they report hops
here first. Events are taken one by one: an effect that yields an event at once (a fence that closes on the spot) queues
it behind the effects under way.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from pdplane import __version__
from pdplane.core.effects import AbortEngine, Alarm, AnswerFailed, Count, Effect, ExtendPages, Note
from pdplane.core.errors import Cause, Refused, aborted
from pdplane.core.events import Cancel, Computed, Drain, Event, Released, Tick
from pdplane.core.frames import PromptId, Row
from pdplane.core.ids import Instance, Rid
from pdplane.core.layout import Stamp
from pdplane.core.node import Node
from pdplane.core.pages import Page
from pdplane.observe.prometheus import Histogram, labelled, single
from pdplane.observe.records import LegRecord, RecordBook, describe
from pdplane.transport.pool import PagePool

from .engine import EngineRequest, ModelSpec, Token, Tokenizer
from .engine_thread import Emission, EngineThread
from .service import Chunk, Generation, Stream
from .text import TextOptions, spell

log = logging.getLogger(__name__)

N = TypeVar("N", bound=Node)

STUCK_STEP_S = 60.0
"""A step older than this means that the worker does not progress; its health says so."""


class Job(msgspec.Struct):
    """A generation under way: what the edge gave, and the stream that it reads."""

    generation: Generation
    stream: Stream
    text: TextOptions
    prompt: PromptId
    arrived: float
    completion_tokens: int = 0
    cached_tokens: int = 0


class Shell(Generic[N]):
    """`build` makes the node. Subclasses carry out their role's effects in `_do_role` and take emissions."""

    role = ""
    node: N

    def __init__(
        self, *, instance: Instance, model: ModelSpec, stamp: Stamp, pool: PagePool, tokenizer: Tokenizer
    ) -> None:
        self.instance = instance
        self.model = model
        self.model_name = model.name
        self.stamp = stamp
        self.pool = pool
        self.tokenizer = tokenizer
        self.context_len = model.context_len
        self.vocab_size = model.vocab_size
        self.max_prompt_tokens = min(model.context_len - 1, pool.pages * model.page_size)
        self.default_bootstrap_port: int | None = None
        self.engine: EngineThread | None = None
        self.records = RecordBook()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.first_token = Histogram()
        self.request_time = Histogram()
        self.jobs: dict[Rid, Job] = {}
        self._in_engine: set[Rid] = set()
        self._ended = asyncio.Event()
        self.loop_lag_s = 0.0
        self._alarms: deque[str] = deque(maxlen=100)
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = float("inf")

    # --- events and effects ---------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Hand an event to the core and carry out what it asks for."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for effect in self.node.handle(self._events.popleft(), self._loop.time()):
                    self._do(effect)
        finally:
            self._handling = False
        self._wind_timer()

    def post_soon(self, event: Event) -> None:
        """From any thread."""
        try:
            self._loop.call_soon_threadsafe(self.post, event)
        except RuntimeError:
            log.debug("an event after the loop's end: %s", type(event).__name__)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Note(rid, _, state, detail):
                self.records.note(rid, self._loop.time(), state, detail)
            case Count(name, label):
                self.counts[name, label] += 1
            case AnswerFailed(rid, cause):
                self._answer_failed(rid, cause)
            case ExtendPages(rid, pages):
                self._engine.extend(rid, pages)
            case AbortEngine(rid):
                self._engine.abort(rid)
            case Alarm(text):
                self._alarms.append(text)
                self.counts["alarm", ""] += 1
                log.error("%s", text)
            case _:
                self._do_role(effect)

    def _do_role(self, effect: Effect) -> None:
        raise NotImplementedError(type(effect).__name__)

    @property
    def _engine(self) -> EngineThread:
        assert self.engine is not None
        return self.engine

    def _wind_timer(self) -> None:
        due = self.node.next_due()
        if due is None or due == self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_due = None, float("inf")
        self.post(Tick())

    # --- the edge's calls (Service) -------------------------------------------------------------------------------

    def submit(self, batch: Sequence[Generation]) -> list[Stream]:
        """All or none. Raises Refused with the first refusal, after taking back what was accepted before it."""
        streams = [self._accept(generation) for generation in batch]
        refused = next((stream.refusal for stream in streams if stream.refusal), None)
        if refused is None:
            return streams
        for stream in streams:
            stream.close(aborted(self.role))
        raise Refused(refused)

    def _accept(self, generation: Generation) -> Stream:
        stream = Stream(generation.rid, self._closed)
        now = self._loop.time()
        if generation.rid in self.jobs or generation.rid in self._in_engine:
            text = f"rid {generation.rid!r} is in use; every attempt needs one of its own"
            stream.fail(Cause("duplicate_rid", text, 409, side=self.role))
            return stream
        prompt = prompt_id(generation.prompt)
        try:
            arrival = self._arrival(generation, prompt, now + generation.deadline_s)
        except Refused as refused:
            stream.fail(refused.cause)
            return stream
        options = TextOptions(
            stop=generation.stop,
            skip_special_tokens=generation.skip_special_tokens,
            include_stop_str=generation.include_stop_str,
        )
        self.jobs[generation.rid] = Job(generation, stream, options, prompt, now)
        self.records.open(
            LegRecord(
                rid=generation.rid,
                request_id=generation.request_id,
                room=generation.room,
                role=self.role,
                instance=self.instance,
                started_unix_s=time.time(),
                started=now,
                prompt_tokens=prompt.tokens,
            )
        )
        self.post(arrival)
        return stream

    def _arrival(self, generation: Generation, prompt: PromptId, deadline: float) -> Event:
        """The core's event for a new leg. Raises Refused where this role will not have it."""
        raise NotImplementedError

    def _closed(self, rid: Rid, cause: Cause) -> None:
        """The edge has closed a stream: its client left, or its batch was refused."""
        self.post(Cancel(rid, cause))
        self._drop(rid, cause.code)

    def abort(self, rid: str, room: int | None = None) -> int:
        named = [
            job.generation.rid
            for job in self.jobs.values()
            if rid in (job.generation.rid, job.generation.request_id) and room in (None, job.generation.room)
        ]
        return self._abort(named)

    def abort_all(self) -> int:
        return self._abort(list(self.jobs))

    def _abort(self, rids: Iterable[Rid]) -> int:
        ended = 0
        for rid in rids:
            self.post(Cancel(rid, aborted(self.role)))
            ended += 1
        return ended

    def record(self, key: str) -> dict[str, Any] | None:
        found = self.records.find(key)
        if not found:
            return None
        held = self.node.ledger.holders()
        return {
            "role": self.role,
            "instance": self.instance,
            "legs": [{**describe(record), "held_pages": self._held(record, held)} for record in found],
        }

    def _held(self, record: LegRecord, held: dict[Any, dict[str, int]]) -> dict[str, int]:
        return held.get(record.rid, {})

    def health(self) -> tuple[bool, dict[str, Any]]:
        age = self._engine.step_age(time.monotonic())
        live, progressing = not self._engine.broken, age < STUCK_STEP_S
        ready = live and not self.node.draining
        facts = {
            "live": live,
            "ready": ready,
            "progressing": progressing,
            "step_age_s": round(age, 3),
            "draining": self.node.draining,
            "engine_error": self._engine.broken,
            "instance": self.instance,
        }
        return ready and progressing, facts

    def server_info(self) -> dict[str, Any]:
        """Keys of the field's /server_info where there are such, ours beside them."""
        return {
            "role": self.role,
            "disaggregation_mode": "null" if self.role == "aggregated" else self.role,
            "model": self.model_name,
            "model_path": self.model_name,
            "served_model_name": self.model_name,
            "version": __version__,
            "instance": self.instance,
            "tp_size": 1,
            "dp_size": 1,
            "load_balance_method": "follow_bootstrap_room",
            "bootstrap_port": self.default_bootstrap_port,
            "disaggregation_bootstrap_port": self.default_bootstrap_port,
            "stamp": msgspec.to_builtins(self.stamp),
            "limits": {
                "max_prompt_tokens": self.max_prompt_tokens,
                "context_len": self.context_len,
                "pool_pages": self.pool.pages,
                "page_size": self.model.page_size,
                "max_running": self.node.limits.max_running,
            },
            "figures": self.figures(),
            "alarms": list(self._alarms),
        }

    def figures(self) -> dict[str, Any]:
        """Everything that must be back at its idle value when nothing runs."""
        return {
            "pages": {page.name.lower(): count for page, count in self.node.ledger.counts.items()},
            "jobs": len(self.jobs),
            "in_engine": self._engine.running,
            **self._role_figures(),
        }

    def _role_figures(self) -> dict[str, int]:
        return {}

    def metrics_text(self) -> str:
        lines: list[str] = []
        pages = {page.name.lower(): float(count) for page, count in self.node.ledger.counts.items()}
        lines += labelled("pdplane_pages", "Pages of the pool by state.", "gauge", "state", pages)
        numbers = {"jobs": len(self.jobs), "in_engine": self._engine.running, **self._role_figures()}
        for name, value in numbers.items():
            lines += single(f"pdplane_{name}", f"Now: {name.replace('_', ' ')}.", "gauge", value)
        for name in sorted({name for name, _ in self.counts}):
            by_label = {label: float(count) for (of, label), count in self.counts.items() if of == name}
            lines += labelled(
                f"pdplane_{name}_total", f"Count of {name.replace('_', ' ')}.", "counter", "what", by_label
            )
        lines += single("pdplane_engine_steps_total", "Steps of the engine.", "counter", self._engine.steps)
        lag = max(0.0, self.loop_lag_s)
        lines += single("pdplane_loop_lag_seconds", "How late the control loop last woke.", "gauge", lag)
        lines += self.first_token.lines("pdplane_first_token_seconds", "Leg's arrival to its first token.")
        lines += self.request_time.lines("pdplane_leg_seconds", "Leg's arrival to its end.")
        return "\n".join(lines) + "\n"

    async def all_ended(self) -> None:
        """Returns when no client waits for anything."""
        while self.jobs:
            self._ended.clear()
            await self._ended.wait()

    def cut(self, reason: str) -> None:
        """Ends everything with an explicit error: the process is about to go."""
        for rid in list(self.jobs):
            self.post(Cancel(rid, Cause("worker_stopping", reason, 503, retryable=True, side=self.role)))

    def drain(self, reason: str) -> None:
        self.post(Drain(reason))

    # --- the engine's emissions -----------------------------------------------------------------------------------

    def emissions(self, emissions: list[Emission]) -> None:
        """Called by the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take_emissions, emissions)
        except RuntimeError:
            log.debug("emissions after the loop's end")

    def _take_emissions(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            if emission.released:
                self._in_engine.discard(emission.rid)
            elif emission.finish == "error":  # a step failed: the engine lets go of its pages later
                self.post(Cancel(emission.rid, Cause("engine_error", emission.error, 500, side=self.role)))
            self._take(emission)

    def _take(self, emission: Emission) -> None:
        """Decode and aggregated; prefill's shell has its own."""
        job = self.jobs.get(emission.rid)
        if job and (emission.tokens or emission.text or emission.finish in ("stop", "length")):
            self._push(job, emission.text, emission.tokens, emission.finish, emission.matched_stop)
        if emission.computed:
            self.post(Computed(rid=emission.rid, tokens=emission.computed))
        if emission.released:
            self.post(Released(rid=emission.rid, error=emission.error))

    def run(self, request: EngineRequest, job: Job, prior: Sequence[Token] = ()) -> None:
        """Hand a request to the engine; its Released comes by an emission."""
        self._in_engine.add(request.rid)
        self._engine.add(request, job.text, prior)

    def never_ran(self, rid: Rid) -> None:
        """The core wants to run what the edge has dropped already: the engine has never seen it."""
        self.post(Released(rid=rid))

    # --- answers --------------------------------------------------------------------------------------------------

    def _push(
        self, job: Job, text: str, tokens: list[Token], finish: str | None, matched: str | int | None = None
    ) -> None:
        now = self._loop.time()
        if tokens and not job.completion_tokens:
            self.first_token.observe(now - job.arrived)
            if record := self.records.get(job.generation.rid):
                record.first_token_s = round(now - job.arrived, 6)
        job.completion_tokens += len(tokens)
        job.stream.push(
            Chunk(
                text=text,
                tokens=tokens,
                prompt_tokens=len(job.generation.prompt),
                completion_tokens=job.completion_tokens,
                cached_tokens=job.cached_tokens,
                finish_reason=finish if finish in ("stop", "length", "abort") else None,
                matched_stop=matched,
            )
        )
        if job.stream.ended:
            self._drop(job.generation.rid, finish or "ended")

    def _push_row(self, job: Job, row: Row, end: str | None) -> None:
        """The answer of a leg that is over with prefill's token. The row says that a stop ended it, not which kind: no
        stop token means a stop string, and then the text shows it."""
        sampling = job.generation.sampling
        stop_tokens = (
            sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self.model.eos_ids)
        )
        if end == "stop" and row.first_token not in stop_tokens:
            end = "length"
        spelled = spell(self.tokenizer, job.text, [row.first_token], end, min_tokens=sampling.min_tokens)
        job.cached_tokens = row.cached_tokens
        self._push(job, spelled.text, [first_token(row)], spelled.finish, spelled.matched_stop)

    def _answer_failed(self, rid: Rid, cause: Cause) -> None:
        job = self.jobs.get(rid)
        if job is None:
            return
        if not cause.expected:
            log.warning("request %s failed: %s", rid, cause)
        if cause.code == "aborted":
            self._push(job, "", [], "abort")
        else:
            job.stream.fail(cause)
            self._drop(rid, cause.code)

    def _drop(self, rid: Rid, finished: str) -> None:
        """The client's side of a job is over; pages follow by the core's own rules."""
        job = self.jobs.pop(rid, None)
        if job is None:
            return
        self._ended.set()
        now = self._loop.time()
        self.request_time.observe(now - job.arrived)
        self.counts["finished", finished] += 1
        if record := self.records.get(rid):
            record.finished = finished
            self.records.note(rid, now, "finished", finished)

    # --- housekeeping ---------------------------------------------------------------------------------------------

    async def keep_house(self, interval_s: float = 0.5) -> None:
        """Runs until cancelled: audits the ledger whenever nothing lives, and measures how late the loop runs."""
        while True:
            due = self._loop.time() + interval_s
            await asyncio.sleep(interval_s)
            self.loop_lag_s = max(0.0, self._loop.time() - due)
            if self.node.live == 0:
                self.audit()

    def audit(self) -> list[str]:
        """Conservation; an alarm names each fault."""
        faults = self.node.audit()
        if self.node.live == 0 and self.node.ledger.counts[Page.FREE] != self.node.ledger.capacity:
            faults.append(f"nothing lives, and {self.node.ledger.holders()} hold pages")
        for fault in faults:
            self._do(Alarm(f"conservation: {fault}"))
        return faults


def first_token(row: Row) -> Token:
    return Token(row.first_token, row.logprob, row.top_logprobs)


def prompt_id(prompt: Sequence[int]) -> PromptId:
    """blake2b-128 over the token ids as u32 little-endian, and their count."""
    ids = array("I", prompt)
    if ids.itemsize != 4:
        raise RuntimeError("this platform has no 32-bit unsigned array")
    if _BIG_ENDIAN:
        ids.byteswap()
    return PromptId(hashlib.blake2b(ids.tobytes(), digest_size=16).digest(), len(prompt))


_BIG_ENDIAN = sys.byteorder == "big"
