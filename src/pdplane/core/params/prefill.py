"""The prefill worker's core in the params dialect: prompts are computed as pages and credits last, answered at once,
and their KV is kept by the connector until somebody has read it, or nobody will.

Nothing waits for decode here: prefill's pages are taken first, decode's afterwards, so the two pools never wait for
each other.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import msgspec

from ..admission import queue_full, refuse
from ..connector import KVConnector, RankOutputs
from ..effects import AbortEngine, AnswerFailed, AnswerHeld, AnswerRow, RunPrefill
from ..errors import Cause, deadline, duplicate_rid
from ..events import (
    Cancel,
    Computed,
    ConnectorOutput,
    Drain,
    Event,
    KVOutput,
    Released,
    ReleaseHold,
    RequestArrived,
    Sampled,
)
from ..frames import Beat, Row
from ..ids import HoldNo, Instance, PageId, Rid
from ..node import Limits, Node, TimerKey
from ..pages import Owner, Page
from ..prompt_pages import Prompt, PromptPages
from ..queues import AdmissionQueue
from ..session import Identity
from .hold_connector import HoldConnector
from .table import RequestStatus


class Phase(Enum):
    WAITING = auto()
    COMPUTING = auto()
    DRAINING = auto()  # answered; the running step still touches its pages
    PINNED = auto()  # finished; its pages wait for finished_sending


class Computing(msgspec.Struct, eq=False):
    """One prompt, from its arrival until its pages are given back."""

    arrived: RequestArrived
    prompt: Prompt
    since: float
    phase: Phase = Phase.WAITING
    pages: tuple[PageId, ...] = ()
    shared: int = 0
    row: Row | None = None

    @property
    def owner(self) -> Owner:
        return Owner(self.arrived.rid)

    @property
    def own(self) -> tuple[PageId, ...]:
        return self.pages[self.shared :]


class ParamsPrefillNode(Node):
    """`connector`: another one than ours, made for this node."""

    side = "prefill"

    def __init__(
        self, me: Identity, limits: Limits, connector: Callable[[ParamsPrefillNode], KVConnector] | None = None
    ) -> None:
        super().__init__(limits)
        self.instance: Instance = me.instance
        self.pages = PromptPages(self.ledger, limits)
        self.requests: dict[Rid, Computing] = {}
        self.computing = 0  # prompts that the engine has
        self.held = HoldConnector(self, me, self._beat)
        self.connector: KVConnector = connector(self) if connector else self.held
        self._ranks = RankOutputs(me.ranks, self.requests)
        self._queue: AdmissionQueue[Computing] = AdmissionQueue(limits.max_overtakes)

    @property
    def node(self) -> Node:
        return self

    @property
    def live(self) -> int:
        return len(self.requests)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def holds_told(self) -> list[dict[str, object]]:
        """What is held for readers: rid, hold, pages, lease left, consumer."""
        return self.held.told()

    def holding(self, rid: Rid) -> bool:
        """Whether something is held for readers under this name."""
        return self.held.holding(rid)

    # --- events -----------------------------------------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._arrived(event)
            case Computed(rid=rid):
                pass  # only whole prompts are held
            case Sampled(rid=rid):
                self._sampled(event)
            case Released(rid=rid, error=error):
                self._released(rid, error)
            case Cancel(rid, cause):
                self._cancel(rid, cause)
            case ReleaseHold(rid, cause):
                if not self.connector.release(rid, cause):
                    self.count("late", "release")
            case ConnectorOutput(rank, output):
                self._finished(self._ranks.add(rank, output))
            case Drain(reason):
                self.draining = reason
            case _:
                self.connector.take_event(event)

    def _due(self, key: TimerKey) -> None:
        kind, name = key
        request = self.requests.get(Rid(name)) if isinstance(name, str) else None
        if request is None:
            self.connector.due(kind, name)
        elif kind == "deadline":
            self._cancel(request.arrived.rid, deadline(self.side, self.now - request.since))
        elif kind == "queue":
            self._cancel(request.arrived.rid, queue_full(self))

    def _after(self) -> None:
        due = self.connector.tick()
        self._finished(self.connector.take_output())
        while self.computing < self.limits.max_running:
            request = self._queue.pop_fitting(self._fits, self.pages.stamp)
            if request is None:
                break
            self._start(request)
        self.out += self.connector.build_connector_meta()
        if due is not None:
            self.timers.set(("sessions", 0), due)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _arrived(self, event: RequestArrived) -> None:
        rid = event.rid
        if rid in self.requests:
            self.out.append(AnswerFailed(rid, duplicate_rid(rid, self.side)))
            self.count("duplicate_rid")
            return
        if refusal := refuse(self, event.prompt.tokens, self.waiting):
            self.answer_failed(rid, None, refusal)
            return
        most = (event.prompt.tokens - 1) // self.limits.page_size  # the last token is computed here
        request = Computing(event, Prompt(event.prompt.tokens, event.page_keys, most), self.now)
        self.requests[rid] = request
        self._queue.push(request, event.priority)
        self.timers.set(("deadline", rid), event.deadline)
        self.timers.set(("queue", rid), self.now + self.limits.queue_limit_s)
        self.note(rid, None, RequestStatus.WAITING)
        self.connector.on_new_request(event)

    def _fits(self, request: Computing) -> bool:
        return self.pages.fits(request.prompt)

    def _start(self, request: Computing) -> None:
        rid = request.arrived.rid
        self.timers.clear(("queue", rid))
        request.pages, request.shared = self.pages.take(request.prompt, Page.COMPUTING, request.owner)
        request.phase = Phase.COMPUTING
        self.computing += 1
        self.note(rid, None, RequestStatus.RUNNING)
        self.out.append(RunPrefill(rid, request.pages, request.shared * self.limits.page_size))

    def _sampled(self, event: Sampled) -> None:
        request = self.requests.get(event.rid)
        if request is None or request.phase is not Phase.COMPUTING:
            self.count("late", "sampled")
            return
        prompt = request.arrived.prompt
        request.row = Row(
            first_token=event.token,
            prompt_tokens=prompt.tokens,
            prompt_digest=prompt.digest,
            cached_tokens=request.shared * self.limits.page_size,
            logprob=event.logprob,
            top_logprobs=event.top_logprobs,
            finish_reason=event.ended,
        )

    def _released(self, rid: Rid, error: str) -> None:
        """Own completion: the engine touches the pages no more."""
        request = self.requests.get(rid)
        if request is None or request.phase not in (Phase.COMPUTING, Phase.DRAINING):
            self.count("late", "released")
            return
        self.computing -= 1
        self.timers.clear(("deadline", rid))
        if request.phase is Phase.COMPUTING and request.row is not None and not error:
            self._computed(request, request.row)
            return
        if request.phase is Phase.COMPUTING:
            cause = Cause("engine_error", error or "the engine gave the prompt up", 500, retryable=True, side=self.side)
            self._answer_failed(request, cause)
        self.ledger.free(request.own, request.owner)
        self._gone(request)

    def _computed(self, request: Computing, row: Row) -> None:
        """The connector says whether somebody is to read it, and the client what it has to present."""
        rid = request.arrived.rid
        kept = self.connector.request_finished(request.arrived, request.pages)
        request.phase = Phase.PINNED
        self.ledger.shift(request.own, request.owner, Page.COMPUTING, Page.HELD)
        if kept.hold:
            self.out.append(AnswerHeld(rid, row, HoldNo(kept.hold), request.pages, kept.lease_s))
        else:
            self.out.append(AnswerRow(rid, row))
        if not kept.delay_free:
            self._give_back(request)

    def _finished(self, output: KVOutput) -> None:
        self.connector.update_connector_output(output)
        for rid in sorted(output.finished_sending):  # a set has no order of its own
            request = self.requests.get(rid)
            if request is not None and request.phase is Phase.PINNED:
                self._give_back(request)
            else:
                self.count("late", "finished_sending")  # a notice never ends what is not finished

    def _give_back(self, request: Computing) -> None:
        """Computed whole, and nobody reads it by this request's leave: its full pages serve later prompts."""
        self.pages.keep(request.prompt, request.pages, request.shared, request.owner, Page.HELD)
        self._gone(request)

    def _gone(self, request: Computing) -> None:
        rid = request.arrived.rid
        self.pages.release(request.pages[: request.shared])
        self.note(rid, None, "freed", f"{len(request.pages)} pages")
        self._ranks.forget(rid)
        del self.requests[rid]

    def _cancel(self, rid: Rid, cause: Cause) -> None:
        request = self.requests.get(rid)
        if request is None:
            self.count("late", "cancel")
        elif request.phase is Phase.WAITING:
            self._queue.remove(request)
            for kind in ("deadline", "queue"):
                self.timers.clear((kind, rid))
            self._answer_failed(request, cause)
            del self.requests[rid]
        elif request.phase is Phase.COMPUTING:
            request.phase = Phase.DRAINING
            self.ledger.shift(request.own, request.owner, Page.COMPUTING, Page.DRAINING)
            self._answer_failed(request, cause)
            self.out.append(AbortEngine(rid))
        elif request.phase is Phase.DRAINING or not self.connector.release(rid, cause):
            self.count("late", "cancel")

    def _answer_failed(self, request: Computing, cause: Cause) -> None:
        """Its end, with nothing to hold."""
        self.connector.request_finished(request.arrived, ())
        self.answer_failed(request.arrived.rid, None, cause)

    def _beat(self, peer: Instance) -> Beat:
        return Beat(src=self.instance, running=self.computing, waiting=self.waiting)

    # --- audit ------------------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        return super().audit() + self.pages.audit(self._heads())

    def audit_all(self) -> list[str]:
        return super().audit_all() + self.pages.audit_all(self._heads())

    def _heads(self) -> list[tuple[PageId, ...]]:
        return [request.pages[: request.shared] for request in self.requests.values()]
