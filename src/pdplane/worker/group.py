"""A worker's dp groups behind one door: the HTTP edge's `Service` over one shell per data parallel rank.

Which group serves a request is decided here, once: a room that a group knows goes back to it (which refuses it twice),
a rank that the request names is honoured or refused, and what is left goes by the room's number or to the least loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from pdplane.core.errors import Cause, Refused, aborted, bad_request
from pdplane.core.ids import GrantNo, Instance, Rid, Room, dp_of
from pdplane.core.node import Node

from . import facts
from .aggregated import AggregatedShell
from .config import TOTAL_REQUESTS, WorkerConfig
from .decode import DecodeShell
from .http.pairing import rooms_of
from .prefill import PrefillShell
from .service import Generation, Stream
from .shell import Shell

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Shell[Node], covariant=True)

TellRank = Callable[[Room, int], None]
"""Writes to the registry which dp rank has this room. Must not block."""


class Group(Generic[S]):
    """Subclasses are the roles: each says which group takes a request that names none. `process`: the instance of which
    each group's is one part."""

    def __init__(self, config: WorkerConfig, process: Instance, shells: Sequence[S]) -> None:
        first = shells[0]
        self.config = config
        self.process = process
        self.shells = tuple(shells)
        self.role = first.role
        self.model = first.model
        self.model_name = first.model.name
        self.tokenizer = first.parts.tokenizer
        self.context_len = first.model.context_len
        self.vocab_size = first.model.vocab_size
        self.max_prompt_tokens = min(first.model.context_len - 1, first.parts.pages * first.model.page_size)
        self.key_page_size = first.model.page_size if config.prefix_cache else 0
        self.default_bootstrap_port: int | None = None
        self.policy = config.decode_allocation_policy
        self.dialect = config.dialect
        self.waits_for = ""  # what it needs before it can serve
        self.draining = ""
        self.asked_to_drain = asyncio.Event()

    # --- requests -------------------------------------------------------------------------------------------------

    def submit(self, batch: Sequence[Generation]) -> list[Stream]:
        """All or none. Raises Refused with the first refusal, after taking back what was accepted before it."""
        for generation in batch:
            self._check_rank(generation)
        streams = [self._shell_of(one).accept(one) for one in batch]
        refused = next((stream.refusal for stream in streams if stream.refusal), None)
        if refused is None:
            return streams
        for stream in streams:
            stream.close(aborted(self.role))
        raise Refused(refused)

    def _check_rank(self, generation: Generation) -> None:
        """Raises Refused (400): the request names a dp rank that is not here, or contradicts itself."""
        rank, count = generation.dp_rank, len(self.shells)
        if rank is not None and not 0 <= rank < count:
            text = f"data parallel rank {rank} is not here: this {self.role} worker has {count}, numbered from 0"
            raise Refused(bad_request(text, code="no_such_rank", param="routed_dp_rank", side=self.role))

    def _shell_of(self, generation: Generation) -> S:
        """A rid in use goes to whoever uses it, to be refused there."""
        user = next((shell for shell in self.shells if shell.uses(generation.rid)), None)
        return user or self.shells[self._dp_of(generation)]

    def _dp_of(self, generation: Generation) -> int:
        if generation.room is not None and (known := self._knows(generation.room)) is not None:
            return known
        return self._least_loaded() if generation.dp_rank is None else generation.dp_rank

    def _knows(self, room: Room) -> int | None:
        """The group that has this room, else one that had it."""
        known = [dp for dp, shell in enumerate(self.shells) if shell.knows(room)]
        return next((dp for dp in known if self.shells[dp].has(room)), known[0] if known else None)

    def _least_loaded(self) -> int:
        """By requests under way; the lowest rank of equals."""
        return min(range(len(self.shells)), key=lambda dp: len(self.shells[dp].jobs))

    def abort(self, rid: str, room: int | None = None, cause: Cause | None = None) -> int:
        return sum(shell.abort(rid, room, cause) for shell in self.shells)

    def abort_all(self) -> int:
        return sum(shell.abort_all() for shell in self.shells)

    # --- the worker's life ----------------------------------------------------------------------------------------

    def drain(self, reason: str) -> None:
        if self.draining:
            return
        self.draining = reason
        for shell in self.shells:
            shell.drain(reason)
        self.asked_to_drain.set()

    def wait_for(self, what: str) -> None:
        """Not ready until this is there; "" when it is."""
        self.waits_for = what

    @property
    def live(self) -> int:
        return sum(shell.under_way for shell in self.shells)

    @property
    def jobs(self) -> list[Rid]:
        """Requests under way, of all groups."""
        return [rid for shell in self.shells for rid in shell.jobs]

    async def all_ended(self) -> None:
        """Returns when no client waits for anything, and nothing is kept for one."""
        while any(shell.under_way for shell in self.shells):
            for shell in self.shells:
                await shell.all_ended()

    @property
    def holds(self) -> list[dict[str, Any]]:
        """KV that is kept for readers elsewhere (prefill, params dialect)."""
        return []

    def cut(self, reason: str) -> None:
        """Ends everything with an explicit error: the process is about to go."""
        for shell in self.shells:
            shell.cut(reason)

    def release(self, instance: str, grant: int) -> int:
        """Only decode grants."""
        return 0

    # --- what it says of itself -----------------------------------------------------------------------------------

    def record(self, key: str) -> dict[str, Any] | None:
        legs = [leg for shell in self.shells for leg in shell.legs(key)]
        return {"role": self.role, "instance": self.process, "legs": legs} if legs else None

    def health(self) -> tuple[bool, dict[str, Any]]:
        return facts.health(self)

    def server_info(self) -> dict[str, Any]:
        return facts.server_info(self)

    def figures(self) -> dict[str, Any]:
        return facts.figures(self.shells)

    def metrics_text(self) -> str:
        return facts.metrics_text(self.shells)


class PrefillGroup(Group[PrefillShell]):
    tell_rank: TellRank

    def __init__(self, config: WorkerConfig, process: Instance, shells: Sequence[PrefillShell]) -> None:
        super().__init__(config, process, shells)
        self.default_bootstrap_port = config.bootstrap_port
        self._by_load = config.load_balance_method == TOTAL_REQUESTS
        self.tell_rank = _nobody_asks

    def named_in(self, body: bytes) -> list[Room]:
        return rooms_of(body)

    def leg_refused(self, leg: Room, cause: Cause) -> None:
        """A decode that waits for this leg hears why, at the rank at which it will ask."""
        dp = self._knows(leg)
        if dp is None:
            dp = 0 if self._by_load else dp_of(leg, len(self.shells))
            self._tell(leg, dp)
        self.shells[dp].leg_refused(leg, cause)

    def _check_rank(self, generation: Generation) -> None:
        super()._check_rank(generation)
        rank, room = generation.dp_rank, generation.room
        if rank is None or room is None or self._by_load or rank == (own := dp_of(room, len(self.shells))):
            return
        text = (
            f"data parallel rank {rank} contradicts bootstrap_room {room}: with --load-balance-method "
            f"follow_bootstrap_room its rank of {len(self.shells)} is {own}"
        )
        raise Refused(bad_request(text, code="rank_contradiction", param="routed_dp_rank", side=self.role))

    def _dp_of(self, generation: Generation) -> int:
        assert generation.room is not None
        if not self._by_load:
            return dp_of(generation.room, len(self.shells))
        dp = super()._dp_of(generation)
        self._tell(generation.room, dp)
        self._not_elsewhere(generation.room, dp)
        return dp

    def _not_elsewhere(self, room: Room, dp: int) -> None:
        """A decode whose leg names another rank of ours, and so asks there, hears at once that they contradict."""
        text = f"room {room} was taken by data parallel rank {dp}, and decode's leg names another rank"
        cause = bad_request(text, code="rank_contradiction", param="disagg_prefill_dp_rank", side=self.role)
        for other, shell in enumerate(self.shells):
            if other != dp:
                shell.leg_refused(room, cause)

    def _tell(self, room: Room, dp: int) -> None:
        if self._by_load and len(self.shells) > 1:
            self.tell_rank(room, dp)


class DecodeGroup(Group[DecodeShell]):
    def __init__(self, config: WorkerConfig, process: Instance, shells: Sequence[DecodeShell]) -> None:
        super().__init__(config, process, shells)
        self.default_bootstrap_port = config.bootstrap_port

    def release(self, instance: str, grant: int) -> int:
        return released_unproven(self.shells, instance, grant)


class AggregatedGroup(Group[AggregatedShell]):
    def __init__(self, config: WorkerConfig, process: Instance, shells: Sequence[AggregatedShell]) -> None:
        super().__init__(config, process, shells)
        self.key_page_size = 0  # it keeps no prompts


RoomsGroup = PrefillGroup | DecodeGroup | AggregatedGroup


class Releasing(Protocol):
    instance: Instance

    def release(self, grant: GrantNo) -> int: ...


def released_unproven(shells: Sequence[Releasing], instance: str, grant: int) -> int:
    """On an operator's word: how many pages of this grant are free again."""
    shell = next((one for one in shells if one.instance == instance), None)
    freed = shell.release(GrantNo(grant)) if shell else 0
    if freed:
        log.warning("an operator released %d pages of grant %d of %s: unproven", freed, grant, instance)
    return freed


def _nobody_asks(room: Room, dp: int) -> None:
    """Before there is a registry."""
