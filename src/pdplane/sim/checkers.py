"""What must hold in every run. Kept apart from the core: nothing here asks a machine, a table or the ledger's owner
map what it believes. The checkers watch events and effects go by, the fabric's bytes, and the clock.

O1  no write lands that no grant named.            O2  no page is handed out while somebody holds it.
O3  decode starts on, and goes on with, its own pages alone.
O4  no page is handed out while an older write can land in it, and no write lands outside its grant's life.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from pdplane.core.decode import DecodeNode
from pdplane.core.effects import (
    AnswerFailed,
    AnswerRow,
    ArmGrant,
    DisarmGrant,
    Effect,
    ExtendPages,
    Note,
    RunDecode,
    RunPrefill,
)
from pdplane.core.events import Event, LegArrived
from pdplane.core.ids import GrantNo, Instance, PageId, Rid, Room
from pdplane.core.pages import Page
from pdplane.core.prefill import PrefillNode
from pdplane.core.receiver import Receiver
from pdplane.core.sender import Sender
from pdplane.transport.memory import Batch

from .engine import Work
from .plan import Plan


class Violation(Exception):
    """A rule does not hold. `rule` is its short name."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Watched(Protocol):
    """A process as the checkers see it."""

    instance: Instance
    side: str
    alive: bool
    node: DecodeNode | PrefillNode


class Hold(msgspec.Struct):
    """Somebody holds a page. `grant` 0: not under a grant (engine growth, prefill). `closed`: no write is due any
    more."""

    rid: Rid
    grant: GrantNo
    closed: bool = False


class Pages:
    """Who holds which page of which instance, by what effects and events said."""

    def __init__(self, *, fence: bool) -> None:
        self._fence = fence
        self._held: dict[Instance, dict[PageId, Hold]] = {}
        self._armed: dict[tuple[Instance, GrantNo], tuple[PageId, ...]] = {}
        self._granting: dict[Instance, Rid] = {}
        self._taken: set[Rid] = set()  # as complete, by decode

    def forget(self, instance: Instance) -> None:
        self._held.pop(instance, None)

    def effect(self, who: Watched, effect: Effect, pending: Sequence[Batch]) -> None:
        me = who.instance
        match effect:
            case Note(rid, _, state):
                if state == "Granted":
                    self._granting[me] = rid
                elif state == "Success":
                    self._taken.add(rid)
                elif state == "Gone" or (state == "Sent" and who.side == "prefill"):
                    self._release(me, rid)
            case ArmGrant(grant, _, pages):
                self._nothing_can_land(me, pages, pending)
                self._claim(me, pages, Hold(self._granting.pop(me), grant))
                if (me, grant) in self._armed:
                    raise Violation("O2", f"{me} gives grant number {grant} twice")
                self._armed[me, grant] = pages
            case DisarmGrant(grant):
                for page in self._armed.get((me, grant), ()):
                    hold = self._held.get(me, {}).get(page)
                    if hold and hold.grant == grant:
                        hold.closed = True
            case RunDecode(rid, pages):
                self._claim(me, pages, Hold(rid, GrantNo(0)))
            case ExtendPages(rid, pages):
                self._nothing_can_land(me, pages, pending)
                self._claim(me, pages, Hold(rid, GrantNo(0)))
            case RunPrefill(rid, pages):
                self._nothing_reads(me, pages, pending)
                self._claim(me, pages, Hold(rid, GrantNo(0)))
            case _:
                pass

    def released(self, who: Watched, rid: Rid) -> None:
        """The engine has let go. At prefill the writes may still read: those pages end with the room's note."""
        if who.side == "decode":
            self._release(who.instance, rid)

    def landed(self, batch: Batch, tags: Sequence[bytes], works: dict[Rid, Work]) -> None:
        """The bytes of `batch` are in decode's pool."""
        me, grant = batch.dst, batch.grant
        granted = self._armed.get((me, grant))
        if granted is None:
            raise Violation("O1", f"a write under grant {grant}, which {me} never gave, landed in its pool")
        for pair, tag in zip(batch.pairs, tags, strict=True):
            hold = self._held.get(me, {}).get(pair.dst)
            if hold is None:
                raise Violation("O4", f"{me}: a write under grant {grant} landed in page {pair.dst}, which is free")
            if hold.grant != grant:
                owner = f"grant {hold.grant}" if hold.grant else "the engine"
                text = f"{me}: a write under grant {grant} landed in page {pair.dst} of {hold.rid} ({owner})"
                raise Violation("O4", text)
            if hold.closed:
                rule, when = ("O3", "was taken as complete") if hold.rid in self._taken else ("O4", "had given it up")
                raise Violation(rule, f"{me}: a write landed in page {pair.dst} after {hold.rid} {when}")
            work = works[hold.rid]
            index = granted.index(pair.dst)
            if tag != work.tag(index):
                raise Violation("O4", f"{me}: page {pair.dst} of {hold.rid} got what is not its page {index}")

    def _claim(self, me: Instance, pages: Iterable[PageId], hold: Hold) -> None:
        held = self._held.setdefault(me, {})
        for page in pages:
            other = held.get(page)
            if other is not None:
                raise Violation("O2", f"{me} hands page {page} to {hold.rid} while {other.rid} holds it")
            held[page] = Hold(hold.rid, hold.grant)

    def _release(self, me: Instance, rid: Rid) -> None:
        held = self._held.get(me, {})
        for page in [page for page, hold in held.items() if hold.rid == rid]:
            del held[page]

    def _nothing_can_land(self, me: Instance, pages: Iterable[PageId], pending: Sequence[Batch]) -> None:
        """One-sided fabrics: what is posted will land, whatever was revoked. With a fence, landing is watched."""
        if self._fence:
            return
        wanted = set(pages)
        for batch in pending:
            if batch.dst == me and any(pair.dst in wanted for pair in batch.pairs):
                raise Violation("O4", f"{me} hands out pages in which a write of grant {batch.grant} can still land")

    @staticmethod
    def _nothing_reads(me: Instance, pages: Iterable[PageId], pending: Sequence[Batch]) -> None:
        wanted = set(pages)
        for batch in pending:
            if batch.src == me and batch.ghost is None and any(pair.src in wanted for pair in batch.pairs):
                raise Violation("O4", f"{me} hands out pages that move {batch.number} still reads")


class _Leg(msgspec.Struct):
    rid: Rid
    room: Room
    side: str
    instance: Instance
    arrived_at: float
    ended_at: float | None = None
    failed: bool = False


class Ends:
    """Every leg ends once, and when one side of a room has failed, the other one ends soon after."""

    def __init__(self, plan: Plan) -> None:
        prompt = 2.0 if plan.router_tells else 12.0
        longest = max(r.prefill_delay_s + r.decode_delay_s for r in plan.requests)
        self.bound_s = prompt + longest + (0.0 if plan.calm_network else 12.0) + plan.trouble_s
        self._legs: dict[tuple[Instance, Rid], _Leg] = {}
        self._open: dict[str, list[_Leg]] = {}  # by attempt: a rid without its last letter, which names the side
        self._first_use: dict[tuple[Instance, Room], Rid] = {}
        self.running = 0

    def event(self, who: Watched, event: Event, now: float) -> None:
        if isinstance(event, LegArrived):
            self.running += 1
            leg = _Leg(event.rid, event.room, who.side, who.instance, now)
            self._legs[who.instance, event.rid] = leg
            self._open.setdefault(event.rid[:-1], []).append(leg)

    def effect(self, who: Watched, effect: Effect, now: float) -> None:
        match effect:
            case AnswerFailed(rid) | AnswerRow(rid):
                self.end(who, rid, now, failed=isinstance(effect, AnswerFailed))
            case Note(rid, room, state) if state in ("Queued", "Waiting") and room is not None:
                first = self._first_use.setdefault((who.instance, room), rid)
                if first != rid:
                    raise Violation("room", f"{who.instance} takes {rid} for room {room}, which {first} has used")
            case _:
                pass

    def end(self, who: Watched, rid: Rid, now: float, *, failed: bool) -> None:
        leg = self._legs.get((who.instance, rid))
        if leg is None:
            raise Violation("verdict", f"{who.instance} answers {rid}, which it was never asked")
        if leg.ended_at is not None:
            raise Violation("verdict", f"{who.instance} answers {rid} a second time")
        leg.ended_at, leg.failed = now, failed
        self.running -= 1

    def ended(self, who: Watched, rid: Rid) -> bool:
        leg = self._legs.get((who.instance, rid))
        return leg is None or leg.ended_at is not None

    def died(self, who: Watched, now: float) -> None:
        """Its legs end with it, and what they would have said is lost."""
        for leg in self._legs.values():
            if leg.instance == who.instance and leg.ended_at is None:
                leg.ended_at = now
                self.running -= 1

    def crossed(self, now: float) -> None:
        """To be called every second or so."""
        for attempt, legs in list(self._open.items()):
            running = [leg for leg in legs if leg.ended_at is None]
            for leg in running:
                ends = [other.ended_at for other in legs if other.failed and other.side != leg.side]
                since = max(leg.arrived_at, min((end for end in ends if end is not None), default=now))
                if now - since > self.bound_s:
                    text = f"attempt {attempt}: one side failed {now - since:.1f} s ago (bound {self.bound_s:.1f} s)"
                    raise Violation("crossing", f"{text}, and {leg.rid} at {leg.instance} has not ended")
            if not running and all(now - (leg.ended_at or 0.0) > 60.0 for leg in legs):
                del self._open[attempt]

    def all_over(self) -> None:
        for leg in self._legs.values():
            if leg.ended_at is None:
                raise Violation("end", f"{leg.rid} at {leg.instance} never ended")


def conservation(who: Watched) -> None:
    if faults := who.node.audit():
        raise Violation("conservation", f"{who.instance}: {'; '.join(faults)}")


def quarantine_allowed(plan: Plan) -> bool:
    """Only a process that never comes back leaves pages without a proof, and only where there is no local fence."""
    return plan.crashes and not plan.fence


def at_rest(who: Watched, plan: Plan) -> None:
    """Nothing of any request is left on a living process, tombstones apart."""
    node, name = who.node, who.instance
    machines: list[Receiver | Sender] = [*node.rooms.live.values()]
    stuck = [machine for machine in machines if machine.state != "Quarantine"]
    if stuck:
        states = ", ".join(f"room {machine.room} {machine.state}" for machine in stuck)
        raise Violation("rest", f"{name} still has {states}")
    if machines and not quarantine_allowed(plan):
        raise Violation("quarantine", f"{name} keeps {len(machines)} rooms in quarantine, though a proof was to be had")
    for machine in machines:
        if isinstance(machine, Receiver) and not machine.holders:
            raise Violation("quarantine", f"{name}: room {machine.room} is quarantined and names no holder")
    _free_again(node, name, machines)
    if isinstance(node, DecodeNode):
        left = {"claims": len(node.reserve), "running": len(node.batch)}
        if any(left.values()):
            raise Violation("rest", f"{name} keeps {left}")
    timers = [key for key in node.timers.running() if key[0] not in ("sessions", "owed")]  # owed: a tombstone's
    if timers:
        raise Violation("rest", f"{name} has clocks running: {timers}")


def _free_again(node: DecodeNode | PrefillNode, name: str, machines: Sequence[Receiver | Sender]) -> None:
    kept = sum(len(machine.pages) for machine in machines)
    counts = node.ledger.counts
    if counts[Page.QUARANTINED] != kept or counts[Page.FREE] + kept != node.ledger.capacity:
        raise Violation("rest", f"{name} leaks pages: {node.ledger.holders()}")
