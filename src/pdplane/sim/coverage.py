"""What runs have reached: cells of the state table, and the rarer things that a fleet does.

A cell that no plan reaches is a rule that nobody has tried. Cells that honest sessions cannot bring about stand in
BEYOND, each with its reason; the table keeps them, since a peer need not be honest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from pdplane.core.effects import (
    Count,
    Effect,
    FinishEngine,
    RestoreEngine,
    RetractEngine,
    RunDecode,
    RunPrefill,
    RunWhole,
    SendFrame,
)
from pdplane.core.errors import Cause
from pdplane.core.events import Event, RankKnown, TornDown
from pdplane.core.frames import Abort, Announce, Frame, Grant, Ready
from pdplane.core.ids import Link
from pdplane.core.receiver import Receiver
from pdplane.core.reception import FromDecode, Reception
from pdplane.core.rooms import Tombstone
from pdplane.core.sender import Sender
from pdplane.core.table import RE, RECEIVER, SE, SENDER, R, S

_LATE_ANNOUNCE = "ANNOUNCE is never said after a GRANT of the same room, and a session keeps order"
_NO_READY = "decode grants when every rank has said READY, and a rank that computes has not"
BEYOND: dict[str, str] = {
    "prefill Armed/announce": _LATE_ANNOUNCE,
    "prefill Streaming/announce": _LATE_ANNOUNCE,
    "prefill Flushing/announce": _LATE_ANNOUNCE,
    "prefill Sent/announce": _LATE_ANNOUNCE,
    "prefill Ahead/grant": _NO_READY,
    "prefill Ahead/grant for one link of several": _NO_READY,
    "prefill Draining/grant for one link of several": "pages drain once every link has its GRANT, or without any",
}
"""Unreached by construction."""

COUNTS = (
    "retracts",
    "restores",
    "cut by quarantine",
    "shared prefixes",
    "READY",
    "RankKnown",
    "peer gone",
    "teardown proofs",
    "duplicate rooms",
    "aggregated",
    "handed off",
)
Reached = Counter[str]


def cells() -> list[str]:
    """All of the table's, as they are named here."""
    return [_cell("decode", *cell) for cell in RECEIVER] + [_cell("prefill", *cell) for cell in SENDER]


def unreached(reached: Reached) -> list[str]:
    """Cells that are in the table and were not tried, those of BEYOND left out."""
    return [cell for cell in cells() if not reached[cell] and cell not in BEYOND]


def _cell(side: str, state: R | S, event: RE | SE) -> str:
    return f"{side} {state}/{event}"


def tally(reached: Reached, event: Event, effects: Sequence[Effect]) -> None:
    """Counts of COUNTS, by what came and what was asked for."""
    if isinstance(event, TornDown):
        reached["teardown proofs"] += 1
    elif isinstance(event, RankKnown) and event.dp_rank is not None:
        reached["RankKnown"] += 1
    for effect in effects:
        if what := _counted(effect):
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


@contextmanager
def watching(reached: Reached) -> Iterator[None]:
    """Counts the cells that machines go through meanwhile, and those of rooms whose tombstone answers for them."""
    receive, send, bury = Receiver.apply, Sender.apply, Reception.over

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

    with (
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


def report(by_pattern: dict[str, Reached]) -> list[str]:
    """Lines for a person: what each pattern has reached, and what nobody has."""
    total: Reached = Counter()
    lines = [f"{'':<16} {'cells':>9}  " + "  ".join(COUNTS)]
    every = cells()
    for name, reached in sorted(by_pattern.items()):
        total.update(reached)
        shown = "  ".join(f"{reached[count]:>{len(count)}}" for count in COUNTS)
        lines.append(f"{name:<16} {sum(bool(reached[cell]) for cell in every):>9}  {shown}")
    missing = unreached(total)
    tried = sum(bool(total[cell]) for cell in every)
    lines.append(f"{tried} of {len(every)} cells reached, {len(BEYOND)} cannot be by honest sessions")
    lines += [f"  never: {cell}" for cell in missing]
    rare = [f"{cell} {total[cell]}" for cell in every if 0 < total[cell] < 5]
    return [*lines, *([f"  rare: {', '.join(rare)}"] if rare else [])]
