"""One dp group of a decode worker in the params dialect: it reads the KV that a request's handle names, and runs the
request from there; without a handle it computes the prompt itself.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from pdplane.core.effects import ArmGrant, CloseConn, ConnectorWork, Dial, Effect, RunWhole, SendFrame, Ungate
from pdplane.core.errors import Cause, Refused, bad_request
from pdplane.core.events import Event, Handle, HandleRefused, OperatorRelease, RequestArrived
from pdplane.core.ids import GrantNo, Rid
from pdplane.core.pages import Owner, Page, grant_owner
from pdplane.core.params.decode import ParamsDecodeNode
from pdplane.observe.grants import GrantBook, describe
from pdplane.observe.records import LegRecord

from .config import WorkerConfig
from .connectors import Connectors, Plugged
from .datapath import Landings
from .engine import EngineRequest
from .engine_thread import Emission
from .jobs import Job
from .kinds import make_landing, usable
from .paired import PairedShell, identity
from .service import Generation
from .shell import Parts


class ParamsDecodeShell(PairedShell[ParamsDecodeNode]):
    """Raises BadSetting where pages cannot arrive as asked."""

    role = "decode"

    def __init__(self, config: WorkerConfig, parts: Parts, other: Plugged[ParamsDecodeNode] | None = None) -> None:
        super().__init__(parts)
        self.grants: GrantBook[Rid] = GrantBook()
        self._allowed = frozenset(config.prefill_allow)
        make = functools.partial(make_landing, config)
        self.landings = Landings(parts.instance, parts.dp, parts.pools, usable(config), make, self.post_soon)
        me = identity(config, parts, self.landings.offers)
        self.node = ParamsDecodeNode(me, config.limits(parts.pages), other and other.scheduler)
        self.connectors = Connectors(other.workers if other else (), parts, self.node, self.post)

    async def stop(self) -> None:
        await super().stop()
        self.connectors.close()
        self.landings.close()

    def uses(self, rid: Rid) -> bool:
        return super().uses(rid) or rid in self.node.requests

    def reads(self, handle: Handle) -> bool:
        """Whether a request here waits for this very hold, or reads it."""
        return self.node.connector.taken(handle) is not None

    def handle_refused(self, handle: Handle, cause: Cause) -> None:
        """Whom we may not ask is not dialled to be told either."""
        if self._allows(handle):
            self.post(HandleRefused(handle, cause))

    # --- events and effects -----------------------------------------------------------------------------------------

    def _arrival(self, generation: Generation, deadline: float) -> Event:
        handle = generation.hand_off.handle if generation.hand_off else None
        if handle:
            self._check_allowed(handle)
        return RequestArrived(
            rid=generation.rid,
            prompt=generation.prompt_id,
            max_new=generation.sampling.max_tokens,
            deadline=deadline,
            priority=generation.priority,
            page_keys=generation.page_keys,
            handle=handle,
        )

    def _allows(self, handle: Handle) -> bool:
        return not self._allowed or handle.endpoints[0][1].host in self._allowed

    def _check_allowed(self, handle: Handle) -> None:
        """Raises Refused (400): a handle names hosts that are dialled."""
        if not self._allows(handle):
            host = handle.endpoints[0][1].host
            text = (
                f"kv_transfer_params.remote_host {host!r} is not among the prefills that this decode may ask "
                f"({', '.join(sorted(self._allowed))}); see --prefill-allow"
            )
            param = "kv_transfer_params.remote_host"
            raise Refused(bad_request(text, code="prefill_not_allowed", param=param, side=self.role))

    def _do_role(self, effect: Effect) -> None:
        match effect:
            case SendFrame(conn, frame):
                self._send(conn, frame)
            case Dial(endpoint, here):
                self.control.dial(endpoint, here)
            case CloseConn(conn):
                self._close(conn)
            case RunWhole():
                self._run(effect)
            case Ungate(rid):
                self._ungate(rid)
            case ConnectorWork(work):
                self.connectors.start(work)
            case _:
                self._do_landings(effect)

    def _do_landings(self, effect: Effect) -> None:
        if isinstance(effect, ArmGrant):
            self._note_grant(effect)
        told = self.landings.do(effect)
        assert told is not None, effect
        for event in told:
            self.post(event)

    def _run(self, effect: RunWhole) -> None:
        """A second run of a request begins anew: what was kept of the first one is nobody's answer."""
        job = self.jobs.get(effect.rid)
        if job is None:
            self.never_ran(effect.rid)
            return
        job.kept = [] if effect.gated else None
        self._note_computed(job, effect)
        request = EngineRequest(
            rid=effect.rid,
            prompt=job.generation.prompt,
            sampling=msgspec.structs.replace(job.generation.sampling, max_tokens=effect.max_new),
            pages=list(effect.pages),
            computed=effect.computed,
        )
        self.run(request, job)

    def _note_computed(self, job: Job, effect: RunWhole) -> None:
        """What was read counts as prefill says, what was here as we know it."""
        hand_off, tokens = job.generation.hand_off, len(job.generation.prompt)
        if hand_off and effect.computed == tokens:
            job.cached_tokens = hand_off.cached_tokens
        else:
            self.jobs.note_cached(job, effect.shared * self.model.page_size)

    def _take(self, emission: Emission) -> None:
        """Before it is known that what was read is right, nothing of the answer leaves."""
        job = self.jobs.get(emission.rid)
        if job is None or job.kept is None:
            super()._take(emission)
            return
        job.kept.append(msgspec.structs.replace(emission, computed=0, released=False, retracted=None))
        super()._take(msgspec.structs.replace(emission, text="", tokens=[], finish=None, matched_stop=None))

    def _ungate(self, rid: Rid) -> None:
        job = self.jobs.get(rid)
        if job is None:
            return
        kept, job.kept = job.kept or [], None
        for emission in kept:
            super()._take(emission)

    def release(self, grant: GrantNo) -> int:
        """Quarantined pages of this grant that are free now, without a proof."""
        before = self.node.ledger.counts[Page.QUARANTINED]
        self.post(OperatorRelease(grant))
        return before - self.node.ledger.counts[Page.QUARANTINED]

    # --- observation ------------------------------------------------------------------------------------------------

    def held(self, record: LegRecord) -> dict[str, int]:
        return self.node.ledger.held_by(self.node.owner_of(record.rid))

    def _note_grant(self, armed: ArmGrant) -> None:
        if reader := self.node.pull.reader_of(armed.grant):
            self.grants.armed(reader.rid, self.instance, armed)

    def grants_of(self, record: LegRecord) -> list[dict[str, Any]]:
        held = self.node.ledger.held_by
        return [
            {**describe(grant), "held_pages": held(grant_owner(grant.grant))} for grant in self.grants.of(record.rid)
        ]

    def _quarantine(self, owner: Owner, pages: int) -> dict[str, Any]:
        grants = list(self.grants.of(Rid(owner)))
        grant = grants[-1].grant if grants else None
        return {**super()._quarantine(owner, pages), "rid": owner, "grant": grant}

    def role_figures(self) -> dict[str, int]:
        node = self.node
        return {
            "waiting": node.waiting,
            "parked": node.parked,
            "running": len(node.batch),
            "retracted": node.batch.parked,
            "retracted_bytes": self.running_engine.retracted_bytes,
            "claims": len(node.reserve),
            "control_sessions": node.sessions(),
            "bad_data_frames": self.landings.bad_frames,
        }
