"""The verbs of who runs this worker: drain it, and give back pages whose proof will never come.

They are for loopback; from elsewhere they need the admin key, and without one set they are refused.
"""

from __future__ import annotations

import hmac
import logging

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pdplane.core.errors import Cause, Refused
from pdplane.wire.address import is_loopback
from pdplane.wire.body import convert, decode_object, invalid

from ..service import Service
from .exchange import error_response, json_response
from .receiving import ClientGone, read_body

VERB_BODY_BYTES = 64 * 1024
MAX_TEXT = 512

log = logging.getLogger(__name__)


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    reason: str | None = None


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`instance` is the decode instance whose grant it is, `grant` its number, as its record and alarm name them."""

    instance: str
    grant: int


class Operator:
    def __init__(self, service: Service, admin_key: str) -> None:
        self._service = service
        self._key = admin_key

    async def drain(self, request: Request) -> Response:
        """No new requests from now on. Answers how many are live still; they finish."""
        try:
            asked = convert(await self._asked(request), DrainRequest)
        except Refused as refused:
            return error_response(refused.cause)
        except ClientGone:
            return Response(status_code=400)
        reason = (asked.reason or "").strip()[:MAX_TEXT] or f"an operator drains this {self._service.role} worker"
        log.warning("asked to drain: %s", reason)
        self._service.drain(reason)
        return json_response({"draining": True, "live": self._service.live})

    async def release(self, request: Request) -> Response:
        """Quarantined pages of one grant become free without a proof: how many; 0 is a visible nothing."""
        try:
            asked = convert(await self._asked(request), ReleaseRequest)
            if not 0 < len(asked.instance) <= MAX_TEXT:
                raise invalid(f"instance must be a name of 1 to {MAX_TEXT} characters", "instance")
            if not 1 <= asked.grant < 2**63:
                raise invalid(f"grant must be a grant's number from 1 upwards, got {asked.grant}", "grant")
        except Refused as refused:
            return error_response(refused.cause)
        except ClientGone:
            return Response(status_code=400)
        return json_response({"released": self._service.release(asked.instance, asked.grant)})

    async def _asked(self, request: Request) -> dict[str, object]:
        """The body of a call that may be made; none is {}. Raises Refused (400, 401, 403, 413) and ClientGone."""
        self._admit(request)
        body = await read_body(request.headers, request.receive, VERB_BODY_BYTES)
        return decode_object(body) if body.strip() else {}

    def _admit(self, request: Request) -> None:
        """Raises Refused (403, 401). A web page in a browser on this machine is no operator, though on loopback."""
        peer = request.client.host if request.client is not None else ""
        page = request.headers.get("origin")
        if is_loopback(peer) and page is None:
            return
        path, where = request.url.path, f"the web page {page}" if page else peer or "an unknown address"
        if not self._key:
            message = (
                f"{path} is an operator's call and this one comes from {where}: make it on the worker's own machine, "
                "or start the worker with --admin-key and send that key as a bearer token"
            )
            raise Refused(Cause("not_loopback", message, 403))
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            message = f"the admin key for {path} is missing or wrong; send the worker's --admin-key as a bearer token"
            raise Refused(Cause("invalid_admin_key", message, 401))
