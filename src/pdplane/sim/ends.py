"""When things must be over: every leg ends once, both sides agree on how, and no wait is without end.

A wait is watched from outside, by effects and notes: KV held for decode, a hand-off that is complete, a request that is
laid aside. Each has a bound that the plan implies.
"""

from __future__ import annotations

import msgspec

from pdplane.core.effects import (
    AnswerFailed,
    AnswerHeld,
    AnswerRow,
    Effect,
    FinishEngine,
    Note,
    RestoreEngine,
    RetractEngine,
    RunDecode,
)
from pdplane.core.events import Event, JobArrived, LegArrived, Released, RequestArrived
from pdplane.core.ids import Instance, Rid, Room
from pdplane.core.layout import EARLY, ROOMS

from .checkers import Violation, Watched
from .drawn import Plan
from .engine import CHUNK, STEP_S


class _Leg(msgspec.Struct):
    rid: Rid
    side: str
    instance: Instance
    arrived_at: float
    ended_at: float | None = None
    failed: bool = False
    row: bool = False  # it ended with its row: at prefill, the KV is sent


def _unmasked_s(plan: Plan) -> float:
    """Legs of two attempts that met in one room do not fit, and only the grant shows it: with prefill_complete, when
    the prompt is computed."""
    if plan.policy == EARLY or all(request.room_of is None for request in plan.requests):
        return 0.0
    chunks = sum(-(-request.prompt_tokens // CHUNK) for request in plan.requests)
    return chunks * plan.prefill_step * STEP_S[1]


class Ends:
    """Every leg ends once, and when one side of a room has failed, the other one ends soon after."""

    def __init__(self, plan: Plan) -> None:
        prompt = 2.0 if plan.router_tells else 12.0
        longest = max(r.prefill_delay_s + r.decode_delay_s for r in plan.requests)
        self.bound_s = prompt + longest + (0.0 if plan.calm_network else 12.0) + plan.trouble_s + _unmasked_s(plan)
        self._legs: dict[tuple[Instance, Rid], _Leg] = {}
        self._open: dict[str, list[_Leg]] = {}  # by attempt: a rid without its last letter, which names the side
        self._first_use: dict[tuple[Instance, Room], Rid] = {}
        self.running = 0

    def event(self, who: Watched, event: Event, now: float) -> None:
        if isinstance(event, (LegArrived, JobArrived, RequestArrived)):
            self.running += 1
            leg = _Leg(event.rid, who.side, who.instance, now)
            self._legs[who.instance, event.rid] = leg
            self._open.setdefault(event.rid[:-1], []).append(leg)

    def effect(self, who: Watched, effect: Effect, now: float) -> None:
        match effect:
            case AnswerFailed(rid):
                self.end(who, rid, now, failed=True)
            case AnswerHeld(rid):
                self.end(who, rid, now, failed=False)
            case AnswerRow(rid):
                self.end(who, rid, now, failed=False)
                self._legs[who.instance, rid].row = True
                self._agreed(who, rid)
            case RunDecode(rid):
                self._agreed(who, rid)
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

    def _agreed(self, who: Watched, rid: Rid) -> None:
        """Decode has the request as handed off: so prefill has it as sent."""
        legs = self._open.get(rid[:-1], ())
        if who.side == "decode" and not any(leg.row for leg in legs if leg.side == "prefill"):
            raise Violation("agreement", f"{who.instance} takes {rid} as handed off, and no prefill has sent it")

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


class _Wait(msgspec.Struct, frozen=True):
    what: str
    since: float
    bound_s: float


class Waits:
    """No wait inside a worker is without end; and an answer is cut short only for pages that may never come back."""

    def __init__(self, plan: Plan) -> None:
        """To wait for places and pages may take as long as all answers one after the other; where faults keep pages
        granted or draining, or computing takes long, as long as the limits on those as well."""
        answers = sum(request.max_new for request in plan.requests) * (1 + plan.retries) * STEP_S[1]
        swift = not plan.faults and plan.prefill_step == 1.0
        self._plan = plan
        self._turn_s = 10.0 + answers + plan.trouble_s + (0.0 if swift else 95.0)
        self._held_s = plan.prefill_limits.hold_term_s + 1.0 + plan.trouble_s
        self._waits: dict[tuple[Instance, Rid], _Wait] = {}
        self._quarantined: set[tuple[Instance, Rid]] = set()

    def event(self, who: Watched, event: Event) -> None:
        if isinstance(event, Released):
            self._over(who, event.rid)

    def effect(self, who: Watched, effect: Effect, now: float) -> None:
        match effect:
            case RetractEngine(rid):
                self._waits[who.instance, rid] = _Wait("is laid aside", now, self._turn_s)
            case Note(rid, _, "Success"):
                self._waits[who.instance, rid] = _Wait("is handed off and does not run", now, self._turn_s)
            case Note(rid, _, "Held") if self._plan.dialect == ROOMS:
                self._waits[who.instance, rid] = _Wait("is held", now, self._held_s)
            case Note(rid, _, "Quarantine"):
                self._quarantined.add((who.instance, rid))
            case Note(rid, _, "Flushing" | "Draining" | "Gone" | "freed"):
                self._over(who, rid)
                self._quarantined.discard((who.instance, rid))
            case FinishEngine(rid):
                self._over(who, rid)
                if all(instance != who.instance for instance, _ in self._quarantined):
                    raise Violation("cut", f"{who.instance} cuts {rid} short, and has no page in quarantine")
            case RestoreEngine(rid) | AnswerFailed(rid) | AnswerRow(rid):
                self._over(who, rid)
            case _:
                pass

    def _over(self, who: Watched, rid: Rid) -> None:
        self._waits.pop((who.instance, rid), None)

    def died(self, who: Watched) -> None:
        self._waits = {key: wait for key, wait in self._waits.items() if key[0] != who.instance}

    def bounded(self, now: float) -> None:
        """To be called every second or so."""
        for (instance, rid), wait in self._waits.items():
            if now - wait.since > wait.bound_s:
                text = f"{rid} {wait.what} at {instance} since {wait.since:.1f} s (bound {wait.bound_s:.1f} s)"
                raise Violation("wait", text)
