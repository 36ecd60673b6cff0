"""Native vLLM engines: params by their own KV connector, and of themselves no word beyond ``/health``, ``/v1/models``.

An engine ends a request when its connection closes. The abort call is sent beside that where the engine has one; what
prefill holds is let go by decode's notice or the lease's end, and by nothing that a router could say.
"""

from __future__ import annotations

import msgspec

from pdplane.core.attempts import DECODE, HANDOFF, Failure
from pdplane.core.errors import Cause
from pdplane.wire.body import NOT_JSON

from ..refusals import refusal
from ..upstream import Leg, WorkerAnswer
from ..worker import PARAMS, Limits, Worker
from . import EndedLeg, Get, StopCall

OURS = "pdplane"
ABORT = "/inference/v1/abort_requests"
_PREFIXES = {"/v1/chat/completions": "chatcmpl-{}", "/v1/completions": "cmpl-{}-0"}


class _Model(msgspec.Struct):
    id: str = ""
    owned_by: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


_models = msgspec.json.Decoder(_Models)


class Vllm:
    name = "vllm"
    names_in_body = False
    hands_over_ids = True
    early_heads = True
    releases = False

    async def look(self, worker: Worker, get: Get) -> str:
        """A restart shows in its health alone: who was out is taken for another process when it is back."""
        status, body = await get("/v1/models")
        if status == 401:
            return "/v1/models answers 401; give the router the engines' key by --api-key"
        if status != 200:
            return f"/v1/models answers {status}"
        try:
            models = _models.decode(body).data
        except NOT_JSON as error:
            return f"/v1/models cannot be read: {error}"
        if not models or not models[0].id:
            return "/v1/models names no model"
        if models[0].owned_by == OURS:
            return "this is a pdplane worker and no vLLM; leave --backend out"
        if not worker.ready:
            worker.born_again()
        worker.dialect = PARAMS
        worker.model, *others = [model.id for model in models]
        worker.aliases = tuple(others)
        worker.limits = Limits(context_len=models[0].max_model_len or 0)
        return ""

    def stop_calls(self, ended: EndedLeg, cause: Cause) -> list[StopCall]:
        """By the external ids, which the engine makes of x-request-id."""
        prefix = _PREFIXES.get(ended.path, "{}")
        return [StopCall(ABORT, msgspec.json.encode({"request_ids": [prefix.format(rid) for rid in ended.rids]}))]

    def release_call(self, request_id: str) -> StopCall:
        raise NotImplementedError("vLLM has no call that lets a hold go")

    def refusal(self, leg: Leg, said: WorkerAnswer, handed_over: bool) -> Failure:
        """A 5xx says "Internal server error" whatever it was; what can be known is which leg, and what was asked."""
        failure = refusal(leg, said)
        if said.status < 500 or said.status == 503:
            return failure
        lost = handed_over and leg.side == DECODE
        why = ", most often for KV that it could not load from prefill" if lost else ""
        answered = f"{leg.side} {leg.worker.url} answered {said.status} before its first byte"
        message = f"{answered}{why}: {failure.cause.message}"
        code = "kv_load_failed" if lost else f"{leg.side}_failed"
        cause = Cause(code, message, 502, retryable=True, side=leg.side)
        return Failure(cause=cause, blames=HANDOFF if lost else "")
