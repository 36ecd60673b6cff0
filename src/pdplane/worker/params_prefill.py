"""One dp group of a prefill worker in the params dialect: it computes prompts, answers where their KV is held, and
moves its pages to whoever presents that answer.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from pdplane.core.effects import AnswerHeld, AnswerRow, CloseConn, ConnectorWork, Effect, RunPrefill, SendFrame
from pdplane.core.errors import Cause, aborted
from pdplane.core.events import Event, FrameIn, ReleaseHold, RequestArrived
from pdplane.core.frames import Read
from pdplane.core.ids import HoldNo, Rank, Rid
from pdplane.core.pages import Owner
from pdplane.core.params.prefill import ParamsPrefillNode
from pdplane.observe.grants import GrantBook, describe
from pdplane.observe.records import LegRecord
from pdplane.wire.params import answered

from .config import WorkerConfig
from .connectors import Connectors, Plugged
from .datapath import Movers
from .engine_thread import Emission
from .kinds import make_mover, usable
from .paired import PairedShell, identity
from .prefill import facts_of, prefill_request
from .service import Generation
from .shell import Parts


class ParamsPrefillShell(PairedShell[ParamsPrefillNode]):
    role = "prefill"

    def __init__(self, config: WorkerConfig, parts: Parts, other: Plugged[ParamsPrefillNode] | None = None) -> None:
        super().__init__(parts)
        self.grants: GrantBook[HoldNo] = GrantBook()
        self._config = config
        self._ports: dict[int, int] = {}  # of control sessions, by tensor parallel rank
        self._turned = asyncio.Event()
        make = functools.partial(make_mover, config)
        self.movers = Movers(parts.instance, parts.dp, parts.pools, usable(config), make, self.post_soon)
        me = identity(config, parts, self.movers.offers)
        self.node = ParamsPrefillNode(me, config.limits(parts.pages), other and other.scheduler)
        self.connectors = Connectors(other.workers if other else (), parts, self.node, self.post)

    async def listen(self, host: str, port: int, tp: int) -> int:
        """The port of the control sessions of one of our ranks. Raises OSError where it is taken."""
        self._ports[tp] = await self.control.listen(host, port, Rank(dp=self.parts.dp, tp=tp))
        return self._ports[tp]

    async def stop(self) -> None:
        await super().stop()
        self.connectors.close()
        self.movers.close()

    def post(self, event: Event) -> None:
        super().post(event)
        self._turned.set()

    # --- what is held -----------------------------------------------------------------------------------------------

    @property
    def holds(self) -> list[dict[str, Any]]:
        return self.node.holds_told()

    def release_hold(self, rid: str, cause: Cause) -> bool:
        """False where nothing is held under this name."""
        if not self.node.holding(Rid(rid)):
            return False
        self.post(ReleaseHold(Rid(rid), cause))
        return True

    def uses(self, rid: Rid) -> bool:
        return super().uses(rid) or rid in self.node.requests

    def abort(self, rid: str, room: int | None = None, cause: Cause | None = None) -> int:
        """Also what is held under this name for a client that has its answer."""
        ended = super().abort(rid, room, cause)
        return ended or int(self.release_hold(rid, cause or aborted(self.role)))

    def abort_all(self) -> int:
        held = [self.release_hold(hold["rid"], aborted(self.role)) for hold in self.holds]
        return super().abort_all() + sum(held)

    @property
    def under_way(self) -> int:
        return 0 if self.broken else max(len(self.jobs), self.node.live)

    async def all_ended(self) -> None:
        """A hold outlives the request that was answered with it."""
        await super().all_ended()
        while self.under_way:
            self._turned.clear()
            await self._turned.wait()

    def cut(self, reason: str) -> None:
        super().cut(reason)
        for hold in self.holds:
            cause = Cause("worker_stopping", reason, 503, retryable=True, side=self.role)
            self.post(ReleaseHold(Rid(hold["rid"]), cause))

    # --- events and effects -----------------------------------------------------------------------------------------

    def _arrival(self, generation: Generation, deadline: float) -> Event:
        return RequestArrived(
            rid=generation.rid,
            prompt=generation.prompt_id,
            max_new=1,
            deadline=deadline,
            priority=generation.priority,
            page_keys=generation.page_keys,
        )

    def _unheard(self, rid: Rid, cause: Cause) -> None:
        """Nobody has read what would name the hold."""
        self.release_hold(rid, cause)

    def _do_role(self, effect: Effect) -> None:
        match effect:
            case SendFrame(conn, frame):
                self._send(conn, frame)
            case CloseConn(conn):
                self._close(conn)
            case RunPrefill():
                self._run(effect)
            case AnswerHeld():
                self._answer(effect)
            case AnswerRow(rid, row):
                if job := self.jobs.get(rid):
                    self.jobs.push_row(job, row, "length")
            case ConnectorWork(work):
                self.connectors.start(work)
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

    def _answer(self, effect: AnswerHeld) -> None:
        """The prompt's token goes along for whoever asks prefill alone; decode computes its own."""
        job = self.jobs.get(effect.rid)
        if job is None:
            return
        if record := self.jobs.records.get(effect.rid):
            record.hold = effect.hold
        job.held = answered(
            effect,
            instance=self.instance,
            host=self._config.peer_host,
            ports=[self._ports[tp] for tp in range(self._config.tp)],
            shape=self._config.shape,
            dp=self.parts.dp,
            page_size=self.model.page_size,
        )
        self.jobs.push_row(job, effect.row, "length")

    def _take(self, emission: Emission) -> None:
        for fact in facts_of(emission):
            self.post(fact)

    # --- observation ------------------------------------------------------------------------------------------------

    def _heard(self, event: Event) -> None:
        if isinstance(event, FrameIn) and isinstance(event.frame, Read):
            read = event.frame
            self.grants.asked(read.hold, read, len(read.dst_pages), self.parts.dp, self.movers.kind_of)
        super()._heard(event)

    def legs(self, key: str) -> list[dict[str, Any]]:
        held = {hold["rid"]: hold for hold in self.holds}  # one for each name at most
        return [{**leg, "holds": [held[leg["rid"]]] if leg["rid"] in held else []} for leg in super().legs(key)]

    def grants_of(self, record: LegRecord) -> list[dict[str, Any]]:
        return [{**describe(grant), "hold": record.hold} for grant in self.grants.of(record.hold)]

    def _quarantine(self, owner: Owner, pages: int) -> dict[str, Any]:
        return {**super()._quarantine(owner, pages), "rid": owner}

    def role_figures(self) -> dict[str, int]:
        node = self.node
        return {
            "waiting": node.waiting,
            "computing": node.computing,
            "holds": len(node.held.holds),
            "control_sessions": node.held.sessions.sessions,
        }
