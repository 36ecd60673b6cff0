"""Random hands on facing nodes of the params dialect: everything that clients, engines, movers, networks and peers may
do, in any order; and what some should never do, a handle or a frame that lies.
"""

from __future__ import annotations

from random import Random

import msgspec

from pdplane.core.effects import (
    AbortEngine,
    Effect,
    FinishEngine,
    MovePages,
    RunPrefill,
    RunWhole,
)
from pdplane.core.events import (
    Cancel,
    Computed,
    ConnLost,
    Drain,
    Event,
    FrameIn,
    GrantQuiet,
    Handle,
    HandleRefused,
    MoveDone,
    OperatorRelease,
    PagesLanded,
    ReleaseHold,
    Retracted,
    Sampled,
)
from pdplane.core.frames import Confirm, PromptId, Read, Release
from pdplane.core.ids import GrantNo, HoldNo, Instance, Link, MoveNo, Rid
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.core.params.prefill import ParamsPrefillNode

from .facing import PAGE, Box, limits
from .facing_params import Engines, FacingParams, back, cause, pages, request
from .watch_params import Text, Watch

TEXTS = ("abcdefgh", "stuvwxyz")


class ChaosParams:
    """One schedule, by `random`. `more`: for the world."""

    def __init__(self, random: Random, **more: object) -> None:
        self.random = random
        tp = random.choice([(1, 1), (1, 1), (1, 2), (2, 1), (2, 4)])
        self.world = world = FacingParams(
            tp=tp,
            recompute=random.random() < 0.5,
            auto_fence=random.random() < 0.7,
            d_limits=self._limits([5, 6, 16], [1, 2, 16], reserve_tokens=random.choice([0, 512])),
            p_limits=self._limits([6, 32, 32], [1, 4]),
            **more,
        )
        self.engines = Engines(world)
        self.watch = Watch(world)
        self.moved: set[tuple[int, MoveNo]] = set()
        self._number = 0

    def _limits(self, pages: list[int], running: list[int], **more: object) -> object:
        pick = self.random.choice
        return limits(pages=pick(pages), max_running=pick(running), prefix_cache=pick([True, True, False]), **more)

    def run(self, steps: int = 100) -> None:
        usual = [
            self.both,
            self.both,
            self.first,
            self.second,
            self.cancel,
            self.pump,
            self.pump,
            self.frame,
            self.frame,
        ]
        usual += [self.engine, self.engine, self.move, self.move, self.move, self.time, self.rare]
        for _ in range(steps):
            self.random.choice(usual)()
            self.watch.look()
        self.settle()

    def take(self, box: Box, event: Event) -> list[Effect]:
        effects = box.take(event)
        self.watch.look()
        return effects

    # --- hands ------------------------------------------------------------------------------------------------------

    def _arrives(self, box: Box, rid: str, text: Text, **more: object) -> None:
        self.watch.arrivals[rid] = self.watch.arrivals.get(rid, 0) + 1
        self.watch.texts[rid] = text
        keys = text.name if self.random.random() < 0.9 else ""
        deadline = self.world.now + self.random.choice([3.0, 60.0, 60.0, 60.0])
        made = request(rid, text.tokens, text.id.digest, self.world.now, keys=keys, deadline=deadline, **more)
        self.take(box, made)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def first(self) -> None:
        text = Text(self.random.choice(TEXTS), self.random.randint(1, 80))
        self._arrives(self.world.p, f"p{self._next()}", text, max_new=1)

    def both(self) -> None:
        """The usual way, as far as it goes at once."""
        self.first()
        rid = f"p{self._number}"
        for box, run in self.engines.running():
            if run.rid == rid:
                self.take(box, Sampled(rid=run.rid, token=1))
                self.engines.end(box, run.rid)
                self.watch.look()
                self.second()

    def second(self) -> None:
        """Often the newest handle, sometimes one that was used before, sometimes none, sometimes one that lies."""
        box = self.random.choice(self.decodes)
        live = [rid for rid in box.node.requests if rid in self.watch.texts]  # type: ignore[attr-defined]
        handle = self._some_handle()
        text = self._text_of(handle) if handle else Text(self.random.choice(TEXTS), self.random.randint(1, 80))
        if handle and self.random.random() < 0.15:
            handle = self._lying(handle)
        if live and self.random.random() < 0.05:
            self._again(box, self.random.choice(live), handle)
            return
        rid = f"d{self._next()}"
        if handle:
            self.watch.of_rid[rid] = handle
        self._arrives(box, rid, text, handle=handle, max_new=self.random.choice([1, 4, 30]))

    def _some_handle(self) -> Handle | None:
        """Mostly the newest that nobody has presented yet."""
        new = [handle for handle in self.watch.handles if handle not in self.watch.of_rid.values()]
        if not self.watch.handles or self.random.random() < 0.1:
            return None
        return self.random.choice(new[-2:] if new and self.random.random() < 0.85 else self.watch.handles[-4:])

    def _again(self, box: Box, rid: str, handle: Handle | None) -> None:
        text = self.watch.texts[rid]
        self.watch.arrivals[rid] += 1
        self.take(box, request(rid, text.tokens, text.id.digest, self.world.now, handle=handle))

    def _text_of(self, handle: Handle) -> Text:
        name, tokens = handle.prompt.digest.decode().split("/")
        return Text(name, int(tokens))

    def _lying(self, handle: Handle) -> Handle:
        replace = msgspec.structs.replace
        return self.random.choice(
            [
                replace(handle, hold=HoldNo(handle.hold + 100)),
                replace(handle, pages=handle.pages[::-1]),
                replace(handle, pages=handle.pages[1:]),
                replace(handle, prompt=PromptId(b"another", handle.prompt.tokens)),
                replace(handle, instance=Instance("P9")),
                replace(handle, lease_s=0.5),
            ]
        )

    def cancel(self) -> None:
        box = self.random.choice(self.world.boxes)
        rids = list(box.node.requests)  # type: ignore[attr-defined]
        if rids:
            self.take(box, Cancel(self.random.choice(rids), cause("client_left")))

    def pump(self) -> None:
        self.world.pump()

    def frame(self) -> None:
        """The mail of all sessions, but one frame at a time."""
        if self.world.mail:
            item = self.world.mail.popleft()
            if item[0] in self.world.conns:
                self.world._hand_over(*item)

    def engine(self) -> None:
        running = self.engines.running()
        if running:
            box, run = self.random.choice(running)
            if isinstance(run, RunPrefill):
                self._prefills(box, run.rid)
            else:
                self._decodes(box, run)

    def _prefills(self, box: Box, rid: Rid) -> None:
        if not self.engines.aborted(box, rid) or self.random.random() < 0.5:
            self.take(box, Sampled(rid=rid, token=1))
        self.engines.end(box, rid, self.random.choice(["", "", "", "", "", "", "fault"]))
        self.watch.look()

    def _decodes(self, box: Box, run: RunWhole) -> None:
        rid, most = run.rid, self.watch.texts[run.rid].tokens + run.max_new - 1
        running = box.node.batch.running[rid]  # type: ignore[attr-defined]
        aside, leaves = self.engines.aside(box, rid), self.engines.aborted(box, rid)
        if aside and not leaves and running.phase.name == "SPILLING" and self.random.random() < 0.8:
            self.take(box, Retracted(rid=rid, tokens=running.tokens))
            return
        room = min(most, len(running.pages) * PAGE)
        if not aside and not leaves and running.tokens < room and self.random.random() < 0.7:
            self.take(box, Computed(rid=rid, tokens=self.random.randint(running.tokens + 1, room)))
            return
        self._ends(box, run, self.random.choice(["", "", "", "", "", "", "fault"]))

    def _ends(self, box: Box, run: RunWhole, error: str = "") -> None:
        cut = any(isinstance(effect, AbortEngine | FinishEngine) and effect.rid == run.rid for effect in box.log)
        well = not error and not self.engines.aborted(box, run.rid)
        self.watch.ends(box, run, well=well, cut=bool(error) or cut)
        self.engines.end(box, run.rid, error)
        self.watch.is_finished(box, run.rid)
        self.watch.look()

    def move(self) -> None:
        moves = self._moves()
        if not moves:
            return
        box, move = self.random.choice(moves)
        kind = self.random.random()
        if kind < 0.4:
            self._lands(box, move, self.random.randint(0, len(move.dst)))
        if kind < 0.25:
            self._moved(box, move, error="broken pipe")
        elif kind > 0.4:
            self._moved(box, move)

    def _moves(self) -> list[tuple[Box, MovePages]]:
        boxes = [box for box in self.world.boxes if isinstance(box.node, ParamsPrefillNode)]
        return [(box, m) for box in boxes for m in box.all(MovePages) if (id(box), m.move) not in self.moved]

    def _moved(self, box: Box, move: MovePages, error: str = "") -> None:
        self.moved.add((id(box), move.move))
        landed = 0 if error else self._lands(box, move, len(move.dst))
        self.take(box, MoveDone(move.move, error or ("" if landed == len(move.dst) else "discarded")))

    def _lands(self, box: Box, move: MovePages, count: int) -> int:
        """The first `count` pages of this move, as far as decode still lets them in."""
        link = back(move.link, box.node.instance)  # type: ignore[attr-defined]
        target = next((d for d in self.decodes if d.node.instance == move.link.there.instance), None)  # type: ignore[attr-defined]
        armed = self.world.armed.get((target, move.grant, link), set()) if target else set()
        fits = [(s, d) for s, d in zip(move.src[:count], move.dst[:count], strict=True) if d in armed]
        for source, to in fits:
            assert target is not None
            self.watch.pages.copy((box, source), (target, to), (link.here, link.there.rank))
        if fits and target:
            self.take(target, PagesLanded(move.grant, link, tuple(to for _, to in fits)))
        return len(fits)

    def time(self) -> None:
        what, world = self.random.random(), self.world
        if what < 0.2:
            world.cut(reachable=self.random.random() < 0.7)
        elif what < 0.35 and world.conns:
            conn = self.random.choice(list(world.conns))
            ends = world.conns.pop(conn)
            box = self.random.choice(ends)  # the other one finds out by silence
            self.take(box, ConnLost(conn))
        else:
            world.reachable = True
            world.wait(self.random.choice([0.1, 0.1, 0.5, 1.0, 3.0, 9.0, 31.0]), pump=self.random.random() < 0.8)

    def rare(self) -> None:
        self.random.choice(
            [
                self.release,
                self.refuse,
                self.fences,
                self.fences,
                self.verb,
                self.drain,
                self.forge,
                self.forge,
                self.die,
            ]
        )()

    def release(self) -> None:
        holds = list(self.world.prefill.held.holds.values())
        if holds:
            self.take(self.world.p, ReleaseHold(self.random.choice(holds).request.rid, cause("released")))

    def refuse(self) -> None:
        if self.watch.handles:
            self.take(self.random.choice(self.decodes), HandleRefused(self.watch.handles[-1], cause("bad")))

    def fences(self) -> None:
        """Those that are asked for close."""
        for box in self.decodes:
            for reader in list(box.node.pull.readers.values()):  # type: ignore[attr-defined]
                if reader.state == "Draining":
                    for gate in reader.gates:
                        self.take(box, GrantQuiet(reader.grant, *gate))

    def verb(self) -> None:
        box = self.random.choice(self.decodes)
        grants = [reader.grant for reader in box.node.pull.readers.values()]  # type: ignore[attr-defined]
        self.take(box, OperatorRelease(self.random.choice([*grants, GrantNo(77)])))

    def forge(self) -> None:
        """Decode says something of a hold that it never read, or not like that."""
        world, pick = self.world, self.random.choice
        for conn, ends in world.conns.items():
            link = world.prefill.held.sessions.link_of(conn)
            if link is None or world.p not in ends or not self.watch.handles:
                continue
            handle, grant = pick(self.watch.handles), GrantNo(pick([0, 90, 91]))
            named = world.prefill.held.identity(link, handle.hold, grant)
            named |= {"src": link.there.instance, "dst": named["src"]}
            src = pick([handle.pages, handle.pages[1:], pages(5)])
            read = Read(**named, src_pages=src, dst_pages=src, prompt=handle.prompt, rid=pick([handle.rid, Rid("?")]))
            said = [read, Confirm(**named), Release(**named, cause=cause()), *self._once_said(link)]
            self.take(world.p, FrameIn(conn, pick(said)))
            return

    def _once_said(self, link: Link) -> list[Read | Confirm]:
        """Of this very session's reader, again; and what it never would."""
        once = [f for box in self.decodes for f in box.sent(Read)[-3:] + box.sent(Confirm)[-1:]]
        here = (link.there.instance, self.world.prefill.instance, link.here)
        once = [frame for frame in once if (frame.src, frame.dst, frame.rank) == here]
        unfit = [
            msgspec.structs.replace(f, src_pages=(*f.src_pages, f.src_pages[0])) for f in once if isinstance(f, Read)
        ]
        return once + unfit[-1:]

    def drain(self) -> None:
        if self.random.random() < 0.05:
            self.take(self.random.choice(self.world.boxes), Drain())

    def die(self) -> None:
        """A process ends without a word; another one takes its place."""
        if self.random.random() < 0.6:
            return
        world, name = self.world, f"N{self._next()}"
        dead = self.random.choice(world.boxes)
        self.watch.lost |= set(dead.node.requests)  # type: ignore[attr-defined]
        world.boxes.remove(dead)
        dead.hears = False
        if dead is world.p:
            world.p = world.add_prefill(name)
        elif dead is world.d:
            world.d = world.add_decode(name)
        for conn, ends in list(world.conns.items()):
            if dead in ends:
                del world.conns[conn]
                self.take(ends[ends[0] is dead], ConnLost(conn))

    @property
    def decodes(self) -> list[Box]:
        return [box for box in self.world.boxes if isinstance(box.node, ParamsDecodeNode)]

    # --- the end ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Transport and engines return all that they owe; time does the rest."""
        world = self.world
        world.reachable = True
        world.auto_fence = True
        for _ in range(70):
            world.pump()
            self.watch.look()
            self.fences()
            for box, run in self.engines.running():
                if isinstance(run, RunPrefill):
                    self._prefills(box, run.rid)
                elif self.engines.aside(box, run.rid) and not self.engines.aborted(box, run.rid):
                    self._laid(box, run)
                else:
                    self._ends(box, run)
            for mover, move in self._moves():
                self._moved(mover, move)
            world.wait(2.0)
            self.watch.look()

    def _laid(self, box: Box, run: RunWhole) -> None:
        running = box.node.batch.running[run.rid]  # type: ignore[attr-defined]
        if running.phase.name == "SPILLING":
            self.take(box, Retracted(rid=run.rid, tokens=running.tokens))
