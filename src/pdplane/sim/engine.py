"""A simulated engine: steps take virtual time, and what they write are tags that say whose a page is.

A step that runs when a request is aborted still writes that request's pages at its end: only Released says that it
touches them no more. Reports reach the core a little later, in order, as from another thread.

Of a gated request nothing has left yet: what its pages hold is judged when the gate opens, and what was wrong until
then is not forgotten, also where a step has written over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from pdplane.core.events import Computed, Event, Released, Retracted, Sampled
from pdplane.core.frames import Row
from pdplane.core.ids import PageId, Rid
from pdplane.transport.pool import PagePool

from .content import PAGE_SIZE, Work

CHUNK = 2 * PAGE_SIZE  # tokens of a prompt that a step computes
STEP_S = (0.002, 0.025)
HOP_S = 0.0008  # engine thread to control thread, at most


Spoilt = tuple[Work, PageId, int]
"""Whose page it is, and which of its pages it should be."""


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

    def short_restore(self, work: Work, needed: int, given: int) -> None:
        """A request comes back into fewer pages than its copy fills: never returns."""
        ...

    @property
    def running(self) -> bool:
        """Neither dead nor frozen."""
        ...


class _Job(msgspec.Struct):
    work: Work
    pages: list[PageId]
    computed: int
    max_new: int
    role: Literal["prefill", "decode", "whole"]
    shared: int = 0  # pages of a cached prefix: read, never written
    sampled: int = 0
    aborted: bool = False
    finishing: bool = False
    retracting: bool = False
    in_step: bool = False
    gated: bool = False
    written: int = 0  # pages that carry the tag
    host: list[list[bytes]] | None = None  # laid aside: a copy of each pool's pages

    @property
    def in_prompt(self) -> bool:
        """Its prompt is not computed yet."""
        return self.role != "decode" and self.sampled == 0


class SimEngine:
    """One step at a time over all that can go on: a chunk for a prefill, a token for a decode. `pools`: one per tensor
    parallel rank, None for a rank without heads. `salt`: other weights write other bytes."""

    def __init__(
        self, host: Host, pools: Sequence[PagePool | None], chunk: int, step: float = 1.0, salt: int = 0
    ) -> None:
        self.jobs: dict[Rid, _Job] = {}
        self.steps = 0
        self._host, self._chunk = host, chunk
        self._shards = [(rank, pool) for rank, pool in enumerate(pools) if pool is not None]
        self._ranks = len(pools)
        self._step = step
        self._salt = salt
        self._stepping = False
        self._reported_at = 0.0
        self._spoilt: dict[Rid, Spoilt] = {}  # of gated requests

    # --- commands ---------------------------------------------------------------------------------------------------

    def prefill(self, work: Work, pages: Sequence[PageId], cached_tokens: int = 0) -> None:
        shared = cached_tokens // PAGE_SIZE
        self._add(_Job(work, list(pages), cached_tokens, 1, "prefill", shared=shared, written=shared))

    def whole(
        self,
        work: Work,
        pages: Sequence[PageId],
        max_new: int,
        computed: int = 0,
        shared: int = 0,
        gated: bool = False,
    ) -> None:
        """The first `computed` tokens are in the pages already; the last one is computed again in any case."""
        self._spoilt.pop(work.rid, None)
        start = min(computed, work.prompt_tokens - 1)
        job = _Job(work, list(pages), start, max_new, "whole", shared=shared, gated=gated)
        job.written = -(-computed // PAGE_SIZE)
        self._verify("the prompt is gone on with", job)
        self._add(job)

    def ungate(self, rid: Rid) -> None:
        """What was held back goes out: so all of it is right."""
        if rid in self._spoilt:
            self._host.foreign_tag("an answer leaves", *self._spoilt[rid])
        if job := self.jobs.get(rid):
            job.gated = False
            if job.host is None:
                self._verify("an answer leaves", job)

    def decode(self, work: Work, pages: Sequence[PageId], row: Row, max_new: int) -> None:
        job = _Job(work, list(pages), row.prompt_tokens, max_new, "decode", sampled=1)
        job.written = len(pages)
        self._verify("decode starts", job)
        self._add(job)

    def extend(self, rid: Rid, pages: Sequence[PageId]) -> None:
        if (job := self.jobs.get(rid)) and job.host is None:
            job.pages += pages
            self.wake()

    def abort(self, rid: Rid) -> None:
        self._spoilt.pop(rid, None)
        if job := self.jobs.get(rid):
            job.aborted = True
            self.wake()

    def finish(self, rid: Rid) -> None:
        if job := self.jobs.get(rid):
            job.finishing = True
            self.wake()

    def retract(self, rid: Rid) -> None:
        """At the end of the step it is laid aside."""
        if job := self.jobs.get(rid):
            job.retracting = True
            self.wake()

    def restore(self, rid: Rid, pages: Sequence[PageId]) -> None:
        if (job := self.jobs.get(rid)) is None or job.host is None:
            return
        job.pages, host, job.host = list(pages), job.host, None
        job.written = len(host[0]) if host else 0
        if job.written > len(pages):
            self._host.short_restore(job.work, job.written, len(pages))
        for (_, pool), copies in zip(self._shards, host, strict=True):
            for page, content in zip(job.pages, copies, strict=False):
                pool.page(page)[:] = content
        self._verify("decode is restored", job)
        self.wake()

    def wake(self) -> None:
        """Begins a step where there is something to do and none runs."""
        if self._stepping or not self._host.running:
            return
        for job in list(self.jobs.values()):
            if job.aborted or job.finishing:
                self._release(job)
            elif job.retracting:
                self._lay_aside(job)
        batch = self._batch()
        if not batch:
            return
        self._stepping = True
        for job in batch:
            job.in_step = True
        self._host.at(self._host.now + self._step * self._host.uniform(*STEP_S), lambda: self._end_step(batch))

    def _lay_aside(self, job: _Job) -> None:
        job.retracting = False
        self._verify("decode is laid aside", job)
        kept = job.pages[: -(-job.computed // PAGE_SIZE)]
        job.host = [[bytes(pool.page(page)) for page in kept] for _, pool in self._shards]
        self._report(Retracted(rid=job.work.rid, tokens=job.computed))

    # --- steps ------------------------------------------------------------------------------------------------------

    def _batch(self) -> list[_Job]:
        prompts = [job for job in self.jobs.values() if job.in_prompt]
        running = (job for job in self.jobs.values() if not job.in_prompt and job.host is None)
        decodes = [job for job in running if self._can_go_on(job)]
        return prompts[:2] + decodes

    def _can_go_on(self, job: _Job) -> bool:
        return self._over(job) or job.computed < len(job.pages) * PAGE_SIZE

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
            if job.in_prompt:
                self._prompt_step(job)
            else:
                self._decode_step(job)
        self._stepping = False
        self.wake()

    def _prompt_step(self, job: _Job) -> None:
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
        if job.role == "whole":
            job.sampled = 1
            self._go_on(job)
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
        self._go_on(job)

    def _go_on(self, job: _Job) -> None:
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
        upto = -(-job.computed // PAGE_SIZE)
        for index in range(max(job.shared, min(job.written, upto) - 1), upto):
            for rank, pool in self._shards:
                pool.page(job.pages[index])[:] = self._tag(job, index, rank)
        job.written = max(job.written, upto)

    def _tag(self, job: _Job, index: int, rank: int) -> bytes:
        tag = job.work.tag(index, rank, self._ranks)
        return bytes(byte ^ self._salt for byte in tag) if self._salt else tag

    def _verify(self, where: str, job: _Job) -> None:
        for index in range(job.written):
            page = job.pages[index]
            for rank, pool in self._shards:
                if pool.page(page) == self._tag(job, index, rank):
                    continue
                if job.gated:
                    self._spoilt.setdefault(job.work.rid, (job.work, page, index))
                else:
                    self._host.foreign_tag(where, job.work, page, index)
