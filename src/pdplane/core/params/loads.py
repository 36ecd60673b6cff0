"""What connectors report of loads at decode, taken in vLLM's order: who is confirmed, what has failed, which pages are
bad, and only then whose load is over.

A load that fails ends its request, or has its prompt computed here from the first bad page on, as is set. What is not
confirmed is not trusted, however much of it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..batch import Batch
from ..effects import Ungate
from ..errors import Cause
from ..events import KVOutput
from ..ids import PageId, Rid
from ..node import Node
from .scheduled import Scheduled, Status

REPLAYS = frozenset({"spent", "invalid_params", "prompt_mismatch", "unknown_hold"})
"""Refusals that speak of the request and not of the load: computing the prompt here would hide them."""


class Desk(Protocol):
    """What is done with a request, by the scheduler around it."""

    batch: Batch

    @property
    def node(self) -> Node: ...

    def ask(self, request: Scheduled) -> None:
        """Stands in the queue, as soon as it may."""
        ...

    def completed(self, request: Scheduled) -> None:
        """Waits for its place in the batch, and for nothing else."""
        ...

    def begin_anew(self, request: Scheduled) -> None: ...

    def fail(self, request: Scheduled, cause: Cause) -> None: ...

    def let_go(self, request: Scheduled) -> bool: ...

    def free(self, request: Scheduled) -> None: ...

    def gone(self, request: Scheduled) -> None: ...


class Loads:
    """Applies reports to the requests that they are of."""

    def __init__(self, desk: Desk, requests: Mapping[Rid, Scheduled]) -> None:
        self._desk = desk
        self._node = desk.node
        self._requests = requests

    def take(self, output: KVOutput) -> None:
        for rid in sorted(output.confirmed - output.failed_recving.keys()):  # sets have no order of their own
            self._confirmed(rid)
        for rid, cause in output.failed_recving.items():
            self._failed(rid, cause)
        if output.invalid_block_ids:
            self._invalid(output.invalid_block_ids)
        for rid in sorted(output.finished_recving):
            self._received(rid)

    def _confirmed(self, rid: Rid) -> None:
        request = self._requests.get(rid)
        if request is None or request.confirmed or request.restarts:
            return
        request.confirmed = True
        if request.status is Status.RUNNING:
            self._desk.batch.proven(rid)
            self._node.out.append(Ungate(rid))
        elif request.status is Status.FINISHED_STOPPED:
            self._node.out.append(Ungate(rid))
            self._desk.let_go(request)
            self._desk.gone(request)

    def _failed(self, rid: Rid, cause: Cause) -> None:
        request = self._requests.get(rid)
        if request is None or request.given_up:
            return
        if request.status is Status.WAITING_FOR_REMOTE_KVS or request.unplaced:
            request.cause, request.good = request.cause or cause, 0
        elif request.confirmed:
            self._node.count("late", "failed_recving")
        else:
            self._refused_late(request, cause)

    def _refused_late(self, request: Scheduled, cause: Cause) -> None:
        """All has come, and is not to be trusted. Nothing of the answer has left yet."""
        request.cause = cause
        self._node.note(request.rid, None, "unconfirmed", str(cause))
        if not self._recomputes(cause):
            self._refuse(request, cause)
        elif request.status is Status.RUNNING:
            request.restarts = True
            self._desk.batch.withdraw(request.rid)
        elif request.status is Status.FINISHED_STOPPED:
            self._desk.begin_anew(request)
        else:  # it waits for its place in the batch, with its pages
            self._node.count("recompute", cause.code)
            self._compute_from(request, request.shared)

    def _refuse(self, request: Scheduled, cause: Cause) -> None:
        if request.status is Status.RUNNING:
            request.status = Status.FINISHED_ERROR
            self._desk.batch.cancel(request.rid, cause)
        else:
            self._desk.fail(request, cause)

    def _recomputes(self, cause: Cause) -> bool:
        return self._node.limits.recompute and cause.code not in REPLAYS

    def _invalid(self, pages: set[PageId]) -> None:
        """From the first bad page on nothing is there."""
        hit = False
        for request in self._requests.values():
            bad = next((at for at, page in enumerate(request.pages) if page in pages), None)
            if bad is None or request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            hit = True
            request.good = bad if request.good is None else min(bad, request.good)
            text = f"pages of the prompt from number {bad} on could not be loaded"
            request.cause = request.cause or Cause("kv_load_failed", text, 502, retryable=True, side="prefill")
        if not hit:
            self._node.count("late", "invalid_block_ids")

    def _received(self, rid: Rid) -> None:
        """The load is over, well or not: nothing of it touches the pages any more."""
        request = self._requests.get(rid)
        if request and request.status is Status.WAITING_FOR_REMOTE_KVS:
            self._loaded(request)
        elif request and request.status.finished and request.pages:
            self._desk.free(request)
        elif request and request.cause and request.unplaced:
            self._without_load(request, request.cause)
        else:
            self._node.count("late", "finished_recving")

    def _without_load(self, request: Scheduled, cause: Cause) -> None:
        """Nothing was reserved for it yet."""
        if self._recomputes(cause):
            self._node.count("recompute", cause.code)
            self._node.note(request.rid, None, "recompute", str(cause))
            request.local, request.cause = True, None
            self._desk.ask(request)
        else:
            self._desk.fail(request, cause)

    def _loaded(self, request: Scheduled) -> None:
        cause = request.cause
        request.status = Status.WAITING
        if cause is None:
            self._desk.completed(request)
        elif self._recomputes(cause):
            # What is not confirmed is not trusted, however much of it came.
            good = request.good or 0 if request.confirmed else 0
            self._node.count("recompute", cause.code)
            self._compute_from(request, max(request.shared, good))
            self._desk.completed(request)
        else:
            self._desk.fail(request, cause)

    def _compute_from(self, request: Scheduled, pages: int) -> None:
        """What is behind its first `pages` pages is computed here."""
        request.tokens = pages * self._node.limits.page_size
        self._node.note(request.rid, None, "recompute", f"from token {request.tokens}: {request.cause}")
        request.confirmed, request.local, request.cause = True, True, None
