"""Chooses a pair: a ready prefill, and a ready decode that may exchange pages with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pdplane.core.attempts import PREFILL
from pdplane.core.errors import Cause, unavailable
from pdplane.core.frames import DataEndpoint
from pdplane.core.layout import misfit
from pdplane.core.session import no_transport

from .policies import Policy
from .worker import PARAMS, Worker

NOBODY: frozenset[str] = frozenset()
DECODE_ONLY = "decode-only"


class Pair(NamedTuple):
    """`prefill` None: `decode` does both, be it an aggregated worker or a decode that needs no hand-off."""

    prefill: Worker | None
    decode: Worker

    @property
    def mode(self) -> str:
        """As the answer's x-pd-mode says it."""
        if self.prefill is not None:
            return "pd"
        return "aggregated" if self.decode.role == "aggregated" else DECODE_ONLY

    @property
    def one_each(self) -> bool:
        """Whether a leg carries one sample."""
        return self.decode.dialect == PARAMS and self.decode.role == "decode"

    def of(self, side: str) -> Worker:
        """The worker of this side, or the one that does both."""
        return self.prefill if side == PREFILL and self.prefill is not None else self.decode


class Pairing:
    """Which workers may serve now; `renew` or `refresh` after any worker changed, `choose` per attempt."""

    def __init__(
        self,
        prefills: Sequence[Worker],
        decodes: Sequence[Worker],
        aggregated: Sequence[Worker],
        prefill_policy: Policy,
        decode_policy: Policy,
        *,
        fallback: bool = False,
    ) -> None:
        self.prefills, self.decodes, self.aggregated = tuple(prefills), tuple(decodes), tuple(aggregated)
        self._prefill_policy, self._decode_policy = prefill_policy, decode_policy
        self._fallback = fallback
        self._alone = fallback or not (prefills or decodes)
        self._ready_prefills: tuple[Worker, ...] = ()
        self._ready_alone: tuple[Worker, ...] = ()
        self._only: Pair | None = None  # where there is but one pair
        self._made_of: list[tuple[object, ...]] = []
        self.refreshes = 0

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.prefills + self.decodes + self.aggregated

    def renew(self) -> None:
        """Refreshes where something that pairs are made by has changed since."""
        if self._facts() != self._made_of:
            self.refresh()

    def _facts(self) -> list[tuple[object, ...]]:
        return [
            (not w.reason, not w.draining, w.instance, w.dialect, w.stamp, w.shape, w.transports, w.names)
            for w in self.workers
        ]

    def refresh(self) -> None:
        self._made_of = self._facts()
        self.refreshes += 1
        ready = [decode for decode in self.decodes if decode.ready]
        for prefill in self.prefills:
            prefill.partners = tuple(d for d in ready if clash(prefill, d) is None) if prefill.ready else ()
        self._ready_prefills = tuple(p for p in self.prefills if p.partners)
        self._ready_alone = tuple(w for w in self.aggregated if w.ready) if self._alone else ()
        if self._fallback and not self._ready_alone:
            self._ready_alone = tuple(decode for decode in ready if decode.dialect == PARAMS)
        pairs = [Pair(p, d) for p in self._ready_prefills for d in p.partners]
        self._only = pairs[0] if len(pairs) == 1 else None

    @property
    def ready(self) -> bool:
        return bool(self._ready_prefills or self._ready_alone)

    def dialect(self) -> str:
        """Of the workers in service: rooms, params, or both, joined by a comma."""
        return ",".join(sorted({worker.dialect for worker in self.workers if worker.ready})) or "unknown"

    def choose(self, excluded: Collection[str] = NOBODY) -> Pair | None:
        if self._only is not None and not excluded:
            return self._only
        prefills = self._ready_prefills
        if excluded:
            prefills = tuple(p for p in prefills if any(d.url not in excluded for d in p.partners))
        prefill = self._prefill_policy.pick(prefills, excluded)
        if prefill is not None:
            decode = self._decode_policy.pick(prefill.partners, excluded)
            if decode is not None:
                return Pair(prefill, decode)
        alone = self._decode_policy.pick(self._ready_alone, excluded)
        return Pair(None, alone) if alone is not None else None

    def missing(self) -> str:
        """What a whole pair lacks, in words that name the workers and their reasons; "" where nothing does."""
        if self.ready:
            return ""
        if not self.workers:
            return "no worker is configured; give --prefill and --decode"
        lacks = []
        groups = {"prefill": self.prefills, "decode": self.decodes}
        if self._alone and not (self.prefills or self.decodes):
            groups = {"aggregated worker": self.aggregated}
        for name, workers in groups.items():
            if not workers:
                lacks.append(f"no {name} is configured; give --{name}")
            elif not any(worker.ready for worker in workers):
                lacks.append(f"no {name} is ready: " + "; ".join(f"{w.url} {w.reason}" for w in workers))
        return ". ".join(lacks) or "no compatible pair: " + "; ".join([*self._clashes(), *self._out()])

    def not_ready(self) -> Cause:
        return unavailable("no_ready_pair", self.missing() or "no worker is left to try", side="router")

    def why_out(self, worker: Worker) -> str:
        """The reason why `worker` takes no part: its own, or that it fits nobody."""
        if worker.reason:
            return worker.reason
        if worker.role == "aggregated":
            return "" if self._alone else "mode is strict and pairs are configured"
        others = [o for o in (self.decodes if worker.role == "prefill" else self.prefills) if o.ready]
        clashes = self.incompatible(worker)
        if len(clashes) < len(others) or not others:
            return ""
        return "incompatible: " + "; ".join(f"with {clash['with']}: {clash['why']}" for clash in clashes)

    def incompatible(self, worker: Worker) -> list[dict[str, str]]:
        """The workers in service that `worker` does not fit, each with both values."""
        if worker.role == "aggregated" or not worker.ready:
            return []
        prefill = worker.role == "prefill"
        others = [o for o in (self.decodes if prefill else self.prefills) if o.ready]
        clashes = ((o, clash(worker, o) if prefill else clash(o, worker)) for o in others)
        return [{"with": other.url, "why": cause.message} for other, cause in clashes if cause is not None]

    def _clashes(self) -> list[str]:
        return [
            f"{p.url} with {d.url}: {cause.message}"
            for p in self.prefills
            for d in self.decodes
            if p.ready and d.ready and (cause := clash(p, d)) is not None
        ]

    def _out(self) -> list[str]:
        return [f"{worker.url} {worker.reason}" for worker in self.prefills + self.decodes if not worker.ready]


def clash(prefill: Worker, decode: Worker) -> Cause | None:
    """Why the two may not pair; None where they may. Two workers without stamps (native engines) are let pair."""
    if prefill.dialect != decode.dialect:
        message = f"{prefill.url} speaks the dialect {prefill.dialect!r}, {decode.url} {decode.dialect!r}"
        return Cause("incompatible", f"{message}; start both with the same --dialect", 503)
    if prefill.stamp is None and decode.stamp is None:
        return _strangers(prefill, decode) if decode.dialect == PARAMS else None
    if prefill.stamp is None or decode.stamp is None:
        silent = prefill if prefill.stamp is None else decode
        return Cause("incompatible", f"{silent.url} tells no layout stamp and the other one does", 503)
    spoken = min(prefill.stamp.protocol_max, decode.stamp.protocol_max)
    unfit = misfit(prefill.stamp, prefill.shape, decode.stamp, decode.shape, spoken)
    return unfit or _apart(prefill.transports, decode.transports)


def _strangers(prefill: Worker, decode: Worker) -> Cause | None:
    """Without stamps names are all that can be compared: a request gives one, and both legs carry it."""
    if not prefill.names or not decode.names or not set(prefill.names).isdisjoint(decode.names):
        return None
    mine, other = (" and ".join(map(repr, worker.names)) for worker in (prefill, decode))
    message = f"{prefill.url} serves {mine}, {decode.url} {other}; start both with the same --served-model-name"
    return Cause("incompatible", message, 503)


def _apart(prefill: object, decode: object) -> Cause | None:
    """Where both say by which kinds pages can move, one must be common. Whether they share a host is theirs to know."""
    if not isinstance(prefill, list) or not isinstance(decode, list) or any(kind in decode for kind in prefill):
        return None
    return no_transport(*([DataEndpoint(str(kind)) for kind in kinds] for kinds in (prefill, decode)))
