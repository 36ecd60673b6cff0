"""One request's answer, from its streams to the socket, with an eye on whether the client is still there.

The head of a streaming answer goes out with the first event: what fails before has its own status. A client that leaves
ends all samples at once, streaming or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdplane.core.errors import CLIENT_CLOSED, Cause, Refused, client_left
from pdplane.wire.errors import JSON, error_body, error_event, error_headers

from ..service import Chunk, Stream
from .answers import Sample
from .intake import Job
from .receiving import until_disconnected

_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Exchange:
    def __init__(self, job: Job, streams: Sequence[Stream], side: str) -> None:
        self._job = job
        self._streams = streams
        self._side = side
        self._begun = False
        self._writing = asyncio.Lock()  # events of several samples, and the head before the first of them

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns when the answer is complete or the client has gone; no stream is left open."""
        self._send = send
        work = asyncio.create_task(self._answer(scope, receive))
        gone = asyncio.create_task(until_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._leave(client_left(self._side), heard=work.done())
            await _end(work, gone)
        if not work.cancelled():
            work.result()

    async def _answer(self, scope: Scope, receive: Receive) -> None:
        try:
            await self._pump_all()
        except Refused as refused:
            self._close(refused.cause)
            await self._refuse(refused.cause, scope, receive)
            return
        if self._job.stream:
            for event in self._job.answer.closing():
                await self._write(event)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            response = Response(
                self._job.answer.body(), media_type=JSON, headers=request_id_header(self._job.request_id)
            )
            await response(scope, receive, self._send)

    async def _pump_all(self) -> None:
        """Raises Refused with the first sample's cause that fails."""
        pairs = list(zip(self._streams, self._job.answer.samples, strict=True))
        if len(pairs) == 1:
            return await self._pump(*pairs[0])
        try:
            async with asyncio.TaskGroup() as group:
                for stream, sample in pairs:
                    group.create_task(self._pump(stream, sample))
        except* Refused as failed:
            first = failed.exceptions[0]
        else:
            return None
        raise first

    async def _pump(self, stream: Stream, sample: Sample) -> None:
        try:
            async for chunk in stream:
                await self._take(sample, chunk)
        except Refused as refused:
            if refused.cause.code != "aborted":
                raise
            await self._take(sample, _abort_of(sample))

    async def _take(self, sample: Sample, chunk: Chunk) -> None:
        sample.add(chunk)
        if self._job.stream:
            for event in self._job.answer.events(sample, chunk):
                await self._write(event)

    async def _write(self, event: bytes) -> None:
        async with self._writing:
            if not self._begun:
                self._begun = True
                headers = _SSE_HEADERS | request_id_header(self._job.request_id)
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": raw})
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def _refuse(self, cause: Cause, scope: Scope, receive: Receive) -> None:
        if not self._begun:
            await error_response(cause, self._job.request_id)(scope, receive, self._send)
            return
        await self._write(error_event(cause))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _leave(self, cause: Cause, *, heard: bool) -> None:
        for stream in self._streams:
            stream.close(cause) if heard else stream.unheard(cause)

    def _close(self, cause: Cause) -> None:
        for stream in self._streams:
            stream.close(cause)


def error_response(cause: Cause, request_id: str | None = None) -> Response:
    """Whoever reads this has not left: it was the other leg that was closed, and that is a 503."""
    status = 503 if cause.status == CLIENT_CLOSED else cause.status
    headers = error_headers(cause) | request_id_header(request_id)
    return Response(error_body(cause), status_code=status, media_type=JSON, headers=headers)


def json_response(payload: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(payload), status_code=status, media_type=JSON)


def request_id_header(request_id: str | None) -> dict[str, str]:
    """Only what is safe in a header: an id may come from a body."""
    safe = request_id and request_id.isascii() and request_id.isprintable()
    return {"x-request-id": request_id} if request_id and safe else {}


def _abort_of(sample: Sample) -> Chunk:
    """An abort call's end of one sample: an answer with what there is, as SGLang gives it, and no error."""
    return Chunk(
        text="",
        tokens=[],
        prompt_tokens=sample.prompt_tokens,
        completion_tokens=sample.completion_tokens,
        cached_tokens=sample.cached_tokens,
        finish_reason="abort",
    )


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
