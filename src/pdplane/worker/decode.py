"""The decode worker: its control sessions, the landing of pages, and the engine's second half."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from pdplane.core.decode import DecodeNode
from pdplane.core.effects import (
    AnswerRow,
    ArmGrant,
    CloseConn,
    Dial,
    DisarmGrant,
    Effect,
    LookUp,
    RevokeGrant,
    RunDecode,
    SendFrame,
    Teardown,
)
from pdplane.core.errors import Cause, Refused, bad_request
from pdplane.core.events import Event, GrantQuiet, LegArrived, PagesLanded, RouteFailed, RouteKnown
from pdplane.core.frames import PromptId
from pdplane.core.ids import Rank
from pdplane.core.session import Identity
from pdplane.observe.records import LegRecord
from pdplane.transport.tcp_landing import TcpLanding
from pdplane.wire.address import bracketed

from .config import WorkerConfig
from .control import ControlNet
from .engine import EngineRequest
from .jobs import first_token
from .lookup import find_ranks
from .service import Generation
from .shell import Parts, Shell

log = logging.getLogger(__name__)


class DecodeShell(Shell[DecodeNode]):
    role = "decode"

    def __init__(self, config: WorkerConfig, parts: Parts) -> None:
        super().__init__(parts)
        self.default_bootstrap_port = config.bootstrap_port
        self._allowed = frozenset(config.prefill_allow)
        self._lookups: set[asyncio.Task[None]] = set()
        self._control = ControlNet(self.post, self.count)
        self.landing = TcpLanding(
            parts.instance,
            parts.pool,
            lambda grant, pages: self.post_soon(PagesLanded(grant, tuple(pages))),
            lambda grant: self.post_soon(GrantQuiet(grant)),
            host=config.host,
            port=config.data_port,
            advertise_host=config.peer_host,
        )
        me = Identity(
            instance=parts.instance,
            rank=Rank(),
            stamp=parts.stamp,
            data_host=self.landing.endpoint.host,
            data_port=self.landing.endpoint.port,
            data_token=self.landing.token,
            secret=config.secret,
        )
        self.node = DecodeNode(me, config.limits(parts.pool.pages), fence=self.landing.capabilities.fence)

    async def stop(self) -> None:
        await super().stop()
        for task in list(self._lookups):
            task.cancel()
        await self._control.stop()
        self.landing.close()

    def _arrival(self, generation: Generation, prompt: PromptId, deadline: float) -> Event:
        assert generation.room is not None
        host, port = generation.bootstrap_host, generation.bootstrap_port
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
            prompt=prompt,
            max_new=generation.sampling.max_tokens,
            deadline=deadline,
            address=f"{bracketed(host)}:{port or self.default_bootstrap_port}",
        )

    def _do_role(self, effect: Effect) -> None:
        match effect:
            case SendFrame(conn, frame):
                self._control.send(conn, frame)
            case Dial(endpoint):
                self._control.dial(endpoint)
            case CloseConn(conn):
                self._control.close(conn)
            case LookUp(address):
                task = self._loop.create_task(self._look_up(address))
                self._lookups.add(task)
                task.add_done_callback(self._lookups.discard)
            case ArmGrant(grant, peers, pages):
                for peer in peers:
                    self.landing.arm(grant, peer, pages)
            case RevokeGrant(grant):
                if self.landing.revoke(grant):
                    self.post(GrantQuiet(grant))
            case DisarmGrant(grant):
                self.landing.disarm(grant)
            case Teardown(peer):
                self.landing.teardown(peer)
            case RunDecode():
                self._run(effect)
            case AnswerRow(rid, row):
                if job := self.jobs.get(rid):
                    self.jobs.push_row(job, row, row.finish_reason)
            case _:
                raise AssertionError(effect)

    async def _look_up(self, address: str) -> None:
        try:
            ranks = await find_ranks(address)
        except Refused as refused:
            self.post(RouteFailed(address, refused.cause))
        except Exception as error:  # the room must hear of it, whatever it was
            log.exception("looking up %s", address)
            text = f"the registry at {address} could not be asked: {type(error).__name__}: {error}"
            self.post(RouteFailed(address, Cause("registry_unreachable", text, 503, retryable=True, side=self.role)))
        else:
            self.post(RouteKnown(address, ranks))

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

    def _held(self, record: LegRecord, held: dict[Any, dict[str, int]]) -> dict[str, int]:
        return held.get(self.node.owner_of(record.rid), {})

    def role_figures(self) -> dict[str, int]:
        node = self.node
        return {
            "waiting": node.waiting,
            "running": len(node.batch),
            "rooms": len(node.rooms.live),
            "tombstones": node.rooms.tombstones,
            "claims": len(node.reserve),
            "control_sessions": node.members.sessions(),
            "bad_data_frames": self.landing.bad_frames,
        }
