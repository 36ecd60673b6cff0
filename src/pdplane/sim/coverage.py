"""What runs have reached: cells of the state tables, and the rarer things that a fleet does.

A cell that no plan reaches is a rule that nobody has tried. Cells that honest sessions cannot bring about stand in
BEYOND, each with its reason; the table keeps them, since a peer need not be honest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from pdplane.core.effects import (
    AnswerHeld,
    ArmGrant,
    Count,
    Effect,
    FinishEngine,
    RestoreEngine,
    RetractEngine,
    RunDecode,
    RunPrefill,
    RunWhole,
    SendFrame,
    Ungate,
)
from pdplane.core.errors import Cause
from pdplane.core.events import Event, RankKnown, TornDown
from pdplane.core.frames import Abort, Announce, Confirmed, Frame, Grant, Read, ReadFailed, Ready, Renewed
from pdplane.core.ids import Link
from pdplane.core.layout import PARAMS, ROOMS
from pdplane.core.params.holder import Asked, Holder
from pdplane.core.params.reader import Reader
from pdplane.core.params.table import HE, HOLDER, LE, READER, H, L
from pdplane.core.rooms.book import Tombstone
from pdplane.core.rooms.receiver import Receiver
from pdplane.core.rooms.reception import FromDecode, Reception
from pdplane.core.rooms.sender import Sender
from pdplane.core.rooms.table import RE, RECEIVER, SE, SENDER, R, S

_LATE_ANNOUNCE = "ANNOUNCE is never said after a GRANT of the same room, and a session keeps order"
_NO_READY = "decode grants when every rank has said READY, and a rank that computes has not"
_NOT_MOVED = "CONFIRM follows pages that prefill has brought, and it brings them to its one consumer"
_SAID_AGAIN = "a READ is said again as it was, and fits as it did"
BEYOND: dict[str, str] = {
    "prefill Armed/announce": _LATE_ANNOUNCE,
    "prefill Streaming/announce": _LATE_ANNOUNCE,
    "prefill Flushing/announce": _LATE_ANNOUNCE,
    "prefill Sent/announce": _LATE_ANNOUNCE,
    "prefill Ahead/grant": _NO_READY,
    "prefill Ahead/grant for one link of several": _NO_READY,
    "prefill Draining/grant for one link of several": "pages drain once every link has its GRANT, or without any",
    "holder Held/confirm, another consumer": _NOT_MOVED,
    "holder Bound/confirm, another consumer": _NOT_MOVED,
    "holder Released/confirm, another consumer": _NOT_MOVED,
    "holder Revoked/confirm, another consumer": _NOT_MOVED,
    "holder Bound/read, of another prompt or other pages": _SAID_AGAIN,
    "reader Draining/operator_release": "decode's own fence closes by itself, long before anybody looks",
}
"""Unreached by construction."""

ROOMS_COUNTS = (
    "retracts",
    "restores",
    "cut by quarantine",
    "shared prefixes",
    "decode hits",
    "full hits",
    "READY",
    "RankKnown",
    "peer gone",
    "teardown proofs",
    "duplicate rooms",
    "aggregated",
    "handed off",
)
FOREIGN = "foreign bytes"
PARAMS_COUNTS = (
    "held",
    "read",
    "confirmed",
    "denied",
    "expired",
    "spent",
    "renewals",
    "not renewed",
    "gated",
    "let out",
    "served by cache",
    "recomputed",
    FOREIGN,
    "shared prefixes",
    "retracts",
    "peer gone",
)
"""FOREIGN: pages of a load in which another's bytes have landed, from a source that was given back meanwhile."""
COUNTS = {ROOMS: ROOMS_COUNTS, PARAMS: PARAMS_COUNTS}
Reached = Counter[str]


def cells(dialects: Collection[str] = tuple(COUNTS)) -> list[str]:
    """All of the tables of these dialects, as they are named here."""
    named: list[str] = []
    if ROOMS in dialects:
        named += [_cell("decode", *cell) for cell in RECEIVER] + [_cell("prefill", *cell) for cell in SENDER]
    if PARAMS in dialects:
        named += [_cell("holder", *cell) for cell in HOLDER] + [_cell("reader", *cell) for cell in READER]
    return named


def unreached(reached: Reached, dialects: Collection[str] = tuple(COUNTS)) -> list[str]:
    """Cells that are in the tables and were not tried, those of BEYOND left out."""
    return [cell for cell in cells(dialects) if not reached[cell] and cell not in BEYOND]


def _cell(side: str, state: R | S | H | L, event: RE | SE | HE | LE) -> str:
    return f"{side} {state}/{event}"


def tally(reached: Reached, event: Event, effects: Sequence[Effect]) -> None:
    """Counts of COUNTS, by what came and what was asked for."""
    if isinstance(event, TornDown):
        reached["teardown proofs"] += 1
    elif isinstance(event, RankKnown) and event.dp_rank is not None:
        reached["RankKnown"] += 1
    for effect in effects:
        for what in (_counted(effect), _counted_of_holds(effect)):
            if what:
                reached[what] += 1


def _counted(effect: Effect) -> str:
    match effect:
        case RetractEngine():
            return "retracts"
        case RestoreEngine():
            return "restores"
        case FinishEngine():
            return "cut by quarantine"
        case RunPrefill(cached_tokens=cached) if cached:
            return "shared prefixes"
        case ArmGrant(pages=pages, shared=shared) if shared:
            return "decode hits" if pages else "full hits"
        case SendFrame(frame=Ready()):
            return "READY"
        case Count("peer_gone"):
            return "peer gone"
        case Count("duplicate_room"):
            return "duplicate rooms"
        case RunWhole():
            return "aggregated"
        case RunDecode():
            return "handed off"
        case _:
            return ""


def _counted_of_holds(effect: Effect) -> str:
    match effect:
        case AnswerHeld():
            return "held"
        case Ungate():
            return "let out"
        case RunWhole(gated=True):
            return "gated"
        case RunWhole(shared=shared) if shared:
            return "served by cache"
        case SendFrame(frame=Read()):
            return "read"
        case SendFrame(frame=Confirmed(refusal=None)):
            return "confirmed"
        case SendFrame(frame=Confirmed()):
            return "denied"
        case SendFrame(frame=ReadFailed(cause=cause)) if cause.code in ("expired", "spent"):
            return cause.code
        case SendFrame(frame=Renewed(holds=holds)):
            return "renewals" if holds else "not renewed"
        case Count("recompute"):
            return "recomputed"
        case _:
            return ""


@contextmanager
def watching(reached: Reached) -> Iterator[None]:
    """Counts the cells that machines go through meanwhile, and those of rooms whose tombstone answers for them."""
    receive, send, bury = Receiver.apply, Sender.apply, Reception.over
    hold, read = Holder.apply, Reader.apply

    def received(self: Receiver, event: RE, *, cause: Cause | None = None, link: Link | None = None) -> None:
        if (self.state, event) in RECEIVER:
            reached[_cell("decode", self.state, event)] += 1
        receive(self, event, cause=cause, link=link)

    def sent(self: Sender, event: SE, *, cause: Cause | None = None, link: Link | None = None) -> None:
        if (self.state, event) in SENDER:
            reached[_cell("prefill", self.state, event)] += 1
        send(self, event, cause=cause, link=link)

    def buried(self: Reception, link: Link, frame: FromDecode, stone: Tombstone) -> None:
        if event := _asked(frame):
            reached[_cell("prefill", S.GONE, event)] += 1
        bury(self, link, frame, stone)

    def held(
        self: Holder, event: HE, *, cause: Cause | None = None, link: Link | None = None, frame: Asked | None = None
    ) -> None:
        if (self.state, event) in HOLDER:
            reached[_cell("holder", self.state, event)] += 1
        hold(self, event, cause=cause, link=link, frame=frame)

    def reading(self: Reader, event: LE, *, cause: Cause | None = None, link: Link | None = None) -> None:
        if (self.state, event) in READER:
            reached[_cell("reader", self.state, event)] += 1
        read(self, event, cause=cause, link=link)

    with (
        patch.object(Holder, "apply", held),
        patch.object(Reader, "apply", reading),
        patch.object(Receiver, "apply", received),
        patch.object(Sender, "apply", sent),
        patch.object(Reception, "over", buried),
    ):
        yield


def _asked(frame: Frame) -> SE | None:
    match frame:
        case Announce():
            return SE.ANNOUNCE
        case Grant(links=links):
            return SE.GRANT_PART if len(links) > 1 else SE.GRANT
        case Abort():
            return SE.ABORT
        case _:
            return None


ByPattern = dict[tuple[str, str], Reached]
"""By dialect and pattern."""


def report(by_pattern: ByPattern) -> list[str]:
    """Lines for a person: what each pattern has reached, and what nobody has."""
    total: Reached = Counter()
    for reached in by_pattern.values():
        total.update(reached)
    lines = [line for dialect in COUNTS for line in _table(dialect, by_pattern)]
    spoken = {dialect for dialect, _ in by_pattern}
    every = cells(spoken)
    tried, beyond = sum(bool(total[cell]) for cell in every), sum(cell in BEYOND for cell in every)
    lines.append(f"{tried} of {len(every)} cells reached, {beyond} cannot be by honest sessions")
    lines += [f"  never: {cell}" for cell in unreached(total, spoken)]
    rare = [f"{cell} {total[cell]}" for cell in every if 0 < total[cell] < 5]
    return [*lines, *([f"  rare: {', '.join(rare)}"] if rare else [])]


def _table(dialect: str, by_pattern: ByPattern) -> list[str]:
    rows = sorted((name, reached) for (spoken, name), reached in by_pattern.items() if spoken == dialect)
    if not rows:
        return []
    counts, every = COUNTS[dialect], cells((dialect,))
    lines = [f"{dialect:<16} {'cells':>9}  " + "  ".join(counts)]
    for name, reached in rows:
        shown = "  ".join(f"{reached[count]:>{len(count)}}" for count in counts)
        lines.append(f"{name:<16} {sum(bool(reached[cell]) for cell in every):>9}  {shown}")
    return lines
