"""The three inference endpoints as ASGI applications: receive, understand, submit, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pdplane.core.errors import Cause, Refused, deadline

from ..service import Service
from .exchange import Exchange, error_response
from .intake import Job, read_job
from .legs import legs_of
from .pairing import check_request_id
from .receiving import ClientGone, deadline_of, read_body
from .settings import HttpSettings


@runtime_checkable
class ToldOfRefusals(Protocol):
    """A service with peers that wait for its legs, or hold something for them."""

    def named_in(self, body: bytes) -> Sequence[Any]:
        """The legs that a refused body names, as far as they can be read. Any thread."""
        ...

    def leg_refused(self, leg: Any, cause: Cause) -> None: ...


class Inference:
    """`endpoint`: "chat" | "completions" | "generate"."""

    def __init__(self, endpoint: str, service: Service, settings: HttpSettings) -> None:
        self._endpoint = endpoint
        self._service = service
        self._settings = settings
        self._legs = legs_of(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        headers = Headers(scope=scope)
        try:
            body = await read_body(headers, receive, self._settings.body_limit_bytes)
        except Refused as refused:
            await error_response(refused.cause)(scope, receive, send)
            return
        except ClientGone:
            return
        try:
            job = await self._understand(headers, body, arrived)
            streams = self._service.submit(job.generations)
        except Refused as refused:
            await self._tell_peers(body, refused.cause)
            await error_response(refused.cause)(scope, receive, send)
        else:
            await Exchange(job, streams, self._service.role).run(scope, receive, send)

    async def _understand(self, headers: Headers, body: bytes, arrived: float) -> Job:
        """The job with its deadline, which counts from its arrival. Raises Refused."""
        allowed_s = deadline_of(headers, self._settings.request_timeout_s)
        job = await self._read(body, check_request_id(headers.get("x-request-id")))
        left_s = allowed_s - (time.monotonic() - arrived)
        if left_s <= 0:
            raise Refused(deadline(self._service.role, allowed_s))
        for generation in job.generations:
            generation.deadline_s = left_s
        return job

    async def _tell_peers(self, body: bytes, cause: Cause) -> None:
        """A refused leg of a pair: who waits for it at the other end hears why, as far as the body names the pair."""
        if not isinstance(self._service, ToldOfRefusals):
            return
        if len(body) <= self._settings.inline_body_bytes:
            legs = self._service.named_in(body)
        else:
            legs = await asyncio.get_running_loop().run_in_executor(None, self._service.named_in, body)
        for leg in legs:
            self._service.leg_refused(leg, cause)

    async def _read(self, body: bytes, request_id: str | None) -> Job:
        """Off the loop where it may take long (rule 6)."""
        if len(body) <= self._settings.inline_body_bytes:
            return read_job(self._endpoint, body, request_id, self._service, self._legs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, read_job, self._endpoint, body, request_id, self._service, self._legs)
