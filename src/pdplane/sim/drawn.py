"""What has been drawn for one world: its fleet, its requests, its faults; plan.py draws it."""

from __future__ import annotations

import msgspec

from pdplane.core.ids import Shape
from pdplane.core.layout import ROOMS
from pdplane.core.node import Limits

from .faults import (
    WEIGHTS,
    Crash,
    DrainWorker,
    Fault,
    Freeze,
    LostMoves,
    MissingRank,
    Partition,
    Release,
    SlowRegistry,
    SlowTransfer,
    StrayFrame,
    StuckMoves,
    WrongRow,
)

BESIDE_THE_NETWORK = (
    DrainWorker,
    LostMoves,
    MissingRank,
    Release,
    SlowRegistry,
    SlowTransfer,
    StrayFrame,
    StuckMoves,
    WrongRow,
)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One client request. Delays are on top of the network's.

    prompt: which prompt, so that two requests may share one; its first `family_tokens` tokens are those of every prompt
    of its `family`. leaves_after_s: the client closes its connection.
    room_of: uses the room of that request (a router that mints badly). refused_at: the HTTP edge of that side turns
    the leg away. stops_at: it ends after so many tokens, if not before. breaks_at: the engine of that side fails on it.
    prompts_differ: the legs carry different ones. wrong_rank: decode's leg names a prefill rank that its prefill is
    not. aggregated: for the worker that does both.

    In the params dialect: replays: what prefill has answered is presented to a decode once more, "sent": so long after
    it was sent to the first, or "ended": after the answer to that. tampers: what of it is not what prefill has
    answered: "blocks", "digest" (and decode's prompt is of that digest), "hold" or "instance".
    """

    number: int
    at_s: float
    prompt: int
    prompt_tokens: int
    max_new: int
    stops_at: int
    leaves_after_s: float | None
    deadline_s: float
    prefill_delay_s: float = 0.0
    decode_delay_s: float = 0.0
    room_of: int | None = None
    refused_at: str = ""
    breaks_at: str = ""
    priority: int = 0
    family: int = 0
    family_tokens: int = 0
    prompts_differ: bool = False
    wrong_rank: bool = False
    aggregated: bool = False
    replays: str = ""
    replay_delay_s: float = 0.0
    tampers: str = ""

    @property
    def impossible(self) -> bool:
        """Whatever else happens, it must not be answered."""
        return self.prompts_differ or self.wrong_rank


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`patterns` is what `pattern` stands for; `router_tells`: a leg's end at the router reaches the worker (many
    real routers never tell, and the protocol must do without). `prefill_step`: how much longer its engine's steps take.
    `delay_s`: the range of a frame's delay; `hop_s`: of what goes between router and workers. `tp`: tensor parallel
    ranks of (prefill, decode). `dp`: the prefills are the data parallel ranks of one group. `names_rank`: legs name the
    prefill rank. `teardown_proves`: the transport's.
    `aborts_again`: abort calls are repeated, up to seconds later. `new_ports`: a restarted prefill listens elsewhere.
    `aggregated`: a worker of that kind, or none. `lease_margin_s`: the router sends decode's leg only with more than
    that left of the lease.
    """

    seed: int
    pattern: str
    patterns: tuple[str, ...]
    fence: bool
    teardown_proves: bool
    policy: str
    tp: tuple[int, int]
    dp: bool
    follow_room: bool
    names_rank: bool
    aborts_again: bool
    new_ports: bool
    aggregated: tuple[str, ...]
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    prefill_limits: Limits
    decode_limits: Limits
    prefill_step: float
    delay_s: tuple[float, float]
    hop_s: tuple[float, float]
    router_tells: bool
    retries: int
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    dialect: str = ROOMS
    lease_margin_s: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Of all processes."""
        return (*self.prefills, *self.decodes, *self.aggregated)

    def limits_of(self, name: str) -> Limits:
        return self.prefill_limits if name in self.prefills else self.decode_limits

    def shape_of(self, side: str) -> Shape:
        dp = len(self.prefills) if self.dp and side == "prefill" else 1
        return Shape(dp=dp, tp=self.tp[0] if side == "prefill" else self.tp[1])

    def dp_of(self, name: str) -> int:
        return self.prefills.index(name) if self.dp and name in self.prefills else 0

    @property
    def shares_prefixes(self) -> bool:
        """On either side."""
        return self.prefill_limits.prefix_cache or self.decode_limits.prefix_cache

    @property
    def calm_network(self) -> bool:
        """Nothing stands between a frame and its receiver."""
        return all(isinstance(fault, BESIDE_THE_NETWORK) for fault in self.faults)

    @property
    def trouble_s(self) -> float:
        """How long faults may hold up an end, at most."""
        held = [fault.for_s for fault in self.faults if isinstance(fault, Freeze)]
        down = [fault.restart_after_s for fault in self.faults if isinstance(fault, Crash)]
        cut = [fault.for_s for fault in self.faults if isinstance(fault, Partition)]
        return sum(held) + sum(down) + sum(cut) + (0.0 if self.calm_network else 20.0)

    @property
    def unfit_until_s(self) -> float:
        """From when on all workers serve the same model, and have had time to see it."""
        if not any(isinstance(fault, Crash) and fault.weights != WEIGHTS for fault in self.faults):
            return 0.0
        return 10.0 + max(fault.at_s + fault.restart_after_s for fault in self.faults if isinstance(fault, Crash))

    @property
    def crashes(self) -> bool:
        return any(isinstance(fault, Crash) for fault in self.faults)
