"""The decode worker's core in the params dialect: a scheduler in vLLM's states, over any connector.

A request waits (WAITING) until the connector says how much of its prompt can be had and until all of its pages are
there, or none; it is parked (WAITING_FOR_REMOTE_KVS) while a load fills them; then it runs, and computes what is
missing, at least its last token. Its pages are known to nobody else before the load is over: a prefix that is not there
yet is no prefix.

A load may be over and not confirmed. The engine begins then, and nothing of the answer leaves before the confirmation;
where that is refused the engine is taken back, and the request fails or computes its prompt here, as is set.
"""

from __future__ import annotations

from collections.abc import Callable

from ..admission import demand, queue_full, refuse
from ..batch import Batch
from ..connector import KVConnector, RankOutputs
from ..effects import AnswerFailed, RunWhole
from ..errors import Cause, deadline, duplicate_rid
from ..events import (
    Cancel,
    Computed,
    ConnectorOutput,
    Drain,
    Event,
    Handle,
    HandleRefused,
    KVOutput,
    OperatorRelease,
    Released,
    RequestArrived,
    Retracted,
)
from ..ids import GrantNo, Instance, PageId, Rid
from ..node import Limits, Node, TimerKey
from ..pages import NOBODY, Owner, Page
from ..prompt_pages import Prompt, PromptPages
from ..queues import AdmissionQueue
from ..reserve import Reserve
from ..session import Identity
from .loads import Loads
from .pull_connector import PullConnector
from .scheduled import Scheduled, Status, misfit
from .table import LE


class ParamsDecodeNode(Node):
    """`connector`: another one than ours, made for this node."""

    side = "decode"

    def __init__(
        self, me: Identity, limits: Limits, connector: Callable[[ParamsDecodeNode], KVConnector] | None = None
    ) -> None:
        super().__init__(limits)
        self.instance: Instance = me.instance
        self.pages = PromptPages(self.ledger, limits)
        self.reserve = Reserve(self.pages, limits)
        self.batch = Batch(self, self.pages, self.reserve)
        self.requests: dict[Rid, Scheduled] = {}
        self.pull = PullConnector(self, me)
        self.connector: KVConnector = connector(self) if connector else self.pull
        self._ranks = RankOutputs(me.ranks, self.requests)
        self.loads = Loads(self, self.requests)
        self._queue: AdmissionQueue[Scheduled] = AdmissionQueue(limits.max_overtakes)
        self._complete: dict[Rid, Scheduled] = {}  # these wait for a place in the batch, and for nothing else

    @property
    def node(self) -> Node:
        return self

    @property
    def live(self) -> int:
        return len(self.requests)

    @property
    def waiting(self) -> int:
        return sum(request.status is Status.WAITING for request in self.requests.values())

    @property
    def parked(self) -> int:
        """Requests whose pages are reserved and are being filled."""
        return sum(request.status is Status.WAITING_FOR_REMOTE_KVS for request in self.requests.values())

    def sessions(self) -> int:
        return self.pull.members.sessions()

    def owner_of(self, rid: Rid) -> Owner:
        """Under which name the ledger knows this request's pages; NOBODY where it holds none."""
        request = self.requests.get(rid)
        return request.owner if request and (request.pages or rid in self.batch.running) else NOBODY

    # --- events -----------------------------------------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._arrived(event)
            case HandleRefused(handle, cause):
                self.connector.refused(handle, cause)
            case Computed(rid=rid, tokens=tokens):
                self.batch.computed(rid, tokens)
            case Released(rid=rid, error=error):
                self._released(rid, error)
            case Retracted(rid=rid, tokens=tokens):
                self.batch.retracted(rid, tokens)
            case Cancel(rid, cause):
                self._cancel(rid, cause)
            case ConnectorOutput(rank, output):
                self._loaded(self._ranks.add(rank, output))
            case OperatorRelease(grant):
                self._operator_release(grant)
            case Drain(reason):
                self.draining = reason
            case _:
                self.connector.take_event(event)

    def _due(self, key: TimerKey) -> None:
        kind, name = key
        request = self.requests.get(Rid(name)) if isinstance(name, str) else None
        if kind in ("deadline", "running") and request:
            self._cancel(request.rid, deadline(self.side, self.now - request.since))
        elif kind == "queue" and request:
            self._cancel(request.rid, queue_full(self))
        elif kind == "progress" and request:
            text = f"no page of this prompt has come for {self.limits.progress_limit_s:g} s"
            self._cancel(request.rid, Cause("no_progress", text, 504, retryable=True, side="prefill"))
        elif kind == "drain" and request:
            self._quarantine(request)
        else:
            self.connector.due(kind, name)

    def _after(self) -> None:
        due = self.connector.tick()
        self._loaded(self.connector.take_output())
        self.batch.grow()
        self.batch.restore()
        self._harvest()
        for rid in self.connector.take_ready():
            if (request := self.requests.get(rid)) and request.status is Status.WAITING:
                self.ask(request)
        self._admit()
        self._harvest()
        self.out += self.connector.build_connector_meta()
        if due is not None:
            self.timers.set(("sessions", 0), due)

    # --- arrival and admission --------------------------------------------------------------------------------------

    def _arrived(self, event: RequestArrived) -> None:
        rid, handle = event.rid, event.handle
        if rid in self.requests:
            duplicate = duplicate_rid(rid, self.side)
            self.out.append(AnswerFailed(rid, duplicate))
            self.count("duplicate_rid")
            if handle:
                self.connector.refused(handle, duplicate)
            return
        if handle and (taken := self.connector.taken(handle)):
            self.answer_failed(rid, None, taken)
            return
        if refusal := refuse(self, event.prompt.tokens, self.waiting) or self._misfit(event, handle):
            self.answer_failed(rid, None, refusal)
            if handle:
                self.connector.refused(handle, refusal)
            return
        self.requests[rid] = request = self._scheduled(event)
        self.timers.set(("deadline", rid), event.deadline)
        self.timers.set(("queue", rid), self.now + self.limits.queue_limit_s)
        self.note(rid, None, Status.WAITING)
        self.connector.on_new_request(event)
        self.ask(request)

    def _scheduled(self, event: RequestArrived) -> Scheduled:
        tokens = event.prompt.tokens
        most = (tokens - 1) // self.limits.page_size  # the last token is computed here
        prompt = Prompt(tokens, event.page_keys, most)
        return Scheduled(event, self.now, demand(tokens, event.max_new, self.limits), prompt)

    def _misfit(self, event: RequestArrived, handle: Handle | None) -> Cause | None:
        return misfit(event, handle, self.limits.page_size, self.side) if handle else None

    def ask(self, request: Scheduled) -> None:
        """Who may be had at all stands in the queue; the others are asked again when something has happened."""
        if request.pages or request in self._queue:
            return
        if request.local or self.connector.get_num_new_matched_tokens(request.arrived, 0).tokens is not None:
            self._queue.push(request, request.arrived.priority)

    def _admit(self) -> None:
        while len(self.reserve) < 2 * self.limits.max_running:
            request = self._queue.pop_fitting(self._fits, self.batch.stamp)
            if request is None:
                return
            self._place(request)

    def _fits(self, request: Scheduled) -> bool:
        return self.batch.may_admit(request.prompt, request.need.most, request.arrived.priority)

    def _place(self, request: Scheduled) -> None:
        """All pages of the prompt, reserved before anything of it is asked for (O2)."""
        rid, size = request.rid, self.limits.page_size
        self.timers.clear(("queue", rid))
        self.reserve.admit(request.owner, request.need.pages, request.need.most)
        request.pages, request.shared = self.pages.take(request.prompt, Page.GRANTED, request.owner)
        request.page_state = Page.GRANTED
        request.tokens = request.shared * size
        if request.local:
            self.completed(request)
            return
        matched = self.connector.get_num_new_matched_tokens(request.arrived, request.tokens)
        external = matched.tokens or 0
        request.tokens += external
        request.status = Status.WAITING_FOR_REMOTE_KVS if matched.waits else request.status
        request.confirmed = not matched.waits
        if matched.waits:
            self.note(rid, None, request.status, f"{len(request.own)} pages, {external} tokens")
            self.progressed(rid)
        self.connector.update_state_after_alloc(request.arrived, request.own, external)
        if not matched.waits:
            self.completed(request)

    def progressed(self, rid: Rid) -> None:
        """A sign of work on its load."""
        request = self.requests.get(rid)
        if request and request.status is Status.WAITING_FOR_REMOTE_KVS:
            self.timers.set(("progress", rid), self.now + self.limits.progress_limit_s)

    def completed(self, request: Scheduled) -> None:
        self.timers.clear(("progress", request.rid))
        self._complete[request.rid] = request
        self.reserve.completed(request.owner)

    def _harvest(self) -> None:
        """Into the batch while it has a place. Who comes there may want a page at once: growth is looked at again."""
        size = len(self.batch)
        for request in list(self._complete.values()):
            if self.batch.full:
                break
            self._run(request)
        if len(self.batch) > size:
            self.batch.grow()
            self.batch.restore()

    def _run(self, request: Scheduled) -> None:
        del self._complete[request.rid]
        self.ledger.shift(request.own, request.owner, request.page_state, Page.ACTIVE)
        request.status = Status.RUNNING
        running, most, gated = request.running(), request.need.max_new, not request.confirmed
        self.out.append(RunWhole(request.rid, request.pages, most, request.tokens, request.shared, gated))
        self.batch.start(running, request.arrived.deadline)
        request.pages, request.shared = (), 0

    def _loaded(self, output: KVOutput) -> None:
        self.connector.update_connector_output(output)
        self.loads.take(output)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _released(self, rid: Rid, error: str) -> None:
        """Own completion: the engine has let go, the pages are free or cached."""
        request = self.requests.get(rid)
        if request is None or rid not in self.batch.running:
            self.count("late", "released")
            return
        unanswered = request.status is Status.RUNNING
        anew = unanswered and request.restarts
        waits = unanswered and not request.confirmed and not error
        if not anew and not waits:
            self.let_go(request)
        self.batch.released(rid, error)
        if anew:
            self.begin_anew(request)
        elif waits:
            request.status = Status.FINISHED_STOPPED  # its answer waits for the confirmation
        else:
            self.gone(request)

    def begin_anew(self, request: Scheduled) -> None:
        """It computes its prompt here, as if it had come without a handle."""
        self.count("recompute", request.cause.code if request.cause else "")
        self.note(request.rid, None, Status.WAITING, f"recompute: {request.cause}")
        request.status, request.local, request.confirmed, request.restarts = Status.WAITING, True, True, False
        request.cause = None
        self.timers.set(("queue", request.rid), self.now + self.limits.queue_limit_s)
        self.ask(request)

    def _cancel(self, rid: Rid, cause: Cause) -> None:
        request = self.requests.get(rid)
        if request is None or request.given_up:
            self.count("late", "cancel")
        elif request.status is Status.RUNNING:
            request.status = Status.FINISHED_ABORTED
            if request.restarts:  # the engine is letting go of it already
                self.answer_failed(rid, None, cause)
            self.batch.cancel(rid, cause)
            self.let_go(request)
        else:
            self.fail(request, cause)

    def fail(self, request: Scheduled, cause: Cause) -> None:
        """Its end before it runs, or after: the client is answered now, the pages follow when nothing fills them."""
        request.status = Status.FINISHED_ERROR if request.cause is cause else Status.FINISHED_ABORTED
        self.answer_failed(request.rid, None, cause)
        self._queue.remove(request)
        if request.rid in self._complete:
            del self._complete[request.rid]
        for kind in ("deadline", "queue", "progress"):
            self.timers.clear((kind, request.rid))
        self.reserve.drop(request.owner)
        if self.let_go(request) and request.pages:
            self.ledger.shift(request.own, request.owner, request.page_state, Page.DRAINING)
            request.page_state = Page.DRAINING
            self.timers.set(("drain", request.rid), self.now + self.limits.drain_limit_s)
        else:
            self.free(request)

    def let_go(self, request: Scheduled) -> bool:
        """The connector hears of the end, once; True while a load of it still runs."""
        if request.told:
            return False
        request.told = True
        return self.connector.request_finished(request.arrived, request.own).delay_free

    def free(self, request: Scheduled, how: str = "free again") -> None:
        if request.page_state is Page.QUARANTINED:
            self.alarm(f"request {request.rid}: {len(request.own)} quarantined pages are {how}")
        if request.pages:
            self.ledger.free(request.own, request.owner)
            self.pages.release(request.pages[: request.shared])
            self.note(request.rid, None, "freed", f"{len(request.pages)} pages")
        self.gone(request)

    def gone(self, request: Scheduled) -> None:
        for kind in ("deadline", "queue", "progress", "drain"):
            self.timers.clear((kind, request.rid))
        self._ranks.forget(request.rid)
        del self.requests[request.rid]

    def _quarantine(self, request: Scheduled) -> None:
        self.ledger.shift(request.own, request.owner, Page.DRAINING, Page.QUARANTINED)
        request.page_state = Page.QUARANTINED
        text = f"request {request.rid}: {len(request.own)} pages quarantined, its load has not ended"
        if reader := self.pull.readers.get(request.rid):
            at = ", ".join(f"{kind} at {here}" for here, kind in reader.gates if (here, kind) not in reader.quiet)
            text = f"{text}: grant {reader.grant} of prefill {reader.handle.instance}, by {at}"
        self.alarm(text)

    def _operator_release(self, grant: GrantNo) -> None:
        reader = self.pull.reader_of(grant)
        request = self.requests.get(reader.rid) if reader else None
        if reader is None or request is None or request.page_state is not Page.QUARANTINED:
            self.count("late", "operator_release")
            return
        reader.apply(LE.OPERATOR_RELEASE)
        self.free(request, "released by an operator, unproven")

    # --- audit ------------------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        return super().audit() + self.pages.audit(self._heads())

    def audit_all(self) -> list[str]:
        return super().audit_all() + self.pages.audit_all(self._heads())

    def _heads(self) -> list[tuple[PageId, ...]]:
        waiting = [request.pages[: request.shared] for request in self.requests.values()]
        return waiting + [tuple(head) for head in self.batch.heads]
