"""Every input of the core. The shell (a worker process, or the simulator) reports what happened; the core decides.

Times are seconds on one monotonic clock, passed beside the event. What people and clients ask for (`LegArrived`,
`RequestArrived`, `JobArrived`, `Cancel`, `Drain`, `OperatorRelease`) stands first; all else is fact.
"""

from __future__ import annotations

import msgspec

from .errors import Cause
from .frames import Frame, PromptId, TopLogprob
from .ids import ConnId, GrantNo, HoldNo, Instance, Link, MoveNo, PageId, Rank, Rid, Room, Shape


class ControlEndpoint(msgspec.Struct, frozen=True, order=True):
    """Where a prefill rank listens for control sessions."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


# --- from the HTTP edge -------------------------------------------------------------------------------------------


class KVOutput(msgspec.Struct, kw_only=True):
    """vLLM's KVConnectorOutput, by rids. finished_sending: held pages may be freed. finished_recving: a load is over,
    well or not; whoever is in failed_recving is in it too. invalid_block_ids: pages of loads which did not come whole,
    said with or before their finished_recving. confirmed (ours): nothing of this load can have been another's; until
    then no byte of its answer leaves."""

    finished_sending: set[Rid] = msgspec.field(default_factory=set)
    finished_recving: set[Rid] = msgspec.field(default_factory=set)
    failed_recving: dict[Rid, Cause] = msgspec.field(default_factory=dict)
    invalid_block_ids: set[PageId] = msgspec.field(default_factory=set)
    confirmed: set[Rid] = msgspec.field(default_factory=set)


class LegArrived(msgspec.Struct, frozen=True, kw_only=True):
    """One leg of an attempt. `address` is the registry of its prefill (decode side only). `max_new`: tokens wanted.
    `deadline` is absolute on the core's clock. An AnswerFailed for this rid among the effects of this very event is the
    newcomer's, also where the rid is in use: a shell does not let in a rid that another client still waits for.

    dp_rank: the prefill rank that was named explicitly (decode side only). page_keys: one key per full page of the
    prompt, each over all tokens up to that page's end (where prefixes are cached).
    """

    rid: Rid
    room: Room
    prompt: PromptId
    max_new: int
    deadline: float
    address: str = ""
    priority: int = 0
    dp_rank: int | None = None
    page_keys: tuple[bytes, ...] = ()


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What an answered kv_transfer_params names (the params dialect): where which KV is held, and of which prompt.

    pages: of the whole prompt, in order. endpoints: the control ports of the ranks of that dp group. lease_s: left when
    it was answered. rid: prefill's own name of the request; it goes with what is asked of the hold.
    """

    instance: Instance
    hold: HoldNo
    pages: tuple[PageId, ...]
    prompt: PromptId
    endpoints: tuple[tuple[Rank, ControlEndpoint], ...]
    shape: Shape
    dp: int
    lease_s: float
    rid: Rid = Rid("")


class RequestArrived(msgspec.Struct, frozen=True, kw_only=True):
    """A request of the params dialect. At prefill: compute and hold. At decode: read what `handle` names, and compute
    the prompt here where there is none. The rest as in LegArrived."""

    rid: Rid
    prompt: PromptId
    max_new: int
    deadline: float
    priority: int = 0
    page_keys: tuple[bytes, ...] = ()
    handle: Handle | None = None


class HandleRefused(msgspec.Struct, frozen=True):
    """Decode's edge has turned away a request that brought this handle: nobody will read it."""

    handle: Handle
    cause: Cause


class ReleaseHold(msgspec.Struct, frozen=True):
    """At prefill, by exact name: whoever was to read this will not (the client has left between the hops, decode cannot
    be reached)."""

    rid: Rid
    cause: Cause


class ConnectorOutput(msgspec.Struct, frozen=True):
    """What a connector's worker half on our rank `rank` has finished since it said so last (core/connector.py)."""

    rank: Rank
    output: KVOutput


class LegRefused(msgspec.Struct, frozen=True, kw_only=True):
    """A leg that the HTTP edge turned away before it could become one: the other side is told as soon as it asks."""

    room: Room
    cause: Cause


class JobArrived(msgspec.Struct, frozen=True, kw_only=True):
    """A request of an aggregated worker: no room, no peer. A refusal comes among the effects, as for a leg."""

    rid: Rid
    prompt_tokens: int
    max_new: int
    deadline: float
    priority: int = 0


class Cancel(msgspec.Struct, frozen=True):
    """The client of this leg has left, or an abort call named it."""

    rid: Rid
    cause: Cause


class Drain(msgspec.Struct, frozen=True):
    """No new rooms from now on; what runs finishes."""

    reason: str = "the worker is draining"


class OperatorRelease(msgspec.Struct, frozen=True):
    """An operator frees the quarantined pages of a grant without a proof."""

    grant: GrantNo


# --- from the registry and the control network --------------------------------------------------------------------


class RouteKnown(msgspec.Struct, frozen=True):
    """The registry at `address` answered: the group's shape, and which endpoint serves which rank. `follow_room`: a
    room's dp rank is room % dp; otherwise prefill says it per room (RankKnown)."""

    address: str
    ranks: tuple[tuple[Rank, ControlEndpoint], ...]
    shape: Shape = Shape()
    follow_room: bool = True


class RankKnown(msgspec.Struct, frozen=True):
    """The registry at `address` says which dp rank has taken this room; None where it does not know yet."""

    address: str
    room: Room
    dp_rank: int | None


class RouteFailed(msgspec.Struct, frozen=True):
    address: str
    cause: Cause


class Dialled(msgspec.Struct, frozen=True):
    endpoint: ControlEndpoint
    here: Rank
    conn: ConnId


class DialFailed(msgspec.Struct, frozen=True):
    endpoint: ControlEndpoint
    here: Rank
    error: str


class Accepted(msgspec.Struct, frozen=True):
    """On the control port of our rank `here`."""

    conn: ConnId
    here: Rank


class FrameIn(msgspec.Struct, frozen=True):
    conn: ConnId
    frame: Frame


class ConnLost(msgspec.Struct, frozen=True):
    conn: ConnId


# --- from the transport -------------------------------------------------------------------------------------------


class PagesLanded(msgspec.Struct, frozen=True):
    """What this link brings of these pages is complete."""

    grant: GrantNo
    link: Link
    pages: tuple[PageId, ...]


class GrantQuiet(msgspec.Struct, frozen=True):
    """The local fence of this rank and kind of transport has closed: nothing lands there under this grant any more."""

    grant: GrantNo
    here: Rank
    kind: str


class TornDown(msgspec.Struct, frozen=True):
    """Everything with this instance is cut on the data plane: no later byte of it can land under a grant up to `upto`
    (peer-level proof)."""

    peer: Instance
    upto: GrantNo


class MoveDone(msgspec.Struct, frozen=True):
    """error "": the pages are visible at the destination. Either way the source pages are not read any more."""

    move: MoveNo
    error: str = ""


# --- from the engine ----------------------------------------------------------------------------------------------


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """A step has run: KV of the first `tokens` tokens is in the pages."""

    rid: Rid
    tokens: int


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill's engine has the whole prompt and its first token; `ended` where that token is the last."""

    rid: Rid
    token: int
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()
    ended: str | None = None


class Retracted(msgspec.Struct, frozen=True, kw_only=True):
    """The engine has laid this request aside: KV of its first `tokens` tokens is copied to host memory, its pages are
    touched no more (own completion). Follows RetractEngine, unless a Released comes instead."""

    rid: Rid
    tokens: int


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """The engine touches this request's pages no more (own completion). `error` where it ended by a fault."""

    rid: Rid
    error: str = ""


# --- time ---------------------------------------------------------------------------------------------------------


class Tick(msgspec.Struct, frozen=True):
    """Time has come to what `next_due` said."""


Event = (
    LegArrived
    | RequestArrived
    | HandleRefused
    | ReleaseHold
    | ConnectorOutput
    | LegRefused
    | JobArrived
    | Cancel
    | Drain
    | OperatorRelease
    | RouteKnown
    | RouteFailed
    | RankKnown
    | Dialled
    | DialFailed
    | Accepted
    | FrameIn
    | ConnLost
    | PagesLanded
    | GrantQuiet
    | TornDown
    | MoveDone
    | Computed
    | Sampled
    | Retracted
    | Released
    | Tick
)
