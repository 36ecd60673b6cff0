"""A whole fleet of the production core under one seed: one heap of virtual-time events, one source of chance."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from pdplane.core.decode import DecodeNode
from pdplane.core.effects import Effect
from pdplane.core.errors import Cause, unavailable
from pdplane.core.events import (
    ControlEndpoint,
    Drain,
    Event,
    FrameIn,
    OperatorRelease,
    Released,
    RouteFailed,
    RouteKnown,
)
from pdplane.core.frames import Drained, Row, Success
from pdplane.core.ids import GrantNo, Instance, PageId, Rank, Rid, Seat
from pdplane.core.receiver import Receiver
from pdplane.transport.memory import Batch, MemoryFabric

from .checkers import Ends, Pages, Violation, at_rest, conservation
from .engine import Work
from .faults import (
    Crash,
    DrainWorker,
    Fault,
    Freeze,
    LostMoves,
    Partition,
    RegistryDown,
    SessionLoss,
    SlowLink,
    SlowTransfer,
    StrayFrame,
)
from .network import Network
from .plan import Plan
from .process import Process
from .router import SimRouter
from .trace import Trace

MOVE_S = (0.0005, 0.02)
STALL_S = (5.0, 45.0)  # a move over a cut link is given up after so long; at prefill it drains meanwhile
SAME_INSTANT = 20_000  # events at one instant: something feeds itself
REST_S = 45.0  # drain limit, row's time and grace, with room to spare


class SimWorld:
    """One run. `run` raises Violation; an exception out of the core is the core's."""

    def __init__(self, plan: Plan, trace: Trace) -> None:
        self.plan = plan
        self.trace = trace
        self.now = 0.0
        self.rng = Random(f"run {plan.seed}")
        self.events = 0
        self.works: dict[Rid, Work] = {}
        self.network = Network(self, plan.delay_s)
        self.fabric = MemoryFabric(auto=False, fence=plan.fence)
        self.pages = Pages(fence=plan.fence)
        self.ends = Ends(plan)
        self.processes: dict[str, Process] = {}
        self.every_process: list[Process] = []
        self._lives: dict[str, int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._registry_down: set[str] = set()
        self._slow_moves: dict[str, float] = {}
        self._haunting: list[Batch] = []  # ghosts whose time is set
        self._strays: dict[str, list[StrayFrame]] = {}
        self._last_fault_s = 0.0
        for name in (*plan.prefills, *plan.decodes):
            self._start(name)
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
            self.at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        self.at(1.0, self._watch)
        latest = max(request.at_s + request.prefill_delay_s + request.decode_delay_s for request in self.plan.requests)
        bound = max(latest, self._last_fault_s) + 130.0 + self.plan.trouble_s
        self._until(self._all_over, bound)
        if not self.router.all_done:
            self._name_the_hanging(bound)
        rest = self.now + REST_S + (60.0 if self.fabric.pending else 0.0)
        self._until(lambda: self.now >= rest, rest)
        self._check_rest()
        self._check_release()

    def _all_over(self) -> bool:
        return self.now >= self._last_fault_s and self.router.all_done and self.ends.running == 0

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
            if cause is None and request.breaks_at == "prefill":
                raise Violation("verdict", f"{what} was answered, though no engine ever computed it")
            if cause is None and request.breaks_at == "decode" and min(request.max_new, request.stops_at) > 1:
                raise Violation("verdict", f"{what} was answered, though its engine failed")

    # --- processes --------------------------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        return self.processes[name]

    def _start(self, name: str) -> None:
        life = self._lives[name] = self._lives.get(name, 0) + 1
        limits = self.plan.prefill_limits if name in self.plan.prefills else self.plan.decode_limits
        step = self.plan.prefill_step if name in self.plan.prefills else 1.0
        self.processes[name] = process = Process(self, name, life, limits, fence=self.plan.fence, step=step)
        self.every_process.append(process)
        self.say(f"{name}#{life}", "starts")

    def before(self, who: Process, event: Event) -> None:
        self.ends.event(who, event, self.now)
        if isinstance(event, Released):
            self.pages.released(who, event.rid)
            if who.side == "decode" and not self.ends.ended(who, event.rid) and not event.error:
                self.ends.end(who, event.rid, self.now, failed=False)
                self.router.finished(event.rid)

    def effect(self, who: Process, effect: Effect) -> None:
        self.pages.effect(who, effect, self.fabric.pending)
        self.ends.effect(who, effect, self.now)

    def after(self, who: Process, event: Event, effects: Sequence[Effect]) -> None:
        self.trace.handled(self.now, who.instance, event, effects)
        if effects:
            conservation(who)
        if strays := self._strays.get(who.name):
            self._stray(who, strays)

    def first_byte(self, who: Process, rid: Rid) -> None:
        self.router.first_byte(rid)

    def finished(self, who: Process, rid: Rid) -> None:
        self.router.finished(rid)

    def refused(self, who: Process, rid: Rid, cause: Cause) -> None:
        self.router.refused(rid, cause)

    def foreign_tag(self, who: Process, where: str, work: Work, page: PageId, index: int) -> None:
        text = f"{who.instance}: page {page}, which is page {index} of {work.rid}, carries another's tag"
        raise Violation("O3" if where == "decode starts" else "O4", f"{where}: {text}")

    def look_up(self, who: Process, address: str) -> None:
        name = address.partition(":")[0]

        def answered() -> None:
            there = self.process(name)
            if name in self._registry_down or not there.running:
                cause = unavailable("registry_unreachable", f"registry {address} does not answer", side="decode")
                who.post(RouteFailed(address, cause))
            else:
                who.post(RouteKnown(address, ((Rank(), ControlEndpoint(name, 1)),)))

        self.at(self.now + self.uniform(0.0005, 0.01), answered)

    # --- moves ------------------------------------------------------------------------------------------------------

    def posted(self, who: Process) -> None:
        """A batch is on its way: it begins, and later arrives."""
        if not self.fabric.pending or self.fabric.pending[-1].src != who.instance:
            return
        batch = self.fabric.pending[-1]
        delay = self.uniform(*MOVE_S) + self._slow_moves.get(who.name, 0.0)
        self.at(self.now + delay * self.rng.random(), lambda: self._begin(batch))
        self.at(self.now + delay, lambda: self._deliver(batch, who, self.now + self.uniform(*STALL_S)))

    def _index(self, batch: Batch) -> int | None:
        return next((i for i, other in enumerate(self.fabric.pending) if other is batch), None)

    def _begin(self, batch: Batch) -> None:
        if (index := self._index(batch)) is not None:
            self.fabric.begin(index)

    def _deliver(self, batch: Batch, who: Process, give_up_at: float) -> None:
        index = self._index(batch)
        if index is None or batch.ghost is not None:  # a ghost has a time of its own
            return
        target = self.processes[str(batch.dst).partition("#")[0]]
        if self._stalled(who, target):
            if self.now < give_up_at:
                self.at(self.now + 0.25, lambda: self._deliver(batch, who, give_up_at))
            elif not who.frozen:
                self.fabric.drop(index)
            else:
                self.at(self.now + 1.0, lambda: self._deliver(batch, who, give_up_at))
            return
        self._land(batch, index, target)

    def _stalled(self, who: Process, target: Process) -> bool:
        """A one-sided fabric needs neither process to run."""
        cut = self.network.is_cut(who.name, target.name) or self.network.is_cut(target.name, who.name)
        return cut or (self.plan.fence and (who.frozen or target.frozen))

    def _land(self, batch: Batch, index: int, target: Process) -> None:
        alive = target.alive and target.instance == batch.dst
        before = target.landing.table.discarded.total() if alive else 0
        tags = self._tags(batch)
        self.fabric.deliver(index)
        placed = alive and (not self.plan.fence or target.landing.table.discarded.total() == before)
        ghost = " (ghost)" if batch.ghost is not None else ""
        what = "lands" if placed else "is discarded"
        self.say(batch.src, f"move {batch.number} of grant {batch.grant} {what}{ghost}")
        if placed:
            self.pages.landed(batch, tags, self.works)

    def _tags(self, batch: Batch) -> Sequence[bytes]:
        """What the batch carries: a ghost its own copy, any other what its pages hold now."""
        if batch.ghost is not None:
            return batch.ghost
        source = self.processes[str(batch.src).partition("#")[0]]
        assert source.instance == batch.src
        return [bytes(source.pool.page(pair.src)) for pair in batch.pairs]

    def tear_down(self, who: Process, peer: Instance) -> None:
        """A one-sided fabric flushes what it has begun: each write lands now, or never. With a fence at the other end,
        what has left may still arrive."""
        mine = [batch for batch in self.fabric.pending if batch.src == who.instance and batch.dst == peer]
        for batch in mine if not self.plan.fence else ():
            index = self._index(batch)
            assert index is not None
            if self.rng.random() < 0.5:
                self._land(batch, index, self.processes[str(peer).partition("#")[0]])
            else:
                self.fabric.drop(index, "torn down")
        who.mover.teardown(peer)
        self._haunt(5.0, who.instance)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.say("fault", repr(fault))
        match fault:
            case Crash():
                self._crash(fault)
            case Freeze(process=name, for_s=for_s):
                self._freeze(self.process(name), for_s)
            case Partition(src=src, dst=dst, both=both):
                ways = [(src, dst), (dst, src)] if both else [(src, dst)]
                for way in ways:
                    self.network.cut(*way)
                    self.at(self.now + fault.for_s, lambda way=way: self.network.heal(*way))  # type: ignore[misc]
            case SessionLoss(prefill=prefill, decode=decode):
                self.network.break_between(prefill, decode)
            case SlowLink(src=src, dst=dst, extra_s=extra_s):
                self.network.slow(src, dst, extra_s)
                self.at(self.now + fault.for_s, lambda: self.network.slow(src, dst, 0.0))
            case SlowTransfer(process=name, extra_s=extra_s):
                self._slow_moves[name] = extra_s
                self.at(self.now + fault.for_s, lambda: self._slow_moves.update({name: 0.0}))
            case LostMoves(process=name):
                self._lose_moves(self.process(name))
            case RegistryDown(process=name):
                self._registry_down.add(name)
                self.at(self.now + fault.for_s, lambda: self._registry_down.discard(name))
            case StrayFrame(decode=name):
                self._strays.setdefault(name, []).append(fault)
            case DrainWorker(process=name):
                self.process(name).post(Drain())

    def _crash(self, fault: Crash) -> None:
        process = self.process(fault.process)
        if not process.alive:
            return
        self.fabric.crash(process.instance, keep=fault.ghosts)
        self._haunt(fault.ghost_within_s, process.instance)
        self.network.process_died(process)
        process.die()
        self.pages.forget(process.instance)
        self.ends.died(process, self.now)
        self.router.worker_died(process)
        self.at(self.now + fault.restart_after_s, lambda: self._start(fault.process))

    def _haunt(self, within_s: float, src: Instance) -> None:
        """Every ghost of this instance that has no time yet gets one."""
        for batch in self.fabric.pending:
            if batch.src == src and batch.ghost is not None and batch not in self._haunting:
                self._haunting.append(batch)
                self.at(self.now + self.uniform(0.0, within_s), lambda batch=batch: self._ghost(batch))  # type: ignore[misc]

    def _ghost(self, batch: Batch) -> None:
        self._haunting.remove(batch)
        if (index := self._index(batch)) is not None:
            self._land(batch, index, self.processes[str(batch.dst).partition("#")[0]])

    def _freeze(self, process: Process, for_s: float) -> None:
        if process.frozen or not process.alive:
            return
        process.frozen = True
        process.at(self.now + for_s, process.thaw)

    def _lose_moves(self, process: Process) -> None:
        for index in reversed(range(len(self.fabric.pending))):
            batch = self.fabric.pending[index]
            if batch.src == process.instance and batch.ghost is None:
                if self.rng.random() < 0.5:
                    self.fabric.drop(index)
                else:
                    process.unsure.add(batch.number)

    def _stray(self, who: Process, strays: list[StrayFrame]) -> None:
        """A frame that no honest session carries: right room, wrong grant or wrong process."""
        node = who.node
        assert isinstance(node, DecodeNode)
        waiting = [receiver for receiver in node.rooms.live.values() if receiver.pages and receiver.holders]
        rooms = [receiver for receiver in waiting if receiver.state == "Draining" or strays[0].kind == "success"]
        if not rooms:
            return
        receiver = rooms[int(self.rng.random() * len(rooms))]
        seat = receiver.seats[0]
        conn = node.members.conn(seat)
        if conn is None:
            return
        fault = strays.pop(0)
        seat_and_grant = (seat, GrantNo(receiver.grant + 1000))
        if fault.wrong == "instance":
            seat_and_grant = (Seat(Instance(f"{seat.instance} before"), seat.rank), receiver.grant)
        frame = _stray_frame(fault.kind, receiver, node.instance, *seat_and_grant)
        who.at(self.now + self.uniform(0.0, 0.001), lambda: who.post(FrameIn(conn, frame)))


def _stray_frame(kind: str, receiver: Receiver, to: Instance, seat: Seat, grant: GrantNo) -> Drained | Success:
    room, prompt = receiver.room, receiver.leg.prompt
    if kind == "drained":
        return Drained(room=room, grant=grant, src=seat.instance, dst=to, rank=seat.rank)
    row = Row(first_token=9, prompt_tokens=prompt.tokens, prompt_digest=prompt.digest)
    return Success(room=room, grant=grant, src=seat.instance, dst=to, rank=seat.rank, row=row)
