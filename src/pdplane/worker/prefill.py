"""The prefill worker: it listens for decodes, computes prompts, and moves their pages as they fill."""

from __future__ import annotations

from pdplane.core.effects import (
    AnswerRow,
    CancelMoves,
    CloseConn,
    ConnectData,
    Effect,
    MovePages,
    RunPrefill,
    SendFrame,
    Teardown,
)
from pdplane.core.errors import Cause
from pdplane.core.events import Computed, Event, LegArrived, LegRefused, MoveDone, Released, Sampled
from pdplane.core.frames import PromptId
from pdplane.core.ids import Rank, Rid, Room
from pdplane.core.prefill import PrefillNode
from pdplane.core.session import Identity
from pdplane.transport.contract import Endpoint, Pair
from pdplane.transport.tcp_mover import TcpMover

from .config import WorkerConfig
from .control import ControlNet
from .engine import EngineRequest, Token
from .engine_thread import Emission
from .service import Generation
from .shell import Parts, Shell


class PrefillShell(Shell[PrefillNode]):
    role = "prefill"

    def __init__(self, config: WorkerConfig, parts: Parts) -> None:
        super().__init__(parts)
        self.default_bootstrap_port = config.bootstrap_port
        me = Identity(instance=parts.instance, rank=Rank(), stamp=parts.stamp, secret=config.secret)
        self.node = PrefillNode(me, config.limits(parts.pool.pages))
        self._control = ControlNet(self.post, self.count)
        self.mover = TcpMover(parts.instance, parts.pool, lambda move, error: self.post_soon(MoveDone(move, error)))

    async def listen(self, host: str, port: int) -> int:
        """The port of the control sessions. Raises OSError where it is taken."""
        return await self._control.listen(host, port)

    async def stop(self) -> None:
        await super().stop()
        await self._control.stop()
        self.mover.close()

    def leg_refused(self, room: Room, cause: Cause) -> None:
        self.post(LegRefused(room=room, cause=cause))

    def _arrival(self, generation: Generation, prompt: PromptId, deadline: float) -> Event:
        assert generation.room is not None
        return LegArrived(
            rid=generation.rid,
            room=generation.room,
            prompt=prompt,
            max_new=generation.sampling.max_tokens,
            deadline=deadline,
        )

    def _do_role(self, effect: Effect) -> None:
        match effect:
            case SendFrame(conn, frame):
                self._control.send(conn, frame)
            case CloseConn(conn):
                self._control.close(conn)
            case MovePages(move, grant, peer, src, dst):
                self.mover.move(move, grant, peer, [Pair(s, d) for s, d in zip(src, dst, strict=True)])
            case CancelMoves(grant, peer):
                self.mover.cancel(grant, peer)
            case ConnectData(peer, host, port, token):
                self.mover.connect(peer, Endpoint(host, port), token)
            case Teardown(peer):
                self.mover.teardown(peer)
            case RunPrefill():
                self._run(effect)
            case AnswerRow(rid, row):
                if job := self.jobs.get(rid):
                    self.jobs.push_row(job, row, row.finish_reason or "length")
            case _:
                raise AssertionError(effect)

    def _run(self, effect: RunPrefill) -> None:
        job = self.jobs.get(effect.rid)
        if job is None:
            self.never_ran(effect.rid)
            return
        request = EngineRequest(
            rid=effect.rid,
            prompt=job.generation.prompt,
            sampling=job.generation.sampling,
            pages=list(effect.pages),
            prefill_only=True,
        )
        self.run(request, job)

    def _take(self, emission: Emission) -> None:
        rid = emission.rid
        if emission.computed:
            self.post(Computed(rid=rid, tokens=emission.computed))
        if emission.tokens and emission.finish not in ("abort", "error"):
            self.post(sampled(rid, emission.tokens[0], emission.ended))
        if emission.released:
            self.post(Released(rid=rid, error=emission.error))

    def role_figures(self) -> dict[str, int]:
        node = self.node
        return {
            "waiting": node.waiting,
            "computing": node.computing,
            "rooms": len(node.rooms.live),
            "tombstones": node.rooms.tombstones,
            "control_sessions": node.sessions.sessions,
        }


def sampled(rid: Rid, token: Token, ended: str | None) -> Sampled:
    return Sampled(rid=rid, token=token.id, logprob=token.logprob, top_logprobs=token.top, ended=ended)
