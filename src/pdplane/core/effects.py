"""Everything that a machine may ask its shell to do. Effects are carried out in order; a shell never refuses one.

What an effect leads to comes back as an event: a machine never waits and never acts.
"""

from __future__ import annotations

import msgspec

from .errors import Cause
from .events import ControlEndpoint
from .frames import DataEndpoint, Frame, Row
from .ids import NO_GRANT, ConnId, GrantNo, HoldNo, Instance, Link, MoveNo, PageId, Rank, Rid, Room
from .layout import OLDEST_PROTOCOL
from .slices import Slice

# --- control network ----------------------------------------------------------------------------------------------


class LookUp(msgspec.Struct, frozen=True):
    """Ask the registry at `address` -> RouteKnown | RouteFailed."""

    address: str


class LookUpRank(msgspec.Struct, frozen=True):
    """Ask the registry at `address` which dp rank has this room -> RankKnown | RouteFailed."""

    address: str
    room: Room


class Dial(msgspec.Struct, frozen=True):
    """For our rank `here` -> Dialled | DialFailed."""

    endpoint: ControlEndpoint
    here: Rank


class SendFrame(msgspec.Struct, frozen=True):
    """Write; where the connection is gone already its ConnLost says so."""

    conn: ConnId
    frame: Frame


class SessionRefused(msgspec.Struct, frozen=True):
    """For whoever asks why two workers do not pair: a session with `peer` ("" where it was not told) was refused, by us
    or by the peer."""

    peer: Instance
    cause: Cause


class CloseConn(msgspec.Struct, frozen=True):
    """Flush and close; no ConnLost follows."""

    conn: ConnId


# --- transport, decode's end --------------------------------------------------------------------------------------


class Lane(msgspec.Struct, frozen=True):
    """How one link's pages come: by which kind of transport, and what of each page. `protocol`: what its session
    speaks."""

    link: Link
    kind: str
    slice: Slice
    protocol: int = OLDEST_PROTOCOL


class ArmGrant(msgspec.Struct, frozen=True):
    """Let these lanes land these pages under the grant. Precedes the GRANT frames (O2). `shared`: the pages of the
    prompt's head that are here already, for whoever watches: nothing lands there."""

    grant: GrantNo
    pages: tuple[PageId, ...]
    lanes: tuple[Lane, ...]
    shared: tuple[PageId, ...] = ()


class RevokeGrant(msgspec.Struct, frozen=True):
    """Close the local fence of this rank and kind, where there is one -> GrantQuiet, at once or when the last landing
    ends. Where there is none, nothing may ever come."""

    grant: GrantNo
    here: Rank
    kind: str


class DisarmGrant(msgspec.Struct, frozen=True):
    """Forget the grant, on this rank and kind."""

    grant: GrantNo
    here: Rank
    kind: str


# --- transport, prefill's end -------------------------------------------------------------------------------------


class ConnectData(msgspec.Struct, frozen=True):
    """Pages for this link go to `endpoint`; `slice`: what of each page."""

    link: Link
    endpoint: DataEndpoint
    slice: Slice


class MovePages(msgspec.Struct, frozen=True):
    """Write (our link's slice of) page `src[i]` to page `dst[i]` of the peer -> MoveDone, exactly once."""

    move: MoveNo
    grant: GrantNo
    link: Link
    src: tuple[PageId, ...]
    dst: tuple[PageId, ...]


class CancelMoves(msgspec.Struct, frozen=True):
    grant: GrantNo
    link: Link


class Teardown(msgspec.Struct, frozen=True):
    """Cut everything with this instance on the data plane -> TornDown, with the same `upto`, where that proves that
    nothing of it lands any more. At decode, `upto` is the last grant that was given to anybody."""

    peer: Instance
    upto: GrantNo = NO_GRANT


# --- engine -------------------------------------------------------------------------------------------------------


class RunPrefill(msgspec.Struct, frozen=True):
    """-> Computed..., Sampled, Released. The first `cached_tokens` have their KV in the pages already, which are
    shared: they are read and not written."""

    rid: Rid
    pages: tuple[PageId, ...]
    cached_tokens: int = 0


class RunDecode(msgspec.Struct, frozen=True):
    """Go on from the row -> Computed..., Released. `max_new` counts the row's token; it may be less than was asked
    where the pool cannot hold more."""

    rid: Rid
    pages: tuple[PageId, ...]
    row: Row
    max_new: int


class RunWhole(msgspec.Struct, frozen=True):
    """A request from its prompt -> Computed..., Released. The first `computed` tokens have their KV in the pages, of
    which the first `shared` are only read; the last token is recomputed in any case, for its logits. gated: nothing of
    it goes to the client before Ungate; a second RunWhole of the rid, after its Released, begins anew."""

    rid: Rid
    pages: tuple[PageId, ...]
    max_new: int
    computed: int = 0
    shared: int = 0
    gated: bool = False


class Ungate(msgspec.Struct, frozen=True):
    """What was held back of this request's answer goes out, and what follows goes as it comes."""

    rid: Rid


class ConnectorWork(msgspec.Struct, frozen=True):
    """For the connector's worker half on every rank, which alone understands it -> ConnectorOutput of each rank."""

    work: object


class ExtendPages(msgspec.Struct, frozen=True):
    rid: Rid
    pages: tuple[PageId, ...]


class RetractEngine(msgspec.Struct, frozen=True):
    """Lay this request aside at the end of the step, its KV copied to host memory -> Retracted, or the Released of an
    end that came first."""

    rid: Rid
    pages: tuple[PageId, ...]


class RestoreEngine(msgspec.Struct, frozen=True):
    """Copy the KV of a retracted request back, bit for bit, into these pages, and go on."""

    rid: Rid
    pages: tuple[PageId, ...]


class FinishEngine(msgspec.Struct, frozen=True):
    """End this request here with finish reason `length`: it cannot grow, and nobody else holds pages. -> Released."""

    rid: Rid


class AbortEngine(msgspec.Struct, frozen=True):
    """-> Released."""

    rid: Rid


# --- answers ------------------------------------------------------------------------------------------------------


class AnswerFailed(msgspec.Struct, frozen=True):
    """The terminal answer of a leg; at most one answer per rid, ever."""

    rid: Rid
    cause: Cause


class AnswerHeld(msgspec.Struct, frozen=True):
    """Prefill's answer in the params dialect: the prompt is computed, and its KV is held for whoever presents this."""

    rid: Rid
    row: Row
    hold: HoldNo
    pages: tuple[PageId, ...]
    lease_s: float


class AnswerRow(msgspec.Struct, frozen=True):
    """Prefill: the leg is done (200, one token). Decode: the row ended the request, nothing to decode."""

    rid: Rid
    row: Row


# --- observation --------------------------------------------------------------------------------------------------


class Note(msgspec.Struct, frozen=True):
    """For the request's record: it is now in `state`."""

    rid: Rid
    room: Room | None
    state: str
    detail: str = ""


class Count(msgspec.Struct, frozen=True):
    name: str
    label: str = ""


class Alarm(msgspec.Struct, frozen=True):
    """Something that a person must see: pages quarantined, conservation broken."""

    text: str


Effect = (
    LookUp
    | LookUpRank
    | Dial
    | SendFrame
    | SessionRefused
    | CloseConn
    | ArmGrant
    | RevokeGrant
    | DisarmGrant
    | ConnectData
    | MovePages
    | CancelMoves
    | Teardown
    | RunPrefill
    | RunDecode
    | RunWhole
    | Ungate
    | ConnectorWork
    | ExtendPages
    | RetractEngine
    | RestoreEngine
    | FinishEngine
    | AbortEngine
    | AnswerFailed
    | AnswerRow
    | AnswerHeld
    | Note
    | Count
    | Alarm
)
