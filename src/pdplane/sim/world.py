"""A whole fleet of the production core under one seed: one heap of virtual-time events, one source of chance."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from pdplane.core.effects import AnswerHeld, Count, Effect, SendFrame
from pdplane.core.errors import Cause
from pdplane.core.events import Computed, Event, LegArrived, OperatorRelease, Released, Retracted
from pdplane.core.frames import Beat, Success
from pdplane.core.ids import Instance, PageId, Rid, Room
from pdplane.core.layout import PARAMS
from pdplane.core.params.leases import RENEWALS
from pdplane.core.rooms.decode import DecodeNode

from .checkers import Pages, Violation, Watched
from .content import Work
from .coverage import Reached, tally
from .drawn import Plan, Request
from .ends import Ends, Waits
from .faults import WEIGHTS
from .gates import Gates
from .hold_rules import HoldRules
from .moves import Moves
from .network import Network
from .process import Process
from .registries import Registries
from .rest import at_rest, conservation, starved_s
from .router import SimRouter
from .striker import Striker
from .trace import Trace

SAME_INSTANT = 20_000  # events at one instant: something feeds itself
_EXCUSED = """
client_left deadline overloaded bad_request context_length_exceeded engine_error duplicate_room prompt_mismatch
rank_contradiction no_such_rank hold_expired no_leg no_decode peer_leg_closed
"""
EXCUSED = frozenset(_EXCUSED.split())  # ends that clients, legs that are late or do not fit, and full pools lead to
MEETING_FRAMES = 5  # until a renewal has come: a dial, HELLO, WELCOME, RENEW
BEGINS = ("decode starts", "the prompt is gone on with", "an answer leaves")
REST_S = 45.0  # drain limit, row's time and grace, with room to spare


class SimWorld:
    """One run. `run` raises Violation; an exception out of the core is the core's."""

    def __init__(self, plan: Plan, trace: Trace, reached: Reached | None = None) -> None:
        self.plan = plan
        self.trace = trace
        self._reached = reached
        self.now = 0.0
        self.rng = Random(f"run {plan.seed}")
        self.events = 0
        self.works: dict[Rid, Work] = {}
        self.network = Network(self, plan.delay_s)
        self.params = plan.dialect == PARAMS
        self.pages = Pages(self.works, fence=plan.fence, ranks=plan.tp[0], confirms=self.params)
        self.hold_rules = HoldRules(plan, self.pages)
        self.gates = Gates(self.works, self._gate_opens, self._answered)
        self.ends = Ends(plan)
        self.waits = Waits(plan)
        self.moves = Moves(self)
        self.fabric = self.moves.fabric
        self.registries = Registries(self)
        self.striker = Striker(self)
        self.processes: dict[str, Process] = {}
        self.every_process: list[Process] = []
        self._lives: dict[str, int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._last_fault_s = 0.0
        for name in plan.names:
            self.start(name)
        self.router = SimRouter(self)

    # --- time and chance --------------------------------------------------------------------------------------------

    def at(self, when: float, do: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, do))

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def choice(self, options: tuple[float, ...]) -> float:
        return options[int(self.rng.random() * len(options))]

    def say(self, who: str, text: str) -> None:
        self.trace.say(self.now, who, text)

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Requests and faults happen, everything ends, and the fleet comes to rest."""
        for request in self.plan.requests:
            self.at(request.at_s, lambda request=request: self.router.arrive(request))  # type: ignore[misc]
        for fault in self.plan.faults:
            self._last_fault_s = max(self._last_fault_s, fault.at_s + getattr(fault, "for_s", 0.0))
            self.at(fault.at_s, lambda fault=fault: self.striker.strike(fault))  # type: ignore[misc]
        self.at(1.0, self._watch)
        latest = max(request.at_s + request.prefill_delay_s + request.decode_delay_s for request in self.plan.requests)
        bound = max(latest, self._last_fault_s) + 130.0 + self.plan.trouble_s + starved_s(self.plan)
        self._until(self._all_over, bound)
        if not self.router.all_done:
            self._name_the_hanging(bound)
        rest = self.now + REST_S + (60.0 if self.fabric.pending else 0.0)
        self._until(lambda: self.now >= rest, rest)
        self._check_rest()
        self._check_release()

    def _all_over(self) -> bool:
        over = self.router.all_done and not self.router.under_way and self.ends.running == 0
        return over and self.now >= self._last_fault_s

    def _until(self, over: Callable[[], bool], bound: float) -> None:
        same = 0
        while self._heap and not over() and self.now <= bound:
            when, _, do = heapq.heappop(self._heap)
            same = same + 1 if when == self.now else 0
            if same > SAME_INSTANT:
                raise Violation("livelock", f"{same} events at {when:.6f} s")
            self.now = when
            self.events += 1
            do()

    def _name_the_hanging(self, bound: float) -> None:
        hanging = [str(n) for n, client in self.router.clients.items() if not client.done]
        raise Violation("end", f"requests {', '.join(hanging)} have not ended within {bound:.0f} s")

    def _watch(self) -> None:
        self.ends.crossed(self.now)
        self.waits.bounded(self.now)
        if self.params:
            self.hold_rules.bounded(self.now)
            self.hold_rules.given_back(self.now, self.processes.values(), self.router.over_since)
        self.at(self.now + 1.0, self._watch)

    def _check_rest(self) -> None:
        self.ends.all_over()
        for name, load in self.router.load.items():
            if load:
                raise Violation("load", f"the router still counts {load} on {name}")
        if self.fabric.pending:
            raise Violation("rest", f"{len(self.fabric.pending)} moves are still under way")
        for process in self.processes.values():
            if process.alive:
                at_rest(process, self.plan)
                if process.engine.jobs:
                    raise Violation("rest", f"{process.instance}'s engine still has {list(process.engine.jobs)}")
        self._check_verdicts()

    def _check_release(self) -> None:
        """What is quarantined now can be given back by an operator, and then nothing is missing."""
        for process in self.processes.values():
            if process.alive and isinstance(process.node, DecodeNode):
                for receiver in list(process.node.rooms.live.values()):
                    process.post(OperatorRelease(receiver.grant))
                at_rest(process, msgspec.structs.replace(self.plan, faults=()))

    def _check_verdicts(self) -> None:
        for client in self.router.clients.values():
            cause, request = client.verdict, client.request
            what = f"request {request.number}"
            if self.plan.patterns == ("calm",) and cause is not None:
                raise Violation("calm", f"{what} failed in calm: {cause}")
            if cause is not None and cause.code == "engine_error" and not request.breaks_at:
                raise Violation("verdict", f"{what} ended by {cause}")
            excused = EXCUSED | self._excused_by_handle(request) if self.params else EXCUSED
            if cause is not None and not self.plan.faults and cause.code not in excused:
                raise Violation("verdict", f"{what} ended by {cause}, and nothing had happened")
            if cause is not None and cause.code == "incompatible" and client.arrived_at >= self.plan.unfit_until_s:
                raise Violation("verdict", f"{what} ended by {cause}, though all workers serve the same")
            if cause is None and request.impossible and not request.tampers:  # it may have needed nothing of its handle
                raise Violation("agreement", f"{what} was answered, though its legs did not fit each other")
            if cause is None and request.breaks_at == "prefill" and not request.aggregated:
                raise Violation("verdict", f"{what} was answered, though no engine ever computed it")
            if cause is None and request.breaks_at == "decode" and min(request.max_new, request.stops_at) > 1:
                raise Violation("verdict", f"{what} was answered, though its engine failed")

    def _excused_by_handle(self, request: Request) -> frozenset[str]:
        """What may end a request of the params dialect besides."""
        codes = {"spent"} if request.replays else {"invalid_params", "unknown_hold"} if request.tampers else set()
        if request.tampers == "instance":
            codes.add("wrong_instance")
        if self._outlasts_lease(request):
            codes |= {"expired", "lease_too_short", "spent"}
        if any(other.tampers == "hold" for other in self.plan.requests):
            codes.add("spent")  # another one is after its hold
        return frozenset(codes)

    def _outlasts_lease(self, request: Request) -> bool:
        """Whether a lease may end before decode's first renewal of it, without any fault. After that none does."""
        plan, lease_s = self.plan, self.plan.prefill_limits.hold_term_s
        meeting_s = 2 * plan.hop_s[1] + MEETING_FRAMES * plan.delay_s[1] + lease_s / RENEWALS
        return request.decode_delay_s + meeting_s + plan.lease_margin_s > lease_s

    # --- processes --------------------------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        return self.processes[name]

    def start(self, name: str, weights: str = WEIGHTS) -> None:
        life = self._lives[name] = self._lives.get(name, 0) + 1
        limits = self.plan.limits_of(name)
        step = self.plan.prefill_step if name in self.plan.prefills else 1.0
        self.processes[name] = process = Process(self, name, life, limits, step, weights)
        self.every_process.append(process)
        self.say(f"{name}#{life}", "starts")

    def before(self, who: Process, event: Event) -> None:
        self.ends.event(who, event, self.now)
        self.waits.event(who, event)
        if self.params:
            self.hold_rules.event(who, event, self.now)
        if isinstance(event, LegArrived) and who.side == "prefill":
            self.registries.taken(event.room, who.dp)
        if isinstance(event, Computed) and who.side == "aggregated":
            self.router.first_byte(event.rid)
        if isinstance(event, Retracted):
            self.pages.retracted(who, event.rid)
        if isinstance(event, Released):
            self.pages.released(who, event.rid)
        if self.params and who.side == "decode":
            self.gates.event(who, event)
        elif isinstance(event, Released) and who.side != "prefill" and not event.error:
            self._let_go(who, event.rid)

    def _let_go(self, who: Watched, rid: Rid) -> None:
        """The engine has come to the end by itself, unless the leg was answered before."""
        if not self.ends.ended(who, rid):
            self._answered(who, rid)

    def _gate_opens(self, who: Watched, rid: Rid) -> None:
        self.router.first_byte(rid)

    def _answered(self, who: Watched, rid: Rid) -> None:
        self.ends.end(who, rid, self.now, failed=False)
        self.router.finished(rid)

    def effect(self, who: Process, effect: Effect) -> None:
        self.pages.effect(who, effect, self.fabric.pending)
        self.ends.effect(who, effect, self.now)
        self.waits.effect(who, effect, self.now)
        if self.params:
            self.hold_rules.effect(who, effect, self.now)
            if who.side == "decode":
                self.gates.effect(who, effect)
        if isinstance(effect, SendFrame) and isinstance(effect.frame, Success) and effect.conn in who.conns:
            self.pages.success(who, effect.frame, who.conns[effect.conn].here)

    def after(self, who: Process, event: Event, effects: Sequence[Effect]) -> None:
        self.trace.handled(self.now, who.instance, event, effects)
        if self._reached is not None:
            tally(self._reached, event, effects)
        if any(_moves_pages(effect) for effect in effects):
            conservation(who)
        self.striker.look(who)

    def first_byte(self, who: Process, rid: Rid) -> None:
        self.router.first_byte(rid)

    def finished(self, who: Process, rid: Rid) -> None:
        self.router.finished(rid)

    def refused(self, who: Process, rid: Rid, cause: Cause) -> None:
        self.router.refused(rid, cause)

    def held(self, who: Process, answer: AnswerHeld) -> None:
        self.router.held(who, answer)

    def foreign_tag(self, who: Process, where: str, work: Work, page: PageId, index: int) -> None:
        text = f"{who.instance}: page {page}, which is page {index} of {work.rid}, carries another's tag"
        raise Violation("O3" if where in BEGINS else "O4", f"{where}: {text}")

    def short_restore(self, who: Process, work: Work, needed: int, given: int) -> None:
        text = f"{who.instance}: {work.rid} comes back to {given} pages, its copy fills {needed}"
        raise Violation("restore", text)

    def look_up(self, who: Process, address: str) -> None:
        self.registries.look_up(who, address)

    def look_up_rank(self, who: Process, address: str, room: Room) -> None:
        self.registries.look_up_rank(who, address, room)

    def posted(self, who: Process) -> None:
        self.moves.posted(who)

    def tear_down(self, who: Process, peer: Instance) -> None:
        self.moves.tear_down(who, peer)


def _moves_pages(effect: Effect) -> bool:
    """Not beats and counts, which are most of a run: a machine says more than these where a page changes hands."""
    return not isinstance(effect, Count) and not (isinstance(effect, SendFrame) and isinstance(effect.frame, Beat))
