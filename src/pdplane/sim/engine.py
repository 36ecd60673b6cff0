"""A simulated engine: steps take virtual time, and what they write are tags that say whose a page is.

A step that runs when a request is aborted still writes that request's pages at its end: only Released says that it
touches them no more. Reports reach the core a little later, in order, as from another thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdplane.core.events import Computed, Event, Released, Sampled
from pdplane.core.frames import Row
from pdplane.core.ids import PageId, Rid, Room
from pdplane.transport.pool import PagePool

TAG = struct.Struct(">QII")
PAGE_BYTES = TAG.size
STEP_S = (0.002, 0.025)
HOP_S = 0.0008  # engine thread to control thread, at most


class Work(msgspec.Struct, frozen=True):
    """What the simulation knows of a leg and the core does not: `serial` is the attempt's, unlike any other's."""

    rid: Rid
    room: Room
    serial: int
    prompt_tokens: int
    max_new: int
    stops_at: int
    breaks_here: bool = False

    def tag(self, index: int) -> bytes:
        """What page `index` of this attempt holds when it is written."""
        return TAG.pack(self.room, self.serial, index)


class Host(Protocol):
    """The process around the engine."""

    @property
    def now(self) -> float: ...

    def at(self, when: float, do: Callable[[], None]) -> None: ...

    def uniform(self, low: float, high: float) -> float: ...

    def post(self, event: Event) -> None: ...

    def foreign_tag(self, where: str, work: Work, page: PageId, index: int) -> None:
        """A page of a live request does not carry its owner's tag: never returns."""
        ...

    @property
    def running(self) -> bool:
        """Neither dead nor frozen."""
        ...


class _Job(msgspec.Struct):
    work: Work
    pages: list[PageId]
    computed: int
    row: Row | None  # None: a prefill
    max_new: int
    sampled: int = 0
    aborted: bool = False
    in_step: bool = False
    written: int = 0  # pages that carry the tag


class SimEngine:
    """One step at a time over all that can go on: a chunk for a prefill, a token for a decode."""

    def __init__(self, host: Host, pool: PagePool, page_size: int, chunk: int, step: float = 1.0) -> None:
        self.jobs: dict[Rid, _Job] = {}
        self.steps = 0
        self._host, self._pool, self._page_size, self._chunk = host, pool, page_size, chunk
        self._step = step
        self._stepping = False
        self._reported_at = 0.0

    # --- commands ---------------------------------------------------------------------------------------------------

    def prefill(self, work: Work, pages: Sequence[PageId]) -> None:
        self._add(_Job(work, list(pages), 0, None, 1))

    def decode(self, work: Work, pages: Sequence[PageId], row: Row, max_new: int) -> None:
        job = _Job(work, list(pages), row.prompt_tokens, row, max_new, sampled=1)
        job.written = len(pages)
        self._verify("decode starts", job)
        self._add(job)

    def extend(self, rid: Rid, pages: Sequence[PageId]) -> None:
        if job := self.jobs.get(rid):
            job.pages += pages
            self.wake()

    def abort(self, rid: Rid) -> None:
        if job := self.jobs.get(rid):
            job.aborted = True
            self.wake()

    def wake(self) -> None:
        """Begins a step where there is something to do and none runs."""
        if self._stepping or not self._host.running:
            return
        for job in [job for job in self.jobs.values() if job.aborted]:
            self._release(job)
        batch = self._batch()
        if not batch:
            return
        self._stepping = True
        for job in batch:
            job.in_step = True
        self._host.at(self._host.now + self._step * self._host.uniform(*STEP_S), lambda: self._end_step(batch))

    # --- steps ------------------------------------------------------------------------------------------------------

    def _batch(self) -> list[_Job]:
        prefills = [job for job in self.jobs.values() if job.row is None]
        decodes = [job for job in self.jobs.values() if job.row is not None and self._can_go_on(job)]
        return prefills[:2] + decodes

    def _can_go_on(self, job: _Job) -> bool:
        return self._over(job) or job.computed < len(job.pages) * self._page_size

    def _over(self, job: _Job) -> bool:
        return job.sampled >= min(job.max_new, job.work.stops_at)

    def _end_step(self, batch: list[_Job]) -> None:
        """Frozen meanwhile: the step ends when the process goes on."""
        if not self._host.running:
            self._host.at(self._host.now + 0.05, lambda: self._end_step(batch))
            return
        self.steps += 1
        for job in batch:
            job.in_step = False
            if job.row is None:
                self._prefill_step(job)
            else:
                self._decode_step(job)
        self._stepping = False
        self.wake()

    def _prefill_step(self, job: _Job) -> None:
        self._verify("prefill goes on", job)
        tokens = job.work.prompt_tokens
        job.computed = min(job.computed + self._chunk, tokens)
        self._write(job)
        if job.aborted or job.work.breaks_here:
            self._release(job)
            return
        if job.computed < tokens:
            self._report(Computed(rid=job.work.rid, tokens=job.computed))
            return
        ended = "length" if job.work.max_new == 1 else "stop" if job.work.stops_at == 1 else None
        self._report(Sampled(rid=job.work.rid, token=7, ended=ended))
        self._release(job)

    def _decode_step(self, job: _Job) -> None:
        self._verify("decode goes on", job)
        if not self._over(job):
            job.computed += 1
            job.sampled += 1
            self._write(job)
        if job.aborted or job.work.breaks_here or self._over(job):
            self._release(job)
        else:
            self._report(Computed(rid=job.work.rid, tokens=job.computed))

    def _add(self, job: _Job) -> None:
        assert job.work.rid not in self.jobs
        self.jobs[job.work.rid] = job
        self.wake()

    def _release(self, job: _Job) -> None:
        if not job.in_step:
            del self.jobs[job.work.rid]
            error = "the model failed" if job.work.breaks_here and not job.aborted else ""
            self._report(Released(rid=job.work.rid, error=error))

    def _report(self, event: Event) -> None:
        due = self._host.now + self._host.uniform(0.0, HOP_S)
        self._reported_at = due = max(due, self._reported_at)
        self._host.at(due, lambda: self._host.post(event))

    # --- pages ------------------------------------------------------------------------------------------------------

    def _write(self, job: _Job) -> None:
        """Tags the pages of the step's tokens; the last one again where it is not full."""
        upto = -(-job.computed // self._page_size)
        for index in range(max(0, min(job.written, upto) - 1), upto):
            self._pool.page(job.pages[index])[:] = job.work.tag(index)
        job.written = max(job.written, upto)

    def _verify(self, where: str, job: _Job) -> None:
        for index in range(job.written):
            page = job.pages[index]
            if self._pool.page(page) != job.work.tag(index):
                self._host.foreign_tag(where, job.work, page, index)
