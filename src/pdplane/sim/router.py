"""The simulated router: core/attempts.py for every request, with both legs, aborts, retries and loads around it.

In the params dialect the legs leave in turn, decode's with what prefill has answered (handles.py).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

import msgspec

from pdplane.core.attempts import (
    DECODE,
    HANDOFF,
    PREFILL,
    Break,
    Choose,
    Done,
    Effects,
    EndLeg,
    Failure,
    Finish,
    Forward,
    Open,
    OpenLeg,
    Release,
    ReleaseHold,
    Reply,
    RequestAttempts,
    Side,
)
from pdplane.core.effects import AnswerHeld
from pdplane.core.errors import Cause, bad_request, client_left, deadline, unavailable
from pdplane.core.events import (
    Cancel,
    HandleRefused,
    LegRefused,
)
from pdplane.core.events import ReleaseHold as LetGo
from pdplane.core.ids import Rid, Room
from pdplane.core.layout import PARAMS

from .checkers import Violation
from .content import Work
from .drawn import Plan, Request
from .handles import answered, lost_hold, tampered
from .legs import Client, Leg, Worker, event_of, prompt_id, prompt_of, work_of
from .plan import mint_room

PREFILL_DRAIN_S = 15.0
AGAIN_S = (0.01, 12.0)


class World(Protocol):
    now: float
    rng: Random
    plan: Plan
    works: dict[Rid, Work]

    def at(self, when: float, do: Callable[[], None]) -> None: ...

    def uniform(self, low: float, high: float) -> float: ...

    def process(self, name: str) -> Worker: ...

    def say(self, who: str, text: str) -> None: ...


class SimRouter:
    """`load` by worker name: legs that are counted now. `under_way`: legs that no worker has seen yet."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._plan = world.plan
        self._turn = 0
        self._legs: dict[Rid, Leg] = {}
        self._serials = 0
        self.load = dict.fromkeys(self._plan.names, 0)
        self.clients: dict[int, Client] = {}
        self.over_since: dict[Rid, float] = {}
        self.attempts = self.under_way = 0

    @property
    def all_done(self) -> bool:
        return len(self.clients) == len(self._plan.requests) and all(client.done for client in self.clients.values())

    # --- clients ----------------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        world = self._world
        client = Client(request, RequestAttempts(self._plan.retries), world.now)
        self.clients[request.number] = client
        self._choose(client, frozenset())
        if request.leaves_after_s is not None:
            world.at(world.now + request.leaves_after_s, lambda: self._cancel(client, client_left("router")))
        late = deadline("router", request.deadline_s)
        world.at(world.now + request.deadline_s + 0.5, lambda: self._cancel(client, late))

    def _cancel(self, client: Client, cause: Cause) -> None:
        self._carry(client, client.machine.cancel(cause))

    # --- what workers say -------------------------------------------------------------------------------------------

    def first_byte(self, rid: Rid) -> None:
        self._hear(rid, lambda leg: leg.client.machine.decode_first_byte(leg.attempt))

    def finished(self, rid: Rid) -> None:
        """The leg's 2xx answer is complete."""

        def done(leg: Leg) -> Effects:
            machine = leg.client.machine
            if leg.side == DECODE:
                self._replay(leg, "ended")
            return machine.prefill_done(leg.attempt) if leg.side == PREFILL else machine.decode_done(leg.attempt)

        self._hear(rid, done)

    def refused(self, rid: Rid, cause: Cause) -> None:
        blames = cause.side if cause.side in (PREFILL, DECODE) else ""
        failure = Failure(cause=cause, blames=blames)
        if self._legs[rid].handle is not None:
            failure = lost_hold(cause) or failure
        self._hear(rid, lambda leg: self._failed(leg, failure))

    def held(self, who: Worker, answer: AnswerHeld) -> None:
        """Prefill's leg is answered: it holds the prompt's KV."""
        work = self._world.works[answer.rid]

        def done(leg: Leg) -> Effects:
            client = leg.client
            client.handle = answered(who, answer, prompt_id(work.prompt, work.prompt_tokens), self._plan)
            client.lease_ends = self._world.now + answer.lease_s
            return client.machine.prefill_done(leg.attempt, held=True)

        self._hear(answer.rid, done)

    def worker_died(self, worker: Worker) -> None:
        for rid, leg in list(self._legs.items()):
            if leg.worker is worker and leg.arrived:
                self._unreachable(rid, leg)

    def _unreachable(self, rid: Rid, leg: Leg) -> None:
        cause = unavailable("worker_gone", f"{leg.worker.name} closed the connection", side=leg.side, status=502)
        self._hear(rid, lambda leg: self._failed(leg, Failure(cause=cause, answered=False)))

    def _failed(self, leg: Leg, failure: Failure) -> Effects:
        machine = leg.client.machine
        if leg.side == PREFILL:
            return machine.prefill_failed(leg.attempt, failure)
        return machine.decode_failed(leg.attempt, failure)

    def _hear(self, rid: Rid, tell: Callable[[Leg], Effects]) -> None:
        """An answer crosses the network, in order per leg; of a leg that the router has closed, nothing does."""
        world, leg = self._world, self._legs[rid]
        leg.heard_at = due = max(leg.heard_at, world.now + world.uniform(*self._plan.hop_s))

        def heard() -> None:
            if not leg.closed and not leg.again:
                self._carry(leg.client, tell(leg))

        world.at(due, heard)

    # --- effects ----------------------------------------------------------------------------------------------------

    def _carry(self, client: Client, effects: Effects) -> None:
        for effect in effects:
            self._world.say(f"r{client.request.number}", _line(effect))
            match effect:
                case Choose(excluded):
                    self._choose(client, excluded)
                case Open(attempt):
                    self._open(client, attempt)
                case OpenLeg(side, attempt):
                    self._open_in_turn(client, side, attempt)
                case ReleaseHold(cause):
                    self._release_hold(client, cause)
                case EndLeg(side, cause):
                    self._end(client.legs[side], cause)
                case Release(side):
                    self.load[client.legs[side].worker.name] -= 1
                case Finish(cause):
                    self._finish(client, cause)
                case Reply() | Break():
                    self._reply(client)
                case Done():
                    if client.done:
                        raise Violation("verdict", f"request {client.request.number} is done twice")
                    client.done = True
                case Forward():
                    pass

    def _choose(self, client: Client, excluded: frozenset[str]) -> None:
        self._turn += 1
        prefills = [name for name in self._plan.prefills if name not in excluded]
        decodes = [name for name in self._plan.decodes if name not in excluded]
        machine = client.machine
        alone = [name for name in self._plan.aggregated if name not in excluded]
        if not (alone if client.request.aggregated else prefills and decodes):
            cause = unavailable("not_ready", "no whole pair is left", side="router")
            self._carry(client, machine.no_pair(cause))
            return
        if client.request.aggregated:
            self._carry(client, machine.pair_chosen(None, alone[0]))
            return
        pair = prefills[self._turn % len(prefills)], decodes[self._turn // 2 % len(decodes)]
        self._carry(client, machine.pair_chosen(*pair, in_turn=self._plan.dialect == PARAMS))

    def _open(self, client: Client, attempt: int) -> None:
        self._begin(client)
        for side in (PREFILL, DECODE) if client.machine.prefill is not None else (DECODE,):
            self._open_leg(client, side, attempt)

    def _open_in_turn(self, client: Client, side: Side, attempt: int) -> None:
        if side == PREFILL:
            self._begin(client)
        leg = self._open_leg(client, side, attempt)
        if side == DECODE and client.handle is not None:
            leg.handle = tampered(client.handle, client.request.tampers, prompt_of(leg))
            self._replay(leg, "sent")

    def _begin(self, client: Client) -> None:
        """Of an attempt."""
        self.attempts += 1
        self._serials += 1
        client.serial, client.handle = self._serials, None
        client.room = self._room(client)

    def _open_leg(self, client: Client, side: Side, attempt: int) -> Leg:
        request, machine, world = client.request, client.machine, self._world
        name = machine.prefill if side == PREFILL else machine.decode
        assert name is not None
        assert client.room is not None
        self.load[name] += 1
        rid = Rid(f"r{request.number}.0.{attempt}" + ("p" if side == PREFILL else "d"))
        leg = Leg(client, attempt, side, rid, client.room, world.process(name), request.refused_at == side)
        client.legs[side] = leg
        self._send(leg, request.prefill_delay_s if side == PREFILL else request.decode_delay_s)
        return leg

    def _replay(self, leg: Leg, when: str) -> None:
        """Somebody presents this leg's handle once more, to whichever decode."""
        request, world = leg.client.request, self._world
        if leg.handle is None or request.replays != when or leg.again:
            return
        names = self._plan.decodes
        worker = world.process(names[int(world.rng.random() * len(names))])
        rid = Rid(f"{leg.rid[:-1]}+d")
        again = Leg(leg.client, leg.attempt, DECODE, rid, leg.room, worker, False, handle=leg.handle, again=True)
        self._send(again, request.replay_delay_s)

    def _release_hold(self, client: Client, cause: Cause) -> None:
        """By the public call, at whoever is at prefill's address."""
        world, leg = self._world, client.legs[PREFILL]
        if self._plan.router_tells:
            name, rid = leg.worker.name, leg.rid
            world.at(world.now + world.uniform(*self._plan.hop_s), lambda: world.process(name).post(LetGo(rid, cause)))

    def _room(self, client: Client) -> Room:
        """Where prefills are ranks of one group, a room that is its rank's modulo their number."""
        request, machine = client.request, client.machine
        size, rank = self._plan.shape_of(PREFILL).dp, self._plan.dp_of(machine.prefill or "")
        other = self.clients.get(request.room_of) if request.room_of is not None else None
        if other is not None and other.room is not None and machine.attempt == 0 and other.room % size == rank:
            return other.room
        room = mint_room(self._world.rng)
        return Room(room + (rank - room) % size)

    def _send(self, leg: Leg, delay_s: float) -> None:
        world = self._world
        self._legs[leg.rid] = leg
        leg.client.rids.append(leg.rid)
        self.under_way += 1
        world.works[leg.rid] = work_of(leg, self._plan)
        world.at(world.now + delay_s + world.uniform(*self._plan.hop_s), lambda: self._arrived(leg))

    def _arrived(self, leg: Leg) -> None:
        """At the worker's HTTP edge; `closed` meanwhile means that the close comes right behind it."""
        self.under_way -= 1
        if self._too_late(leg):
            return
        leg.sent = True
        if leg.worker is not self._world.process(leg.worker.name):
            leg.worker = self._world.process(leg.worker.name)
        if not leg.worker.alive:
            self._unreachable(leg.rid, leg)
            return
        if leg.closed and leg.client.request.number % 2:
            return  # the router had not even connected
        leg.arrived = True
        if leg.refused_at_edge:
            cause = bad_request("the edge turns this leg away", side=leg.side)
            if leg.handle is not None:
                leg.worker.post(HandleRefused(leg.handle, cause))
            elif leg.side == PREFILL and self._plan.dialect != PARAMS:
                leg.worker.post(LegRefused(room=leg.room, cause=cause))
            self.refused(leg.rid, cause)
            return
        leg.worker.post(event_of(leg, self._plan, self._world.works[leg.rid], self._world.now))
        if leg.closed:
            self._tell_close(leg)

    def _too_late(self, leg: Leg) -> bool:
        """Too little is left of the lease: it is not sent at all."""
        margin_s, client = self._plan.lease_margin_s, leg.client
        if not margin_s or leg.handle is None or leg.again or client.lease_ends - self._world.now >= margin_s:
            return False
        if not leg.closed:
            cause = Cause("lease_too_short", "too little is left of the lease", 503, retryable=True, side=PREFILL)
            self._carry(client, client.machine.decode_failed(leg.attempt, Failure(cause=cause, blames=HANDOFF)))
        return True

    def _end(self, leg: Leg, cause: Cause) -> None:
        """Close and abort call, which may overtake each other; a router that tells nobody does neither."""
        leg.closed = True
        if not self._plan.router_tells or not leg.sent or leg.refused_at_edge:
            return
        world, worker = self._world, leg.worker
        world.at(world.now + world.uniform(*self._plan.hop_s), lambda: worker.post(Cancel(leg.rid, cause)))
        self._tell_close(leg)
        if self._plan.aborts_again:
            world.at(world.now + world.uniform(*AGAIN_S), lambda: worker.post(Cancel(leg.rid, cause)))

    def _tell_close(self, leg: Leg) -> None:
        if self._plan.router_tells:
            world, worker = self._world, leg.worker
            cause = Cause("peer_leg_closed", "the router closed this leg", 499, side=leg.side)
            world.at(world.now + world.uniform(*self._plan.hop_s), lambda: worker.post(Cancel(leg.rid, cause)))

    def _reply(self, client: Client) -> None:
        if client.replied:
            raise Violation("verdict", f"request {client.request.number} is answered twice")
        client.replied = True

    def _finish(self, client: Client, cause: Cause | None) -> None:
        world = self._world
        if client.finished_at is not None:
            raise Violation("verdict", f"request {client.request.number} has two verdicts")
        client.finished_at, client.verdict = world.now, cause
        if not client.request.tampers:  # whose hold nobody finds before its lease ends
            self.over_since |= dict.fromkeys(client.rids, world.now)
        if not client.machine.over:
            world.at(world.now + PREFILL_DRAIN_S, lambda: self._carry(client, client.machine.drain_limit()))


def _line(effect: msgspec.Struct) -> str:
    shown = []
    for name in effect.__struct_fields__:
        value = getattr(effect, name)
        if isinstance(value, frozenset):
            value = sorted(value)
        elif isinstance(value, Failure):
            value = value.cause
        shown.append(f"{name}={value}")
    return " ".join([type(effect).__name__, *shown])
