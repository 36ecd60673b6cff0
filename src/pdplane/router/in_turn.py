"""One attempt of a pair whose legs leave in turn: their names and bodies, and what prefill holds between the two."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from pdplane.core.attempts import HANDOFF, PREFILL, Failure
from pdplane.core.errors import Cause
from pdplane.core.ids import Rid
from pdplane.wire.body import NOT_JSON

from .body import Body
from .legs import params as dialect
from .legs.params import CHAT, Handoff
from .records import HandoffRecord
from .worker import Worker

if TYPE_CHECKING:
    from .routing import Router

STRICT = "strict"


class InTurn:
    """`rids` are prefill's and decode's, fresh; `rank`: of prefill, where it has several. `handoff` is None until
    prefill has answered, and stays so where it handed nothing over."""

    __slots__ = ("_ask_ids", "_body", "_chat", "_lease_ends", "_named", "_router", "handoff", "record", "rids")

    def __init__(self, router: Router, body: Body, path: str, rids: tuple[Rid, Rid], rank: int | None) -> None:
        self._router = router
        self._body = body
        self._chat = path == CHAT
        self._ask_ids = router.backend.hands_over_ids and dialect.takes_ids(body, chat=self._chat)
        self._named: tuple[dialect.Fields, dialect.Fields] = ({}, {})
        if router.backend.names_in_body:
            ranked = {} if rank is None else {"routed_dp_rank": _raw(rank)}
            self._named = ({"rid": _raw(rids[0]), **ranked}, {"rid": _raw(rids[1])})
        self._lease_ends = 0.0
        self.handoff: Handoff | None = None
        self.rids = rids
        self.record = HandoffRecord(*rids)

    @property
    def held(self) -> bool:
        """Whether prefill keeps something by its answer."""
        return self.handoff is not None

    def rid(self, side: str) -> Rid:
        return self.rids[0] if side == PREFILL else self.rids[1]

    def prefill_leg(self) -> tuple[Rid, bytes]:
        """(id, body)."""
        return self.rids[0], dialect.for_prefill(self._body, self._named[0], ask_ids=self._ask_ids)

    def decode_leg(self, now: float) -> tuple[Rid, bytes]:
        """(id, body): with what prefill has answered."""
        self.record.decode_opened = now
        if self.handoff is not None:
            self.record.lease_left_s = self._lease_ends - now
        return self.rids[1], dialect.for_decode(self._body, self._named[1], self.handoff, chat=self._chat)

    def answered(self, body: bytes) -> Failure | None:
        """Prefill's 2xx answer; why decode's leg cannot leave with it, or None where it can."""
        router, now = self._router, monotonic()
        self.record.answered = now
        try:
            self.handoff = handoff = dialect.read_handoff(body, router.config.vllm_lease_s)
        except (*NOT_JSON, ValueError) as error:
            message = f"prefill's answer is no hand-off: {error}"
            return Failure(cause=Cause("upstream_garbled", message, 502, retryable=True, side=PREFILL))
        if handoff is None:
            router.metrics.handoffs["none"] += 1
            return Failure(cause=_NO_HANDOFF) if router.config.mode == STRICT else None
        self._lease_ends = now + handoff.lease_s
        record = self.record
        record.request_id, record.hold, record.lease_s = handoff.request_id, handoff.number, handoff.lease_s
        too_late = self.too_late(now)
        router.metrics.handoffs["too_late" if too_late else "answered"] += 1
        return Failure(cause=too_late, blames=HANDOFF) if too_late else None

    def too_late(self, now: float | None = None) -> Cause | None:
        """Why decode's leg is not to be sent any more: too little of the lease is left for it to fetch the KV."""
        margin_s, left_s = self._router.config.lease_margin_s, self._lease_ends - (monotonic() if now is None else now)
        if self.handoff is None or left_s >= margin_s:
            return None
        message = (
            f"{max(left_s, 0.0):.3g} s are left of prefill's lease, under the margin of {margin_s:g} s; "
            "give prefill a longer lease, or the router a smaller --lease-margin-s"
        )
        return Cause("lease_too_short", message, 503, retryable=True, side=PREFILL)

    def release(self, prefill: Worker, cause: Cause, headers: bytes) -> None:
        """Decode will not take what prefill holds. `headers`: the client's authorization, as a line."""
        assert self.handoff is not None
        self.record.release_cause = cause.code
        self._router.guard.release(prefill, self.handoff.request_id, self.record, headers)


_NO_HANDOFF = Cause(
    "no_handoff",
    "prefill answered without kv_transfer_params, so decode has nothing to fetch; start prefill with a KV connector "
    "(--dialect params), or the router with --mode fallback, where decode computes such prompts itself",
    502,
    retryable=True,
    side=PREFILL,
)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
