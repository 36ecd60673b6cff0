"""The aggregated worker's core: the same ledger, reserve and batch, and nobody at the other end."""

from __future__ import annotations

import msgspec

from .admission import demand, queue_full, refuse
from .batch import Batch, Running
from .effects import AnswerFailed, RunWhole
from .errors import Cause, deadline, duplicate_rid
from .events import Cancel, Computed, Drain, Event, JobArrived, Released, Retracted
from .ids import Rid
from .node import Limits, Node, TimerKey
from .pages import Owner, Page
from .prompt_pages import Prompt, PromptPages
from .queues import AdmissionQueue
from .reserve import Reserve


class _Job(msgspec.Struct):
    arrived: JobArrived
    since: float
    pages: int
    most: int
    max_new: int


class AggregatedNode(Node):
    side = "aggregated"

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.pages = PromptPages(self.ledger, limits)  # keys come with no job, so nothing is shared
        self.reserve = Reserve(self.pages, limits)
        self.batch = Batch(self, self.pages, self.reserve)
        self._queue: AdmissionQueue[_Job] = AdmissionQueue(limits.max_overtakes)
        self._waiting: dict[Rid, _Job] = {}

    @property
    def live(self) -> int:
        return len(self._waiting) + len(self.batch)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _event(self, event: Event) -> None:
        match event:
            case JobArrived():
                self._arrived(event)
            case Cancel(rid, cause):
                self._cancel(rid, cause)
            case Computed(rid=rid, tokens=tokens):
                self.batch.computed(rid, tokens)
            case Retracted(rid=rid, tokens=tokens):
                self.batch.retracted(rid, tokens)
            case Released(rid=rid, error=error):
                self.batch.released(rid, error)
            case Drain(reason):
                self.draining = reason
            case _:
                self.count("late", type(event).__name__)

    def _due(self, key: TimerKey) -> None:
        kind, rid = key[0], Rid(str(key[1]))
        if kind == "running":
            self.batch.overdue(rid)
        elif job := self._waiting.get(rid):
            late = kind == "deadline"
            self._cancel(rid, deadline(self.side, self.now - job.since) if late else queue_full(self))

    def _after(self) -> None:
        self.batch.grow()
        self.batch.restore()
        while not self.batch.full:
            job = self._queue.pop_fitting(self._fits, self.batch.stamp)
            if job is None:
                return
            self._start(job)

    def _fits(self, job: _Job) -> bool:
        prompt = Prompt(job.arrived.prompt_tokens)
        return self.batch.may_admit(prompt, job.most, job.arrived.priority, running=True)

    def _arrived(self, event: JobArrived) -> None:
        if event.rid in self._waiting or event.rid in self.batch.running:
            self.out.append(AnswerFailed(event.rid, duplicate_rid(event.rid, self.side)))
            self.count("duplicate_rid")
            return
        need = demand(event.prompt_tokens, event.max_new, self.limits)
        if refusal := refuse(self, event.prompt_tokens, len(self._waiting)):
            self.answer_failed(event.rid, None, refusal)
            return
        job = _Job(event, self.now, need.pages, need.most, need.max_new)
        self._waiting[event.rid] = job
        self._queue.push(job, event.priority)
        self.timers.set(("deadline", event.rid), event.deadline)
        self.timers.set(("queue", event.rid), self.now + self.limits.queue_limit_s)
        self.note(event.rid, None, "queued")

    def _start(self, job: _Job) -> None:
        arrived, rid, owner = job.arrived, job.arrived.rid, Owner(job.arrived.rid)
        self._forget(rid)
        self.reserve.admit(owner, job.pages, job.most)
        pages = self.ledger.take(job.pages, Page.ACTIVE, owner)
        self.out.append(RunWhole(rid, pages, job.max_new))
        request = Running(
            rid=rid,
            room=None,
            owner=owner,
            pages=list(pages),
            most=job.most,
            tokens=0,
            arrived_at=job.since,
            priority=arrived.priority,
            prompt=arrived.prompt_tokens,
        )
        self.batch.start(request, arrived.deadline)

    def _cancel(self, rid: Rid, cause: Cause) -> None:
        if self.batch.cancel(rid, cause):
            return
        job = self._waiting.get(rid)
        if job is None:
            self.count("late", "cancel")
            return
        self._queue.remove(job)
        self._forget(rid)
        self.answer_failed(rid, None, cause)

    def _forget(self, rid: Rid) -> None:
        del self._waiting[rid]
        self.timers.clear(("deadline", rid))
        self.timers.clear(("queue", rid))
