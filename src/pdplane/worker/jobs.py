"""The clients' side of a worker: who waits for what, what they were told, and the record of it.

A job ends with its client's last word. Its pages follow by the core's own rules, later or at once: nothing here frees
one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

import msgspec

from pdplane.core.errors import Cause
from pdplane.core.frames import Row
from pdplane.core.ids import Instance, Rid
from pdplane.observe.prometheus import Histogram
from pdplane.observe.records import LegRecord, RecordBook
from pdplane.wire.params import KVTransferParams

from .engine import ModelSpec, Token, Tokenizer
from .sample import Emission
from .service import Chunk, Generation, Stream
from .text import TextOptions, spell

log = logging.getLogger(__name__)


MOST_ENDS = 64  # kinds of ends that are counted apart: an abort call names its own


class Job(msgspec.Struct):
    """A generation under way: what the edge gave, and the stream that it reads. `held`: what its answer names (prefill,
    params dialect). `kept`: what the engine has said and the client may not hear yet; None where nothing is kept back.
    """

    generation: Generation
    stream: Stream
    text: TextOptions
    arrived: float
    completion_tokens: int = 0
    cached_tokens: int = 0
    held: KVTransferParams | None = None
    kept: list[Emission] | None = None


class Jobs(dict[Rid, Job]):
    """The jobs under way, by rid. `finished` counts the ends by cause; times are the loop's."""

    def __init__(self, role: str, instance: Instance, model: ModelSpec, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.records = RecordBook()
        self.finished: Counter[str] = Counter()
        self.first_token = Histogram()
        self.duration = Histogram()
        self._role, self._instance, self._model, self._tokenizer = role, instance, model, tokenizer
        self._loop = asyncio.get_running_loop()
        self._one_ended = asyncio.Event()

    def open(self, generation: Generation, stream: Stream) -> None:
        now = self._loop.time()
        options = TextOptions(
            stop=generation.stop,
            skip_special_tokens=generation.skip_special_tokens,
            include_stop_str=generation.include_stop_str,
        )
        self[generation.rid] = Job(generation, stream, options, now)
        self.records.open(
            LegRecord(
                rid=generation.rid,
                request_id=generation.request_id,
                room=generation.room,
                role=self._role,
                instance=self._instance,
                started_unix_s=time.time(),
                started=now,
                prompt_tokens=len(generation.prompt),
            )
        )

    def named(self, rid: str, room: int | None) -> list[Rid]:
        """Exactly: an attempt's rid, or a request's id for all of its samples; with a room, that room alone."""
        return [
            job.generation.rid
            for job in self.values()
            if rid in (job.generation.rid, job.generation.request_id) and room in (None, job.generation.room)
        ]

    def push(
        self, job: Job, text: str, tokens: list[Token], finish: str | None, matched: str | int | None = None
    ) -> None:
        """A piece for the client; the last one with why it ended."""
        if tokens and not job.completion_tokens:
            self._note_first_token(job)
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
                held=job.held,
            )
        )
        if job.stream.ended:
            self.drop(job.generation.rid, finish or "ended")

    def push_row(self, job: Job, row: Row, end: str | None) -> None:
        """The answer of a leg that is over with prefill's token. The row says that a stop ended it, not which kind: no
        stop token means a stop string, and then the text shows it."""
        sampling = job.generation.sampling
        stop_tokens = (
            sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self._model.eos_ids)
        )
        if end == "stop" and row.first_token not in stop_tokens:
            end = "length"
        spelled = spell(self._tokenizer, job.text, [row.first_token], end, min_tokens=sampling.min_tokens)
        job.cached_tokens = row.cached_tokens
        self.push(job, spelled.text, [first_token(row)], spelled.finish, spelled.matched_stop)

    def note_cached(self, job: Job, tokens: int) -> None:
        """So many of its prompt's tokens were in this worker's prefix cache."""
        job.cached_tokens = tokens
        if tokens:
            hit = f"{tokens} of {len(job.generation.prompt)} prompt tokens were in the prefix cache"
            self.records.note(job.generation.rid, self._loop.time(), "cached", hit)

    def fail(self, rid: Rid, cause: Cause) -> None:
        """The client's answer is a failure; an abort call's is an end like any other."""
        job = self.get(rid)
        if job is None:
            return
        if not cause.expected:
            log.warning("request %s failed: %s", rid, cause)
        if cause.code == "aborted":
            self.push(job, "", [], "abort")
        else:
            job.stream.fail(cause)
            self.drop(rid, cause.code)

    def drop(self, rid: Rid, finished: str) -> None:
        """The client's side of a job is over."""
        job = self.pop(rid, None)
        if job is None:
            return
        self._one_ended.set()
        now = self._loop.time()
        self.duration.observe(now - job.arrived)
        known = finished in self.finished or len(self.finished) < MOST_ENDS
        self.finished[finished if known else "other"] += 1
        if record := self.records.get(rid):
            record.finished = finished
            self.records.note(rid, now, "finished", finished)

    async def all_ended(self) -> None:
        """Returns when no client waits for anything."""
        while self:
            self._one_ended.clear()
            await self._one_ended.wait()

    def _note_first_token(self, job: Job) -> None:
        after_s = self._loop.time() - job.arrived
        self.first_token.observe(after_s)
        if record := self.records.get(job.generation.rid):
            record.first_token_s = round(after_s, 6)


def first_token(row: Row) -> Token:
    return Token(row.first_token, row.logprob, row.top_logprobs)
