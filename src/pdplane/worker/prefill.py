"""One dp group of a prefill worker: it listens for decodes, computes prompts, and moves their pages as they fill."""

from __future__ import annotations

import functools
from typing import Any

from pdplane.core.effects import AnswerRow, CloseConn, Effect, RunPrefill, SendFrame
from pdplane.core.errors import Cause
from pdplane.core.events import Computed, Event, FrameIn, LegArrived, LegRefused, Released, Sampled
from pdplane.core.frames import Grant
from pdplane.core.ids import Rank, Rid, Room
from pdplane.core.pages import Owner
from pdplane.core.rooms.prefill import PrefillNode

from .config import WorkerConfig
from .datapath import Movers
from .engine import EngineRequest, Token
from .engine_thread import Emission
from .kinds import make_mover, usable
from .paired import identity
from .rooms import RoomsShell
from .service import Generation
from .shell import Parts


class PrefillShell(RoomsShell[PrefillNode]):
    role = "prefill"

    def __init__(self, config: WorkerConfig, parts: Parts) -> None:
        super().__init__(parts)
        make = functools.partial(make_mover, config)
        self.movers = Movers(parts.instance, parts.dp, parts.pools, usable(config), make, self.post_soon)
        self.node = PrefillNode(identity(config, parts, self.movers.offers), config.limits(parts.pages))

    async def listen(self, host: str, port: int, tp: int) -> int:
        """The port of the control sessions of one of our ranks. Raises OSError where it is taken."""
        return await self.control.listen(host, port, Rank(dp=self.parts.dp, tp=tp))

    async def stop(self) -> None:
        await super().stop()
        self.movers.close()

    def leg_refused(self, room: Room, cause: Cause) -> None:
        self.post(LegRefused(room=room, cause=cause))

    def _arrival(self, generation: Generation, deadline: float) -> Event:
        assert generation.room is not None
        return LegArrived(
            rid=generation.rid,
            room=generation.room,
            prompt=generation.prompt_id,
            max_new=generation.sampling.max_tokens,
            deadline=deadline,
            priority=generation.priority,
            page_keys=generation.page_keys,
        )

    def _do_role(self, effect: Effect) -> None:
        match effect:
            case SendFrame(conn, frame):
                self._send(conn, frame)
            case CloseConn(conn):
                self._close(conn)
            case RunPrefill():
                self._run(effect)
            case AnswerRow(rid, row):
                if job := self.jobs.get(rid):
                    self.jobs.push_row(job, row, row.finish_reason or "length")
            case _:
                told = self.movers.do(effect)
                assert told is not None, effect
                for event in told:
                    self.post(event)

    def _run(self, effect: RunPrefill) -> None:
        job = self.jobs.get(effect.rid)
        if job is None:
            self.never_ran(effect.rid)
            return
        self.jobs.note_cached(job, effect.cached_tokens)
        self.run(prefill_request(effect, job.generation), job)

    def _take(self, emission: Emission) -> None:
        for fact in facts_of(emission):
            self.post(fact)

    def _heard(self, event: Event) -> None:
        if isinstance(event, FrameIn) and isinstance(event.frame, Grant):
            grant = event.frame
            self.grants.asked(grant.room, grant, len(grant.pages), self.parts.dp, self.movers.kind_of)
        super()._heard(event)

    def _quarantine(self, owner: Owner, pages: int) -> dict[str, Any]:
        told = super()._quarantine(owner, pages)
        record = self.jobs.records.get(Rid(owner))
        if record is None:
            return {**told, "rid": owner, "room": None, "grants": []}
        return {**told, "rid": owner, "room": record.room, "grants": self.grants_of(record)}

    def role_figures(self) -> dict[str, int]:
        node = self.node
        return {
            "waiting": node.waiting,
            "computing": node.computing,
            "rooms": len(node.rooms.live),
            "tombstones": node.rooms.tombstones,
            "control_sessions": node.sessions.sessions,
        }


def prefill_request(effect: RunPrefill, generation: Generation) -> EngineRequest:
    return EngineRequest(
        rid=effect.rid,
        prompt=generation.prompt,
        sampling=generation.sampling,
        pages=list(effect.pages),
        computed=effect.cached_tokens,
        prefill_only=True,
    )


def facts_of(emission: Emission) -> list[Event]:
    """What an emission of a prompt says to a prefill's core, in order."""
    rid = emission.rid
    facts: list[Event] = []
    if emission.computed:
        facts.append(Computed(rid=rid, tokens=emission.computed))
    if emission.tokens and emission.finish not in ("abort", "error"):
        facts.append(sampled(rid, emission.tokens[0], emission.ended))
    if emission.released:
        facts.append(Released(rid=rid, error=emission.error))
    return facts


def sampled(rid: Rid, token: Token, ended: str | None) -> Sampled:
    return Sampled(
        rid=rid,
        token=token.id,
        logprob=token.logprob,
        top_logprobs=token.top,
        ended=ended,
    )
