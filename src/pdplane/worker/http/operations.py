"""The endpoints beside inference: abort, models, health, what this server is, its metrics and its records."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pdplane.core.errors import CLIENT_CLOSED, Cause, Refused, bad_request, client_left
from pdplane.core.ids import BadRoom, Rid, parse_room
from pdplane.core.layout import PARAMS
from pdplane.wire.body import convert, decode_object, invalid
from pdplane.wire.openai import Model, ModelList

from ..engine import Sampling
from ..prompt import prompt_id
from ..service import Generation, Service
from .exchange import error_response, json_response
from .receiving import ClientGone, read_body
from .settings import HttpSettings

ABORT_BODY_BYTES = 1024 * 1024
MAX_CODE, MAX_MESSAGE = 64, 512
IDENTITY = (
    *("role", "disaggregation_mode", "disaggregation_bootstrap_port", "served_model_name", "model_path"),
    *("tp_size", "dp_size", "load_balance_method", "limits"),
)
"""What of /server_info the field's routers read of a worker's model when they meet it."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@runtime_checkable
class Probed(Protocol):
    """A service that can run a token through its engine without a pair."""

    async def probe(self) -> None:
        """Raises Refused where no token comes out."""
        ...


@runtime_checkable
class Holding(Protocol):
    """A service that holds KV for readers elsewhere (prefill, params dialect)."""

    def release_holds(self, rids: Sequence[str], cause: Cause) -> tuple[list[str], list[str]]:
        """(released, unknown), by exact name. Idempotent."""
        ...


class AbortCause(msgspec.Struct, frozen=True, kw_only=True):
    """Why whoever aborts does so: the first cause crosses to this side's record."""

    code: str
    message: str = ""


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    rid: str | None = None
    room: object = None
    abort_all: bool | None = None
    cause: AbortCause | None = None


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`request_ids`: each the remote_request_id of a hand-off."""

    request_ids: list[str]
    cause: AbortCause | None = None


class Operations:
    def __init__(self, service: Service, settings: HttpSettings) -> None:
        self._service = service
        self._settings = settings

    async def abort(self, request: Request) -> Response:
        """Exact: a rid, or a request's id for all of its samples. An unknown one is a visible no-op."""
        try:
            body = await read_body(request.headers, request.receive, ABORT_BODY_BYTES)
            return json_response({"aborted": self._abort(convert(decode_object(body), AbortRequest))})
        except Refused as refused:
            return error_response(refused.cause)
        except ClientGone:
            return Response(status_code=400)

    async def release_holds(self, request: Request) -> Response:
        """Whoever was to read what prefill holds will not: it lets go at once. An unknown name is a visible no-op."""
        try:
            if not isinstance(self._service, Holding):
                raise Refused(self._holds_nothing())
            body = await read_body(request.headers, request.receive, ABORT_BODY_BYTES)
            released, unknown = self._release(self._service, convert(decode_object(body), ReleaseRequest))
            return json_response({"released": released, "unknown": unknown})
        except Refused as refused:
            return error_response(refused.cause)
        except ClientGone:
            return Response(status_code=400)

    async def models(self, request: Request) -> Response:
        return json_response(ModelList(data=[self._model()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._service.model_name:
            message = f"the model {name!r} does not exist here; this worker serves {self._service.model_name!r}"
            return error_response(Cause("model_not_found", message, 404, param="model"))
        return json_response(self._model())

    async def health(self, request: Request) -> Response:
        healthy, facts = self._service.health()
        return json_response({"status": "ok" if healthy else "unhealthy", **facts}, 200 if healthy else 503)

    async def health_generate(self, request: Request) -> Response:
        """/health, and a token that really ran through, where this role can make one alone."""
        healthy, facts = self._service.health()
        if not healthy:
            return json_response({"status": "unhealthy", **facts}, 503)
        try:
            async with asyncio.timeout(self._settings.probe_timeout_s):
                generated = await self._probe()
        except TimeoutError:
            return json_response({"status": "no token", "waited_s": self._settings.probe_timeout_s, **facts}, 503)
        except Refused as refused:
            return json_response({"status": "no token", "cause": refused.cause, **facts}, 503)
        return json_response({"status": "ok", "generated": generated, **facts})

    async def server_info(self, request: Request) -> Response:
        return json_response(self._service.server_info())

    async def model_info(self, request: Request) -> Response:
        service = self._service
        info = service.server_info()
        return json_response(
            {name: info[name] for name in IDENTITY}
            | {
                "tokenizer_path": service.model_name,
                "is_generation": True,
                "context_length": service.context_len,
                "vocab_size": service.vocab_size,
            }
        )

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._service.metrics_text(), headers={"content-type": METRICS_TYPE})

    async def record(self, request: Request) -> Response:
        key = request.path_params["key"]
        record = self._service.record(key)
        if record is None:
            message = f"no request is known by {key!r}; give a request id, a rid or a room"
            return error_response(Cause("request_not_found", message, 404))
        return json_response(record)

    def _abort(self, asked: AbortRequest) -> int:
        """How many were ended. Raises Refused (400): neither a rid nor abort_all, or a bad room."""
        if asked.abort_all:
            return self._service.abort_all()
        if not asked.rid:
            raise invalid('rid is missing: name the request, or say "abort_all": true', "rid")
        try:
            room = None if asked.room is None else parse_room(asked.room)
        except BadRoom as error:
            raise invalid(str(error), "room", code="invalid_room") from None
        return self._service.abort(asked.rid, room, _cause(asked.cause))

    def _release(self, service: Holding, asked: ReleaseRequest) -> tuple[list[str], list[str]]:
        """Raises Refused (400): no name, or an empty one."""
        if not asked.request_ids or "" in asked.request_ids:
            text = "request_ids must name what is held: the remote_request_id of each kv_transfer_params"
            raise invalid(text, "request_ids")
        text = "prefill was told by a release call that nobody would read this; ask prefill again"
        cause = _cause(asked.cause) or Cause("released", text, 409, retryable=True, side="router")
        return service.release_holds(list(dict.fromkeys(asked.request_ids)), cause)

    def _holds_nothing(self) -> Cause:
        role, dialect = self._service.role, self._service.dialect
        text = f"this is a {role} worker of dialect {dialect}: it holds nothing; ask a prefill worker of dialect params"
        return bad_request(text, code="holds_nothing")

    async def _probe(self) -> bool:
        """True where a token was generated, False where this role cannot without a pair. Raises Refused."""
        if isinstance(self._service, Probed):
            await self._service.probe()
            return True
        if not self._alone:
            return False
        name = f"health-{uuid.uuid4().hex}"
        prompt = self._service.tokenizer.encode("a")[:1]
        generation = Generation(
            rid=Rid(name),
            request_id=name,
            prompt=prompt,
            prompt_id=prompt_id(prompt),
            sampling=Sampling(max_tokens=1, temperature=0.0),
            deadline_s=self._settings.probe_timeout_s,
        )
        [stream] = self._service.submit([generation])
        try:
            async for _ in stream:
                pass
        finally:
            stream.close(client_left(self._service.role))
        return True

    @property
    def _alone(self) -> bool:
        """Whether this worker computes a prompt and goes on from there, with nobody else."""
        service = self._service
        return service.role == "aggregated" or (service.role == "decode" and service.dialect == PARAMS)

    def _model(self) -> Model:
        name = self._service.model_name
        return Model(id=name, root=name, max_model_len=self._service.context_len)


def _cause(told: AbortCause | None) -> Cause | None:
    return Cause(told.code[:MAX_CODE], told.message[:MAX_MESSAGE], CLIENT_CLOSED, side="router") if told else None
