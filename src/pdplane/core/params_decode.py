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

import msgspec

from .admission import Demand, demand, queue_full, refuse
from .batch import Batch, Running
from .connector import KVConnector, RankOutputs
from .effects import AnswerFailed, RunWhole, Ungate
from .errors import Cause, bad_request, deadline, duplicate_rid
from .events import (
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
from .ids import GrantNo, Instance, PageId, Rid
from .layout import pages_for
from .node import Limits, Node, TimerKey
from .pages import NOBODY, Owner, Page
from .params_table import LE, RequestStatus
from .prompt_pages import Prompt, PromptPages
from .pull_connector import PullConnector
from .queues import AdmissionQueue
from .reserve import Reserve
from .session import Identity

Status = RequestStatus
REPLAYS = frozenset({"spent", "invalid_params", "prompt_mismatch", "unknown_hold"})
"""Refusals that speak of the request and not of the load: computing the prompt here would hide them."""


class Scheduled(msgspec.Struct, eq=False):
    """One request. While it waits for its place its pages are `granted` in the ledger, the first `shared` of them the
    cache's; once it runs they are the batch's. `tokens`: how many have their KV in the pages, or will have when the
    load is over."""

    arrived: RequestArrived
    since: float
    need: Demand
    prompt: Prompt
    status: RequestStatus = Status.WAITING
    local: bool = False  # it computes its prompt here
    confirmed: bool = True
    pages: tuple[PageId, ...] = ()
    shared: int = 0
    tokens: int = 0
    cause: Cause | None = None  # of a load that failed
    good: int | None = None  # pages of it that are there all the same, where that is known
    restarts: bool = False  # the engine is to let go of it, and it begins anew
    told: bool = False  # the connector knows of its end
    page_state: Page = Page.GRANTED

    @property
    def rid(self) -> Rid:
        return self.arrived.rid

    @property
    def owner(self) -> Owner:
        return Owner(self.arrived.rid)

    @property
    def own(self) -> tuple[PageId, ...]:
        return self.pages[self.shared :]


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
                self._update(self._ranks.add(rank, output))
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
        self._update(self.connector.take_output())
        self.batch.grow()
        self.batch.restore()
        self._harvest()
        for rid in self.connector.take_ready():
            if (request := self.requests.get(rid)) and request.status is Status.WAITING:
                self._ask(request)
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
        if refusal := refuse(self, event.prompt.tokens, self.waiting) or self._unfit(event, handle):
            self.answer_failed(rid, None, refusal)
            if handle:
                self.connector.refused(handle, refusal)
            return
        self.requests[rid] = request = self._scheduled(event)
        self.timers.set(("deadline", rid), event.deadline)
        self.timers.set(("queue", rid), self.now + self.limits.queue_limit_s)
        self.note(rid, None, Status.WAITING)
        self.connector.on_new_request(event)
        self._ask(request)

    def _scheduled(self, event: RequestArrived) -> Scheduled:
        tokens = event.prompt.tokens
        most = (tokens - 1) // self.limits.page_size  # the last token is computed here
        prompt = Prompt(tokens, event.page_keys, most)
        return Scheduled(event, self.now, demand(tokens, event.max_new, self.limits), prompt)

    def _unfit(self, event: RequestArrived, handle: Handle | None) -> Cause | None:
        """The handle is of this very prompt, or nothing is read (rule 2)."""
        if handle is None:
            return None
        ours, theirs = event.prompt, handle.prompt
        if ours != theirs:
            text = (
                f"kv_transfer_params are of another prompt: prefill computed {theirs.digest.hex()} of {theirs.tokens} "
                f"tokens, this request has {ours.digest.hex()} of {ours.tokens}; send both legs the same prompt"
            )
            return bad_request(text, code="prompt_mismatch", param="kv_transfer_params", side=self.side)
        need = pages_for(ours.tokens, self.limits.page_size)
        if len(handle.pages) == need:
            return None
        text = f"remote_block_ids names {len(handle.pages)} pages, and {ours.tokens} tokens have {need}"
        param = "kv_transfer_params.remote_block_ids"
        return bad_request(text, code="invalid_params", param=param, side=self.side)

    def _ask(self, request: Scheduled) -> None:
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
            self._completed(request)
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
            self._completed(request)

    def progressed(self, rid: Rid) -> None:
        """A sign of work on its load."""
        request = self.requests.get(rid)
        if request and request.status is Status.WAITING_FOR_REMOTE_KVS:
            self.timers.set(("progress", rid), self.now + self.limits.progress_limit_s)

    def _completed(self, request: Scheduled) -> None:
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
        arrived, need, tokens = request.arrived, request.need, request.arrived.prompt.tokens
        self.ledger.shift(request.own, request.owner, request.page_state, Page.ACTIVE)
        request.status = Status.RUNNING
        running = Running(
            rid=request.rid,
            room=None,
            owner=request.owner,
            pages=list(request.pages),
            most=need.most,
            tokens=min(request.tokens, tokens - 1),
            arrived_at=request.since,
            priority=arrived.priority,
            prompt=tokens,
            shared=request.shared,
            page_keys=arrived.page_keys,
            whole=request.confirmed,
        )
        run = RunWhole(request.rid, request.pages, need.max_new, request.tokens, request.shared, not request.confirmed)
        self.out.append(run)
        self.batch.start(running, arrived.deadline)
        request.pages, request.shared = (), 0

    # --- what connectors report: in vLLM's order ----------------------------------------------------------------------

    def _update(self, output: KVOutput) -> None:
        self.connector.update_connector_output(output)
        for rid in sorted(output.confirmed - output.failed_recving.keys()):  # sets have no order of their own
            self._confirmed(rid)
        for rid, cause in output.failed_recving.items():
            self._failed(rid, cause)
        if output.invalid_block_ids:
            self._invalid(output.invalid_block_ids)
        for rid in sorted(output.finished_recving):
            self._received(rid)

    def _confirmed(self, rid: Rid) -> None:
        request = self.requests.get(rid)
        if request is None or request.confirmed or request.restarts:
            return
        request.confirmed = True
        if request.status is Status.RUNNING:
            self.batch.proven(rid)
            self.out.append(Ungate(rid))
        elif request.status is Status.FINISHED_STOPPED:
            self.out.append(Ungate(rid))
            self._let_go(request)
            self._gone(request)

    def _failed(self, rid: Rid, cause: Cause) -> None:
        request = self.requests.get(rid)
        if request is None or request.status in (Status.FINISHED_ABORTED, Status.FINISHED_ERROR):
            return
        if request.status is Status.WAITING_FOR_REMOTE_KVS or self._unplaced(request):
            request.cause, request.good = request.cause or cause, 0
        elif request.confirmed:
            self.count("late", "failed_recving")
        else:
            self._refused_late(request, cause)

    @staticmethod
    def _unplaced(request: Scheduled) -> bool:
        """It waits for its load, and has no pages yet."""
        return request.status is Status.WAITING and not request.pages and not request.local

    def _refused_late(self, request: Scheduled, cause: Cause) -> None:
        """All has come, and is not to be trusted. Nothing of the answer has left yet."""
        request.cause = cause
        self.note(request.rid, None, "unconfirmed", str(cause))
        if not self._recomputes(cause):
            self._refuse(request, cause)
        elif request.status is Status.RUNNING:
            request.restarts = True
            self.batch.withdraw(request.rid)
        elif request.status is Status.FINISHED_STOPPED:
            self._begin_anew(request)
        else:  # it waits for its place in the batch, with its pages
            self.count("recompute", cause.code)
            self._compute_from(request, request.shared)

    def _refuse(self, request: Scheduled, cause: Cause) -> None:
        if request.status is Status.RUNNING:
            request.status = Status.FINISHED_ERROR
            self.batch.cancel(request.rid, cause)
        else:
            self._fail(request, cause)

    def _recomputes(self, cause: Cause) -> bool:
        return self.limits.recompute and cause.code not in REPLAYS

    def _invalid(self, pages: set[PageId]) -> None:
        """From the first bad page on nothing is there."""
        hit = False
        for request in self.requests.values():
            bad = next((at for at, page in enumerate(request.pages) if page in pages), None)
            if bad is None or request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            hit = True
            request.good = bad if request.good is None else min(bad, request.good)
            text = f"pages of the prompt from number {bad} on could not be loaded"
            request.cause = request.cause or Cause("kv_load_failed", text, 502, retryable=True, side="prefill")
        if not hit:
            self.count("late", "invalid_block_ids")

    def _received(self, rid: Rid) -> None:
        """The load is over, well or not: nothing of it touches the pages any more."""
        request = self.requests.get(rid)
        if request and request.status is Status.WAITING_FOR_REMOTE_KVS:
            self._loaded(request)
        elif request and request.status.finished and request.pages:
            self._free(request)
        elif request and request.cause and self._unplaced(request):
            self._without_load(request, request.cause)
        else:
            self.count("late", "finished_recving")

    def _without_load(self, request: Scheduled, cause: Cause) -> None:
        """Nothing was reserved for it yet."""
        if self._recomputes(cause):
            self.count("recompute", cause.code)
            self.note(request.rid, None, "recompute", str(cause))
            request.local, request.cause = True, None
            self._ask(request)
        else:
            self._fail(request, cause)

    def _loaded(self, request: Scheduled) -> None:
        cause = request.cause
        request.status = Status.WAITING
        if cause is None:
            self._completed(request)
        elif self._recomputes(cause):
            # What is not confirmed is not trusted, however much of it came.
            good = request.good or 0 if request.confirmed else 0
            self.count("recompute", cause.code)
            self._compute_from(request, max(request.shared, good))
            self._completed(request)
        else:
            self._fail(request, cause)

    def _compute_from(self, request: Scheduled, pages: int) -> None:
        """What is behind its first `pages` pages is computed here."""
        request.tokens = pages * self.limits.page_size
        self.note(request.rid, None, "recompute", f"from token {request.tokens}: {request.cause}")
        request.confirmed, request.local, request.cause = True, True, None

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
            self._let_go(request)
        self.batch.released(rid, error)
        if anew:
            self._begin_anew(request)
        elif waits:
            request.status = Status.FINISHED_STOPPED  # its answer waits for the confirmation
        else:
            self._gone(request)

    def _begin_anew(self, request: Scheduled) -> None:
        """It computes its prompt here, as if it had come without a handle."""
        self.count("recompute", request.cause.code if request.cause else "")
        self.note(request.rid, None, Status.WAITING, f"recompute: {request.cause}")
        request.status, request.local, request.confirmed, request.restarts = Status.WAITING, True, True, False
        request.cause = None
        self.timers.set(("queue", request.rid), self.now + self.limits.queue_limit_s)
        self._ask(request)

    def _cancel(self, rid: Rid, cause: Cause) -> None:
        request = self.requests.get(rid)
        if request is None or request.status in (Status.FINISHED_ABORTED, Status.FINISHED_ERROR):
            self.count("late", "cancel")
        elif request.status is Status.RUNNING:
            request.status = Status.FINISHED_ABORTED
            if request.restarts:  # the engine is letting go of it already
                self.answer_failed(rid, None, cause)
            self.batch.cancel(rid, cause)
            self._let_go(request)
        else:
            self._fail(request, cause)

    def _fail(self, request: Scheduled, cause: Cause) -> None:
        """Its end before it runs, or after: the client is answered now, the pages follow when nothing fills them."""
        request.status = Status.FINISHED_ERROR if request.cause is cause else Status.FINISHED_ABORTED
        self.answer_failed(request.rid, None, cause)
        self._queue.remove(request)
        if request.rid in self._complete:
            del self._complete[request.rid]
        for kind in ("deadline", "queue", "progress"):
            self.timers.clear((kind, request.rid))
        self.reserve.drop(request.owner)
        if self._let_go(request) and request.pages:
            self.ledger.shift(request.own, request.owner, request.page_state, Page.DRAINING)
            request.page_state = Page.DRAINING
            self.timers.set(("drain", request.rid), self.now + self.limits.drain_limit_s)
        else:
            self._free(request)

    def _let_go(self, request: Scheduled) -> bool:
        """The connector hears of the end, once; True while a load of it still runs."""
        if request.told:
            return False
        request.told = True
        return self.connector.request_finished(request.arrived, request.own).delay_free

    def _free(self, request: Scheduled, how: str = "free again") -> None:
        if request.page_state is Page.QUARANTINED:
            self.alarm(f"request {request.rid}: {len(request.own)} quarantined pages are {how}")
        if request.pages:
            self.ledger.free(request.own, request.owner)
            self.pages.release(request.pages[: request.shared])
            self.note(request.rid, None, "freed", f"{len(request.pages)} pages")
        self._gone(request)

    def _gone(self, request: Scheduled) -> None:
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
        self._free(request, "released by an operator, unproven")

    # --- audit ------------------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        return super().audit() + self.pages.audit(self._heads())

    def audit_all(self) -> list[str]:
        return super().audit_all() + self.pages.audit_all(self._heads())

    def _heads(self) -> list[tuple[PageId, ...]]:
        waiting = [request.pages[: request.shared] for request in self.requests.values()]
        return waiting + [tuple(head) for head in self.batch.heads]
