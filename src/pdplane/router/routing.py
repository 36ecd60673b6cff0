"""What all connections share: the settings, the workers, the exchanges in flight, the counters."""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
from time import monotonic, time
from typing import TYPE_CHECKING

from pdplane.core.attempts import BUSY, HANDOFF, PREFILL, Failure
from pdplane.core.errors import Cause, Refused, bad_request, busy, unavailable

from . import views
from .answers import error_answer
from .backends import Backend
from .backends.named import BACKENDS
from .config import RouterConfig, parse_address
from .driver import Driver
from .exchange import Exchange
from .guard import Guard
from .legs.judged import JudgedDecodeLeg
from .legs.params import HandoffLeg
from .legs.rooms import AggregatedLeg, DecodeLeg, PrefillLeg
from .metrics import Metrics
from .outbox import Outbox
from .pairing import Pair, Pairing
from .policies import POLICIES
from .records import Records, RequestRecord
from .split import Split
from .upstream import Leg
from .worker import PARAMS, Worker

if TYPE_CHECKING:
    from .front import FrontConnection, Incoming

GENERATION = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
DRAINING_CODE, INCOMPATIBLE_CODE = "draining", "incompatible"  # 503s of workers that are no busyness
MAX_BUSY_S = 5
LINGER_S = 2.0

InFlight = Exchange | Split

_LEGS: dict[str, type[Leg]] = {"prefill": PrefillLeg, "decode": DecodeLeg, "aggregated": AggregatedLeg}


class Router:
    """One router. `now` is a coarse monotonic clock, advanced by the sweep; deadlines are as exact as the sweep."""

    def __init__(self, config: RouterConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.loop = loop
        self.now = monotonic()
        self.unix_offset_s = time() - self.now
        self.outbox = Outbox(loop)
        self.metrics = Metrics()
        self.records = Records(config.records)
        self.backend: Backend = BACKENDS[config.backend]()
        self.guard = Guard(self.backend)
        self.pairing = Pairing(
            [Worker(parse_address(url), "prefill") for url in config.prefill],
            [Worker(parse_address(url), "decode") for url in config.decode],
            [Worker(parse_address(url), "aggregated") for url in config.worker],
            POLICIES[config.policy](),
            POLICIES[config.policy](),
            fallback=config.mode == "fallback",
        )
        self.stopping = False
        self._idle = asyncio.Event()
        self.active: dict[str, InFlight] = {}  # verdict still open
        self.draining: set[Driver] = set()  # answered; prefill's leg still open
        self.labels: dict[tuple[bytes, str], list[InFlight]] = {}
        self.fronts: set[FrontConnection] = set()
        self._prefix = f"pd-{secrets.token_hex(4)}-"
        self._counter = 0
        self._full_timeout_line = b"x-request-timeout: %.3f\r\ncontent-length: " % config.request_timeout_s
        self._key = f"Bearer {config.api_key}".encode() if config.api_key else b""

    # --- requests -------------------------------------------------------------------------------------------------

    def handle(self, front: FrontConnection, incoming: Incoming) -> None:
        """Answer one whole request, now or by an exchange."""
        path = incoming.path
        if incoming.refusal is not None:
            self.metrics.answers["unreadable", incoming.refusal.status] += 1
            front.linger(error_answer(incoming.refusal, close=True))
        elif self._key and path not in OPEN_PATHS and not self._authorised(incoming):
            cause = Cause("invalid_api_key", "the API key is missing or wrong; send it as a bearer token", 401)
            self.refuse(front, path, cause)
        elif path in GENERATION and incoming.method == "POST":
            self._generate(front, incoming)
        else:
            status, answer = views.answer(self, incoming, close=not front.keep)
            self.metrics.answers[views.route_of(path), status] += 1
            front.respond(answer)

    def _generate(self, front: FrontConnection, incoming: Incoming) -> None:
        limit = self.config.max_inflight
        if len(self.active) >= limit:
            cause = busy(f"{limit} requests are in flight, the router's limit; try again later", side="router")
            self.refuse(front, incoming.path, cause)
            return
        timeout_s = self.config.request_timeout_s
        if b"x-request-timeout" in incoming.headers:
            try:
                timeout_s = self._timeout(incoming.headers[b"x-request-timeout"])
            except Refused as refused:
                self.refuse(front, incoming.path, refused.cause)
                return
        exchange = Exchange(self, front, incoming, timeout_s)
        front.current = exchange
        exchange.start()

    def refuse(self, front: FrontConnection, path: str, cause: Cause) -> None:
        self.metrics.answers[path if path in GENERATION else "other", cause.status] += 1
        front.respond(error_answer(cause, headers=front.connection_header()))

    def _timeout(self, given: bytes) -> float:
        try:
            timeout_s = float(given)
        except ValueError:
            timeout_s = math.nan
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise Refused(
                bad_request(
                    f"x-request-timeout must be a number of seconds over 0, got {given.decode('latin-1')!r}",
                    code="invalid_value",
                    param="x-request-timeout",
                    side="router",
                )
            )
        return min(timeout_s, self.config.request_timeout_s)

    def timeout_line(self, left_s: float) -> bytes:
        """The header that tells a worker the time left, and the beginning of the next one."""
        if left_s == self.config.request_timeout_s:
            return self._full_timeout_line
        return b"x-request-timeout: %.3f\r\ncontent-length: " % max(left_s, 0.001)

    def _authorised(self, incoming: Incoming) -> bool:
        return hmac.compare_digest(incoming.headers.get(b"authorization", b""), self._key)

    def mint_request_id(self) -> tuple[int, str]:
        """Its number, and the id: unique over routers and restarts by a random prefix."""
        self._counter = number = self._counter + 1
        return number, f"{self._prefix}{number:x}"

    # --- an exchange's life ---------------------------------------------------------------------------------------

    def enter(self, exchange: Exchange, record: RequestRecord) -> None:
        self.active[exchange.request_id] = exchange
        self.records.add(record)

    def replace(self, exchange: Exchange, split: Split) -> None:
        """`split` answers in the place of `exchange`."""
        self.active[exchange.request_id] = split
        split.label = label = exchange.label
        if label is not None:
            self.labels[label] = [split if same is exchange else same for same in self.labels[label]]

    def finished(self, exchange: InFlight, record: RequestRecord) -> None:
        """The verdict is known and answered."""
        del self.active[exchange.request_id]
        metrics, cause = self.metrics, record.cause
        metrics.answers[record.path, record.status] += 1
        metrics.verdicts["ok" if cause is None else cause.code] += 1
        metrics.duration.observe(record.finished - record.received)
        label = exchange.label
        if label is not None:
            same = self.labels[label]
            same.remove(exchange)
            if not same:
                del self.labels[label]
        if self.stopping and not self.active:
            self._idle.set()

    def stopped(self) -> Cause:
        return unavailable("router_stopping", "the router is stopping; send the request again", side="router")

    async def idle(self) -> None:
        """No request is without a verdict (only once `stopping` is set)."""
        if self.active:
            await self._idle.wait()

    def abort(self, rid: str, authorization: bytes) -> int:
        """End the request of this id, or those of exactly this label under the same authorization; how many."""
        found = list(self.labels.get((authorization, rid), ()))
        own = self.active.get(rid)
        if own is not None and own.authorization == authorization and own not in found:
            found.append(own)
        return self._abort(found)

    def abort_all(self, authorization: bytes) -> int:
        return self._abort([e for e in self.active.values() if e.authorization == authorization])

    def _abort(self, exchanges: list[InFlight]) -> int:
        for exchange in exchanges:
            exchange.cancel(Cause("aborted", "the request was aborted by an abort call", 499, side="router"))
        return len(exchanges)

    # --- workers --------------------------------------------------------------------------------------------------

    def leg_class(self, worker: Worker) -> type[Leg]:
        """By which connections to it speak."""
        if worker.role == "prefill" and worker.dialect == PARAMS:
            return HandoffLeg
        if worker.role != "prefill" and self.backend.early_heads:
            return JudgedDecodeLeg
        return _LEGS[worker.role]

    def refused(self, pair: Pair, leg: Leg, status: int, failure: Failure, opened: float) -> None:
        """A worker's error answer to a leg opened at `opened`: what it says of the pair's workers."""
        culprit = pair.of(leg.side if failure.blames in ("", HANDOFF) else failure.blames)
        code = failure.cause.code if status == 503 else ""
        if code == DRAINING_CODE:
            self.drains(culprit, failure.cause.message)
        elif code == INCOMPATIBLE_CODE:
            for worker in filter(None, pair):
                worker.doubt()
        elif status in BUSY:
            self.busy(culprit, failure.cause.retry_after_s or 1)
        elif status < 500:
            leg.worker.succeeded(opened)
            if failure.blames == HANDOFF:
                pair.of(PREFILL).doubt()  # is it still the process that holds what it answered?
        elif status != 504:
            self.blame(culprit, failure.cause, opened)

    def busy(self, worker: Worker, retry_after_s: int) -> None:
        """A worker is full: others are preferred for a moment. It is not ill: no failure is counted."""
        worker.busy(monotonic() + min(retry_after_s, MAX_BUSY_S))

    def drains(self, worker: Worker, why: str) -> None:
        """A worker says itself that it takes nothing new: no pair has it from now on. Its next look decides further."""
        worker.draining = why
        worker.reason = f"draining: {why}"
        self.pairing.refresh()
        worker.doubt()

    def blame(self, worker: Worker, cause: Cause, opened: float) -> None:
        """A failure that is this worker's own, of a leg opened at `opened`. After some in a row it is avoided for a
        while, never for good."""
        worker.failed(opened, cause.message, monotonic(), self.config)
        worker.doubt()

    # --- the sweep --------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Four times a second: deadlines, silent workers, avoided ones, idle and lingering connections."""
        self.now = now = monotonic()
        for exchange in [e for e in self.active.values() if e.deadline <= now]:
            exchange.expired()
        for driver in [d for d in self.draining if d.deadline <= now]:
            driver.expired()
        if any(worker.silent for worker in self.pairing.workers):
            self._end_silent()
        for worker in self.pairing.workers:
            worker.pass_time(now)
            while worker.idle and worker.idle[0].idle_since < now - self.config.idle_s:
                worker.idle.pop(0).discard()
        for front in [f for f in self.fronts if self._overdue(f)]:
            front.close()

    def _end_silent(self) -> None:
        for exchange in list(self.active.values()):
            exchange.end_silent()

    def _overdue(self, front: FrontConnection) -> bool:
        if front.lingering_since:
            return front.lingering_since < self.now - LINGER_S
        return bool(front.reading_since) and front.reading_since < self.now - self.config.read_timeout_s
