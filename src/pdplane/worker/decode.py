"""One dp group of a decode worker: its control sessions, the landing of pages, and the engine's second half."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from pdplane.core.effects import (
    AnswerRow,
    ArmGrant,
    CloseConn,
    Dial,
    Effect,
    LookUp,
    LookUpRank,
    RunDecode,
    SendFrame,
)
from pdplane.core.errors import Cause, Refused, bad_request
from pdplane.core.events import Event, LegArrived, OperatorRelease, RankKnown, RouteFailed, RouteKnown
from pdplane.core.ids import GrantNo, Room
from pdplane.core.pages import Owner, Page, grant_of
from pdplane.core.rooms.decode import DecodeNode
from pdplane.observe.records import LegRecord
from pdplane.wire.address import bracketed

from .config import WorkerConfig
from .datapath import Landings
from .engine import EngineRequest
from .jobs import first_token
from .kinds import make_landing, usable
from .lookup import Lookups
from .paired import identity
from .rooms import RoomsShell
from .service import Generation
from .shell import Parts

log = logging.getLogger(__name__)


class DecodeShell(RoomsShell[DecodeNode]):
    role = "decode"

    def __init__(self, config: WorkerConfig, parts: Parts) -> None:
        """Raises BadSetting where pages cannot arrive as asked."""
        super().__init__(parts)
        self._allowed = frozenset(config.prefill_allow)
        self._lookups = Lookups(
            policy=config.decode_allocation_policy, page_size=parts.model.page_size, kv_dtype=parts.model.kv_dtype
        )
        self._asking: set[asyncio.Task[None]] = set()
        make = functools.partial(make_landing, config)
        self.landings = Landings(parts.instance, parts.dp, parts.pools, usable(config), make, self.post_soon)
        me = identity(config, parts, self.landings.offers)
        self.node = DecodeNode(me, config.limits(parts.pages), fenced=self.landings.fenced)

    async def stop(self) -> None:
        await super().stop()
        for task in self._asking:
            task.cancel()
        await self._lookups.close()
        self.landings.close()

    def _arrival(self, generation: Generation, deadline: float) -> Event:
        assert generation.room is not None
        host = generation.bootstrap_host
        if self._allowed and host not in self._allowed:
            raise Refused(
                bad_request(
                    f"bootstrap_host {host!r} is not among the prefills that this decode may ask "
                    f"({', '.join(sorted(self._allowed))}); see --prefill-allow",
                    code="prefill_not_allowed",
                    param="bootstrap_host",
                    side=self.role,
                )
            )
        return LegArrived(
            rid=generation.rid,
            room=generation.room,
            prompt=generation.prompt_id,
            max_new=generation.sampling.max_tokens,
            deadline=deadline,
            address=f"{bracketed(host)}:{generation.bootstrap_port}",
            priority=generation.priority,
            dp_rank=generation.prefill_dp_rank,
            page_keys=generation.page_keys,
        )

    def _do_role(self, effect: Effect) -> None:
        match effect:
            case SendFrame(conn, frame):
                self._send(conn, frame)
            case Dial(endpoint, here):
                self.control.dial(endpoint, here)
            case CloseConn(conn):
                self._close(conn)
            case LookUp(address):
                self._ask(address, self._lookups.route(address))
            case LookUpRank(address, room):
                self._ask(address, self._rank_of(address, room))
            case RunDecode():
                self._run(effect)
            case AnswerRow(rid, row):
                if job := self.jobs.get(rid):
                    self.jobs.push_row(job, row, row.finish_reason)
            case _:
                self._do_landings(effect)

    def _do_landings(self, effect: Effect) -> None:
        if isinstance(effect, ArmGrant):
            self._note_grant(effect)
        told = self.landings.do(effect)
        assert told is not None, effect
        for event in told:
            self.post(event)

    def _ask(self, address: str, question: Coroutine[None, None, RouteKnown | RankKnown]) -> None:
        task = self._loop.create_task(self._answer(address, question))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _answer(self, address: str, question: Coroutine[None, None, RouteKnown | RankKnown]) -> None:
        try:
            told: Event = await question
        except Refused as refused:
            told = RouteFailed(address, refused.cause)
        except Exception as error:  # the rooms must hear of it, whatever it was
            log.exception("asking the registry at %s", address)
            text = f"the registry at {address} could not be asked: {type(error).__name__}: {error}"
            told = RouteFailed(address, Cause("registry_unreachable", text, 503, retryable=True, side=self.role))
        self.post(told)

    async def _rank_of(self, address: str, room: Room) -> RankKnown:
        return RankKnown(address, room, await self._lookups.dp_rank(address, room))

    def _run(self, effect: RunDecode) -> None:
        job = self.jobs.get(effect.rid)
        if job is None:
            self.never_ran(effect.rid)
            return
        row = effect.row
        if effect.max_new <= 1:  # the pool holds no token after prefill's
            self.jobs.push_row(job, row, "length")
            self.never_ran(effect.rid)
            return
        job.cached_tokens = row.cached_tokens
        request = EngineRequest(
            rid=effect.rid,
            prompt=job.generation.prompt,
            sampling=msgspec.structs.replace(job.generation.sampling, max_tokens=effect.max_new),
            pages=list(effect.pages),
            computed=row.prompt_tokens,
            prior=(row.first_token,),
        )
        self.run(request, job, [first_token(row)])

    def release(self, grant: GrantNo) -> int:
        """Quarantined pages of this grant that are free now, without a proof."""
        before = self.node.ledger.counts[Page.QUARANTINED]
        self.post(OperatorRelease(grant))
        return before - self.node.ledger.counts[Page.QUARANTINED]

    def held(self, record: LegRecord) -> dict[str, int]:
        return self.node.ledger.held_by(self.node.owner_of(record.rid))

    def _note_grant(self, armed: ArmGrant) -> None:
        if receiver := self.node.granted_as(armed.grant):
            self.grants.armed(receiver.room, self.instance, armed)

    def _quarantine(self, owner: Owner, pages: int) -> dict[str, Any]:
        grant = grant_of(owner)
        told = {**super()._quarantine(owner, pages), "grant": grant}
        receiver = None if grant is None else self.node.granted_as(grant)
        if receiver is None:
            return told
        holders = [str(link.there) for link in receiver.holders]
        return {**told, "rid": receiver.rid, "room": receiver.room, "no_proof_from": holders}

    def role_figures(self) -> dict[str, int]:
        node = self.node
        return {
            "waiting": node.waiting,
            "running": len(node.batch),
            "retracted": node.batch.parked,
            "retracted_bytes": self.running_engine.retracted_bytes,
            "rooms": len(node.rooms.live),
            "tombstones": node.rooms.tombstones,
            "claims": len(node.reserve),
            "control_sessions": node.members.sessions(),
            "bad_data_frames": self.landings.bad_frames,
        }
