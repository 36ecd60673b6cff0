"""What turns a request away: limits that the router can see, and workers' error answers read as failures."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from pdplane.core.attempts import DECODE, PREFILL, Failure, retry_safe
from pdplane.core.errors import Cause, Refused, bad_request
from pdplane.wire.body import NOT_JSON
from pdplane.wire.sampling import MAX_SAMPLES

from .body import Body
from .pairing import NOBODY, Pair, Pairing
from .upstream import Leg, WorkerAnswer
from .worker import PARAMS, Worker

ROOMS_ONLY = "/generate"
NOT_PASSED_ON = (b"connection:", b"keep-alive:", b"x-request-id:", b"x-pd-mode:")
FRAMING = (b"content-length:", b"transfer-encoding:")


class _Error(msgspec.Struct):
    message: str | None = None
    code: str | int | None = None
    retryable: bool | None = None
    side: str | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


_error_body = msgspec.json.Decoder(_ErrorBody, strict=False)


def fitting(body: Body, pairing: Pairing, barred: Collection[str] = NOBODY) -> Pair | None:
    """A pair of workers other than `barred` (URLs) that can hold the prompt: token ids are counted here, before any leg
    is sent. None where no pair is left; raises Refused (400) where there are, and none can hold it."""
    first: Cause | None = None
    chosen = pairing.choose(barred)
    if not body.prompt_tokens:
        return chosen
    excluded = set(barred)
    while chosen is not None:
        over = _over_limit(body, chosen)
        if over is None:
            return chosen
        worker, cause = over
        first = first or cause
        excluded.add(worker.url)
        chosen = pairing.choose(excluded)
    if first is not None:
        raise Refused(first)
    return None


def pair_for(
    path: str, body: Body, pairing: Pairing, barred: Collection[str] = NOBODY, *, again: bool = False
) -> Pair | None:
    """As `fitting`, by what each dialect takes. Raises Refused (400) also for a body of which no leg can be made.
    `again`: after an attempt, when it is too late to split the request."""
    pair = fitting(body, pairing, barred)
    if pair is None or pair.decode.dialect != PARAMS or not pair.one_each:
        return pair
    if path == ROOMS_ONLY or (again and body.samples > 1):
        return _fitting_rooms(path, body, pairing, barred)
    if body.odd_n:
        message = f"n must be a whole number from 1 to {MAX_SAMPLES}: each choice has a pair of legs of its own"
        raise Refused(bad_request(message, code="invalid_value", param="n", side="router"))
    body.check()  # legs are made of its fields, when it is too late to refuse
    return pair


def _fitting_rooms(path: str, body: Body, pairing: Pairing, barred: Collection[str]) -> Pair | None:
    """As `fitting`, for what only workers of the rooms dialect take. Raises Refused (400) where there are none."""
    others = {worker.url for worker in pairing.workers if worker.dialect == PARAMS}
    pair = fitting(body, pairing, others.union(barred))
    if pair is None:
        what = f"{ROOMS_ONLY} is" if path == ROOMS_ONLY else f"{body.samples} samples in one leg are"
        message = f"{what} served by workers of the rooms dialect alone, and those here speak kv_transfer_params"
        raise Refused(bad_request(f"{message}; send /v1/completions or /v1/chat/completions", code="not_served"))
    return pair


def _over_limit(body: Body, pair: Pair) -> tuple[Worker, Cause] | None:
    """The worker of the pair that cannot hold the prompt, and why."""
    for worker in pair:
        if worker is None:
            continue
        limits, name, tokens = worker.limits, body.prompt_name, body.prompt_tokens
        if 0 < limits.context_len <= tokens:
            code = "context_length_exceeded"
            why = (
                f"the model's context is {limits.context_len} tokens and one is needed for the answer. "
                "Shorten the prompt"
            )
        elif 0 < limits.max_prompt_tokens < tokens:
            code = "prompt_too_long"
            why = (
                f"the {worker.role} worker can hold {limits.max_prompt_tokens} of one prompt. Shorten it, or give the "
                "worker a larger KV pool"
            )
        else:
            continue
        return worker, bad_request(f"{name} has {tokens} tokens; {why}", code=code, param=name, side=worker.role)
    return None


def refusal(leg: Leg, said: WorkerAnswer) -> Failure:
    """A worker's error answer as a failure. Its own word on `retryable` and `side` counts where it gave one."""
    try:
        error = _error_body.decode(said.body).error
    except NOT_JSON:
        error = _Error()
    message = error.message or f"{leg.side} {leg.worker.url} answered {said.status}"
    cause = Cause(
        str(error.code or f"{leg.side}_answered_{said.status}"),
        message,
        said.status,
        retryable=retry_safe(said.status, error.retryable),
        side=error.side or leg.side,
        param=error.param,
        retry_after_s=_retry_after(said.head),
    )
    return Failure(cause=cause, blames=error.side if error.side == PREFILL or error.side == DECODE else "", reply=said)


def without(head: bytes, names: tuple[bytes, ...]) -> bytes:
    """Header lines but those of these names (with their colons)."""
    return b"".join(line + b"\r\n" for line in head.split(b"\r\n") if line and not line.lower().startswith(names))


def _header(headers: bytes, name: bytes) -> bytes:
    for line in headers.split(b"\r\n"):
        if line.lower().startswith(name + b":"):
            return line[len(name) + 1 :].strip()
    return b""


def content_type(headers: bytes) -> bytes:
    """The type that these header lines name; JSON where they name none."""
    return _header(headers, b"content-type") or b"application/json"


def _retry_after(headers: bytes) -> int | None:
    value = _header(headers, b"retry-after")
    return int(value) if value.isdigit() else None
