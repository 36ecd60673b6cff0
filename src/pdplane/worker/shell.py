"""What the three roles' shells share: they carry out the core's effects and feed back what happened. One shell is one
data parallel group: a core node, a ledger, an engine loop, and a pool for each tensor parallel rank.

Everything here runs on the loop's thread. The engine and the transport have threads of their own; what they report hops
here first. Events are taken one by one: an effect that yields an event at once (a fence that closes on the spot) queues
it behind the effects under way.

A fault of ours on the way (an assertion of the core, an effect that cannot be carried out) leaves a state that nobody
can vouch for. The worker is then `broken`: nothing is carried out any more and no page changes hands, every client gets
a 500, peers are cut off, and health says why until the process is restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from pdplane.core.effects import (
    AbortEngine,
    Alarm,
    AnswerFailed,
    Count,
    Effect,
    ExtendPages,
    FinishEngine,
    Note,
    RestoreEngine,
    RetractEngine,
    SessionRefused,
)
from pdplane.core.errors import Cause, Refused, aborted, duplicate_rid, unavailable
from pdplane.core.events import Cancel, Computed, Drain, Event, Released, Retracted, Tick
from pdplane.core.ids import Instance, Rid, Room
from pdplane.core.layout import Stamp
from pdplane.core.node import Node
from pdplane.core.pages import Owner, Page
from pdplane.observe.records import LegRecord, describe
from pdplane.transport.pool import PagePool

from .engine import EngineRequest, ModelSpec, Token, Tokenizer
from .engine_thread import Emission, EngineThread
from .jobs import Job, Jobs
from .refusals import Refusals
from .service import Generation, Stream

log = logging.getLogger(__name__)

N = TypeVar("N", bound=Node, covariant=True)


class Parts(NamedTuple):
    """What a shell is built around. `pools`: one per tensor parallel rank, each of `pages` pages; None for a rank that
    holds nothing."""

    instance: Instance
    dp: int
    model: ModelSpec
    stamp: Stamp
    pools: tuple[PagePool | None, ...]
    pages: int
    tokenizer: Tokenizer


class Shell(Generic[N]):
    """Subclasses make the node, carry out their role's effects in `_do_role`, and take emissions."""

    role = ""
    node: N

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.instance = parts.instance
        self.model = parts.model
        self.engine: EngineThread | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self.jobs = Jobs(self.role, parts.instance, parts.model, parts.tokenizer)
        self._in_engine: set[Rid] = set()
        self.loop_lag_s = 0.0
        self.alarms: deque[str] = deque(maxlen=100)
        self.refusals = Refusals()
        self.broken = ""
        self._faults: list[str] = []  # of the last audit
        self._stopped = False
        self._stopping: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = float("inf")

    # --- events and effects ---------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Hand an event to the core and carry out what it asks for. Nothing is, once the shell is broken or stopped."""
        if self.broken or self._stopped:
            return
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                for effect in self.node.handle(event, self._loop.time()):
                    self._do(effect)
            self._wind_timer()
        except Exception as error:
            self._break(f"{type(event).__name__} was not carried out", error)
        finally:
            self._handling = False

    def _break(self, what: str, error: Exception) -> None:
        log.critical("%s: this worker is broken and must be restarted", what, exc_info=error)
        self.broken = f"{what}: {type(error).__name__}: {error}"
        self._do(Alarm(f"broken: {self.broken}"))
        self._events.clear()
        for rid in list(self.jobs):
            self.jobs.fail(rid, Cause("internal_error", f"this worker broke: {self.broken}", 500, side=self.role))
        for rid in self._in_engine:
            self.running_engine.abort(rid)
        self._stopping = self._loop.create_task(self.stop())

    async def stop(self) -> None:
        """Takes no more events. Roles with peers close their sockets too. Idempotent."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def post_soon(self, event: Event) -> None:
        """From any thread."""
        try:
            self._loop.call_soon_threadsafe(self.post, event)
        except RuntimeError:
            log.debug("an event after the loop's end: %s", type(event).__name__)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Note(rid, _, state, detail):
                self.jobs.records.note(rid, self._loop.time(), state, detail)
            case Count(name, label):
                self.counts[name, label] += 1
            case AnswerFailed(rid, cause):
                self.jobs.fail(rid, cause)
            case ExtendPages(rid, pages):
                self.running_engine.extend(rid, pages)
            case RetractEngine(rid, pages):
                self.running_engine.retract(rid, pages)
            case RestoreEngine(rid, pages):
                self.running_engine.restore(rid, pages)
            case FinishEngine(rid):
                self.running_engine.finish(rid)
            case AbortEngine(rid):
                self.running_engine.abort(rid)
            case SessionRefused(peer, cause):
                self.counts["session_refused", cause.code] += 1
                if self.refusals.note(peer, cause, self._loop.time()):
                    log.warning("session with %s refused: %s", peer or "a stranger", cause)
            case Alarm(text):
                self.alarms.append(text)
                self.counts["alarm", ""] += 1
                log.error("%s", text)
            case _:
                self._do_role(effect)

    def count(self, name: str) -> None:
        self.counts[name, ""] += 1

    def _do_role(self, effect: Effect) -> None:
        raise NotImplementedError(type(effect).__name__)

    @property
    def running_engine(self) -> EngineThread:
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

    # --- the edge's calls, by way of the group ----------------------------------------------------------------------

    def has(self, room: Room) -> bool:
        """Whether a hand-off of this room lives here."""
        return False

    def knows(self, room: Room) -> bool:
        """Whether this group has, or had, a hand-off of this room."""
        return False

    def uses(self, rid: Rid) -> bool:
        """Whether somebody waits for this rid, or the engine is not done with it."""
        return rid in self.jobs or rid in self._in_engine

    def accept(self, generation: Generation) -> Stream:
        """A refusal is the stream's own."""
        stream = Stream(generation.rid, self._closed, self._unheard)
        if self.broken:
            stream.fail(unavailable("worker_broken", f"this worker broke: {self.broken}", side=self.role))
            return stream
        now = self._loop.time()
        if self.uses(generation.rid):
            stream.fail(duplicate_rid(generation.rid, self.role))
            return stream
        try:
            arrival = self._arrival(generation, now + generation.deadline_s)
        except Refused as refused:
            stream.fail(refused.cause)
            return stream
        self.jobs.open(generation, stream)
        self.post(arrival)
        return stream

    def _arrival(self, generation: Generation, deadline: float) -> Event:
        """The core's event for a new leg. Raises Refused where this role will not have it."""
        raise NotImplementedError

    def _closed(self, rid: Rid, cause: Cause) -> None:
        """The edge has closed a stream: its client left, or its batch was refused."""
        self.post(Cancel(rid, cause))
        self.jobs.drop(rid, cause.code)

    def _unheard(self, rid: Rid, cause: Cause) -> None:
        """The client of an answer that was complete left before it was written."""

    def abort(self, rid: str, room: int | None = None, cause: Cause | None = None) -> int:
        return self._abort(self.jobs.named(rid, room), cause or aborted(self.role))

    def abort_all(self) -> int:
        return self._abort(list(self.jobs), aborted(self.role))

    def _abort(self, rids: Sequence[Rid], cause: Cause) -> int:
        for rid in rids:
            self.post(Cancel(rid, cause))
        return len(rids)

    @property
    def under_way(self) -> int:
        """What a drain waits for."""
        return len(self.jobs)

    async def all_ended(self) -> None:
        """Returns when no client waits for anything, and nothing is kept for one."""
        await self.jobs.all_ended()

    def legs(self, key: str) -> list[dict[str, Any]]:
        """The records of this group's legs by rid, request id or room."""
        return [
            {**describe(record), "held_pages": self.held(record), "grants": self.grants_of(record)}
            for record in self.jobs.records.find(key)
        ]

    def held(self, record: LegRecord) -> dict[str, int]:
        """Pages by state."""
        return self.node.ledger.held_by(Owner(record.rid))

    def grants_of(self, record: LegRecord) -> list[dict[str, Any]]:
        return []

    def quarantined(self) -> list[dict[str, Any]]:
        """Who holds pages without an end in sight."""
        held = self.node.ledger.holders()
        return [self._quarantine(owner, of["quarantined"]) for owner, of in held.items() if "quarantined" in of]

    def _quarantine(self, owner: Owner, pages: int) -> dict[str, Any]:
        return {"instance": self.instance, "owner": owner, "pages": pages}

    def refused_sessions(self) -> list[dict[str, Any]]:
        """Whose sessions do not come about, and why."""
        return self.refusals.told(self._loop.time())

    def peers(self) -> list[dict[str, Any]]:
        """What the other ends of control sessions last said of themselves."""
        return []

    def role_figures(self) -> dict[str, int]:
        """The role's own numbers among the figures."""
        return {}

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
            if self.broken:
                continue
            try:
                self._take(emission)
            except Exception as error:
                self._break(f"an emission of request {emission.rid} was not taken", error)

    def _take(self, emission: Emission) -> None:
        """Decode and aggregated; prefill's shell has its own."""
        job = self.jobs.get(emission.rid)
        if job and (emission.tokens or emission.text or emission.finish in ("stop", "length")):
            self.jobs.push(job, emission.text, emission.tokens, emission.finish, emission.matched_stop)
        if emission.computed:
            self.post(Computed(rid=emission.rid, tokens=emission.computed))
        if emission.retracted is not None:
            self.post(Retracted(rid=emission.rid, tokens=emission.retracted))
        if emission.released:
            self.post(Released(rid=emission.rid, error=emission.error))

    def run(self, request: EngineRequest, job: Job, prior: Sequence[Token] = ()) -> None:
        """Hand a request to the engine; its Released comes by an emission."""
        self._in_engine.add(request.rid)
        self.running_engine.add(request, job.text, prior)

    def never_ran(self, rid: Rid) -> None:
        """The core wants to run what the edge has dropped already: the engine has never seen it."""
        self.post(Released(rid=rid))

    # --- housekeeping ---------------------------------------------------------------------------------------------

    async def keep_house(self, interval_s: float = 0.5) -> None:
        """Runs until cancelled: audits the ledger whenever nothing lives, and measures how late the loop runs."""
        while True:
            due = self._loop.time() + interval_s
            await asyncio.sleep(interval_s)
            self.loop_lag_s = max(0.0, self._loop.time() - due)
            if self.node.live == 0 and not self.broken:
                self.audit()

    def audit(self) -> list[str]:
        """Faults of conservation; an alarm names each one that the audit before did not find."""
        faults = self.node.audit()
        ledger = self.node.ledger
        if self.node.live == 0 and ledger.counts[Page.FREE] + ledger.counts[Page.CACHED] != ledger.capacity:
            faults.append(f"nothing lives, and {ledger.holders()} hold pages")
        for fault in faults:
            if fault not in self._faults:
                self._do(Alarm(f"conservation: {fault}"))
        self._faults = faults
        return faults
