"""The router's own pages: health, readiness, workers, records, metrics, the abort call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

import pdplane
from pdplane.core.errors import Cause, bad_request
from pdplane.observe.prometheus import family, labelled, single
from pdplane.wire.body import NOT_JSON
from pdplane.wire.errors import error_body, error_detail

from .answers import answer as plain_answer
from .answers import json_answer
from .metrics import per_rank, per_worker

if TYPE_CHECKING:
    from .front import Incoming
    from .routing import Router

Answer = tuple[int, bytes]
_STARTED = int(time.time())


class AbortCall(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


def answer(router: Router, incoming: Incoming, *, close: bool) -> Answer:
    """(status, the whole answer) to anything that is not a generation."""
    path, method = incoming.path, incoming.method
    if path in _GET:
        if method not in ("GET", "HEAD"):
            return _not_allowed(method, path, "GET", close)
        return _head_only(_GET[path](router, close), method)
    if path.startswith("/requests/"):
        return _request(router, unquote(path.removeprefix("/requests/")), close)
    if path == "/abort_request":
        return _abort(router, incoming, close) if method == "POST" else _not_allowed(method, path, "POST", close)
    if path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        return _not_allowed(method, path, "POST", close)
    return _error(Cause("not_found", f"there is no {path}; see /server_info for the routes", 404, side="router"), close)


def route_of(path: str) -> str:
    """`path` as a metric's label: one of the routes, or "other"."""
    if path.startswith("/requests/"):
        return "/requests/{id}"
    return path if path in _GET or path == "/abort_request" else "other"


def _head_only(whole: Answer, method: str) -> Answer:
    status, data = whole
    return (status, data[: data.index(b"\r\n\r\n") + 4]) if method == "HEAD" else whole


def _error(cause: Cause, close: bool, headers: bytes = b"") -> Answer:
    return cause.status, plain_answer(cause.status, error_body(cause), headers=headers, close=close)


def _not_allowed(method: str, path: str, allowed: str, close: bool) -> Answer:
    cause = Cause("method_not_allowed", f"{path} takes {allowed}, not {method}", 405, side="router")
    return _error(cause, close, headers=b"allow: %b\r\n" % allowed.encode())


def _json(value: object, close: bool, status: int = 200) -> Answer:
    return status, json_answer(value, status=status, close=close)


def _health(router: Router, close: bool) -> Answer:
    return _json({"status": "alive", "in_flight": len(router.active), **_kind(router)}, close)


def _kind(router: Router) -> dict[str, str]:
    return {"backend": router.backend.name, "dialect": router.pairing.dialect()}


def _ready(router: Router, close: bool) -> Answer:
    cause = router.stopped() if router.stopping else router.pairing.not_ready()
    if router.stopping or not router.pairing.ready:
        return _json({"ready": False, "missing": cause.message, "error": error_detail(cause)}, close, 503)
    return _json({"ready": True, "missing": ""}, close)


def _workers(router: Router, close: bool) -> Answer:
    pairing, now = router.pairing, monotonic()
    described = [
        worker.describe(now) | {"reason": pairing.why_out(worker), "incompatible": pairing.incompatible(worker)}
        for worker in pairing.workers
    ]
    for entry in described:
        entry["ready"] = not entry["reason"]
    return _json({"workers": described, "missing": pairing.missing(), **_kind(router)}, close)


def _models(router: Router, close: bool) -> Answer:
    pairing = router.pairing
    limits: dict[str, int] = {}
    for worker in pairing.decodes + pairing.aggregated:
        if worker.ready:
            limits |= dict.fromkeys(worker.names, worker.limits.context_len)
    models = [
        {"id": name, "object": "model", "created": _STARTED, "owned_by": "pdplane", "max_model_len": limit or None}
        for name, limit in limits.items()
    ]
    if not models and pairing.missing():
        return _error(pairing.not_ready(), close)
    return _json({"object": "list", "data": models}, close)


def _server_info(router: Router, close: bool) -> Answer:
    config = router.config
    return _json(
        {
            "role": "router",
            "version": pdplane.__version__,
            "mode": config.mode,
            "policy": config.policy,
            **_kind(router),
            "lease_margin_s": config.lease_margin_s,
            "vllm_lease_s": config.vllm_lease_s,
            "retries": config.retries,
            "request_timeout_s": config.request_timeout_s,
            "max_body_bytes": config.max_body_bytes,
            "max_inflight": config.max_inflight,
            "prefill": [worker.url for worker in router.pairing.prefills],
            "decode": [worker.url for worker in router.pairing.decodes],
            "worker": [worker.url for worker in router.pairing.aggregated],
            "routes": sorted([*_GET, "/requests/{id}", "/abort_request", "/v1/chat/completions", "/v1/completions",
                              "/generate"]),
        },
        close,
    )  # fmt: skip


def _metrics(router: Router, close: bool) -> Answer:
    body = "\n".join(metric_lines(router)) + "\n"
    return 200, plain_answer(200, body.encode(), content_type=b"text/plain; version=0.0.4", close=close)


def metric_lines(router: Router) -> Iterable[str]:
    yield from router.metrics.lines()
    about = {**_kind(router), "mode": router.config.mode, "version": pdplane.__version__}
    yield from family("pdplane_router_info", "What this router serves.", "gauge", [(about, 1)])
    yield from single("pdplane_router_in_flight", "Requests without a verdict.", "gauge", len(router.active))
    yield from single("pdplane_router_draining", "Answered, prefill's leg still open.", "gauge", len(router.draining))
    yield from single("pdplane_router_connections", "Client connections.", "gauge", len(router.fronts))
    yield from single("pdplane_router_ready", "1: one whole compatible pair.", "gauge", int(router.pairing.ready))
    yield from single("pdplane_router_aborts_sent_total", "Abort calls taken by workers.", "counter", router.guard.sent)
    yield from single("pdplane_router_aborts_failed_total", "Abort calls not taken.", "counter", router.guard.failed)
    help = "Holds that decode did not take, by what became of them."
    yield from labelled("pdplane_router_releases_total", help, "counter", "outcome", router.guard.releases)
    workers = [(worker.url, worker.role, worker) for worker in router.pairing.workers]
    columns: tuple[tuple[str, str, str, Callable[[Any], float]], ...] = (
        ("pdplane_router_worker_load", "Samples in flight on its legs.", "gauge", lambda w: w.load),
        ("pdplane_router_worker_ready", "1: in service.", "gauge", lambda w: int(w.ready)),
        ("pdplane_router_worker_avoided", "1: others are preferred.", "gauge", lambda w: int(bool(w.avoid))),
        ("pdplane_router_worker_draining", "1: takes nothing new.", "gauge", lambda w: int(bool(w.draining))),
        ("pdplane_router_worker_idle", "Idle connections.", "gauge", lambda w: len(w.idle)),
        ("pdplane_router_worker_requests_total", "Legs opened.", "counter", lambda w: w.requests),
        ("pdplane_router_worker_failures_total", "Failures of its own.", "counter", lambda w: w.failures),
    )
    yield from per_rank(
        "pdplane_router_rank_load",
        "Samples in flight on a prefill's rank, where it has several.",
        [(url, rank, load) for url, _, w in workers if w.ranks is not None for rank, load in enumerate(w.ranks.loads)],
    )
    for name, help, kind, value in columns:
        yield from per_worker(name, help, kind, [(url, role, value(worker)) for url, role, worker in workers])


def _request(router: Router, key: str, close: bool) -> Answer:
    record = router.records.find(key)
    if record is None:
        message = f"no record of {key!r}: give a request id, an attempt's rid, a room or a label"
        return _error(Cause("not_found", f"{message}; the last {router.config.records} are kept", 404), close)
    return _json({"backend": router.backend.name, **record.describe()}, close)


def _abort(router: Router, incoming: Incoming, close: bool) -> Answer:
    try:
        asked = msgspec.json.decode(incoming.body, type=AbortCall)
    except msgspec.ValidationError as error:
        return _error(bad_request(f"the abort call's body is wrong: {error}", side="router"), close)
    except NOT_JSON as error:
        return _error(bad_request(f"the abort call's body is not valid JSON: {error}", code="invalid_json"), close)
    authorization = incoming.headers.get(b"authorization", b"")
    if asked.abort_all and router.config.open_to_all:
        message = "abort_all would end the requests of strangers: start the router with --api-key, or name one by rid"
        return _error(Cause("abort_all_not_allowed", message, 403, param="abort_all", side="router"), close)
    if asked.abort_all:
        return _json({"aborted": router.abort_all(authorization)}, close)
    if not asked.rid:
        cause = bad_request('rid is empty; name a request, or set "abort_all": true', param="rid", side="router")
        return _error(cause, close)
    return _json({"aborted": router.abort(asked.rid, authorization)}, close)


_GET: dict[str, Callable[[Router, bool], Answer]] = {
    "/health": _health,
    "/ready": _ready,
    "/workers": _workers,
    "/metrics": _metrics,
    "/v1/models": _models,
    "/server_info": _server_info,
}
