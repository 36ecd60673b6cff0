"""Everything that a machine may ask its shell to do. Effects are carried out in order; a shell never refuses one.

What an effect leads to comes back as an event: a machine never waits and never acts.
"""

from __future__ import annotations

import msgspec

from .errors import Cause
from .events import ControlEndpoint
from .frames import Frame, Row
from .ids import ConnId, GrantNo, Instance, MoveNo, PageId, Rid, Room

# --- control network ----------------------------------------------------------------------------------------------


class LookUp(msgspec.Struct, frozen=True):
    """Ask the registry at `address` -> RouteKnown | RouteFailed."""

    address: str


class Dial(msgspec.Struct, frozen=True):
    """-> Dialled | DialFailed."""

    endpoint: ControlEndpoint


class SendFrame(msgspec.Struct, frozen=True):
    """Write; where the connection is gone already its ConnLost says so."""

    conn: ConnId
    frame: Frame


class CloseConn(msgspec.Struct, frozen=True):
    """Flush and close; no ConnLost follows."""

    conn: ConnId


# --- transport, decode's end --------------------------------------------------------------------------------------


class ArmGrant(msgspec.Struct, frozen=True):
    """Let `peers` land these pages under the grant. Precedes the GRANT frames (O2)."""

    grant: GrantNo
    peers: tuple[Instance, ...]
    pages: tuple[PageId, ...]


class RevokeGrant(msgspec.Struct, frozen=True):
    """Close the local fence -> GrantQuiet, at once or when the last landing ends."""

    grant: GrantNo


class DisarmGrant(msgspec.Struct, frozen=True):
    grant: GrantNo


# --- transport, prefill's end -------------------------------------------------------------------------------------


class ConnectData(msgspec.Struct, frozen=True):
    peer: Instance
    host: str
    port: int
    token: str


class MovePages(msgspec.Struct, frozen=True):
    """Write page `src[i]` of ours to page `dst[i]` of the peer -> MoveDone, exactly once."""

    move: MoveNo
    grant: GrantNo
    peer: Instance
    src: tuple[PageId, ...]
    dst: tuple[PageId, ...]


class CancelMoves(msgspec.Struct, frozen=True):
    grant: GrantNo
    peer: Instance


class Teardown(msgspec.Struct, frozen=True):
    """Cut everything with this instance on the data plane."""

    peer: Instance


# --- engine -------------------------------------------------------------------------------------------------------


class RunPrefill(msgspec.Struct, frozen=True):
    """-> Computed..., Sampled, Released."""

    rid: Rid
    pages: tuple[PageId, ...]


class RunDecode(msgspec.Struct, frozen=True):
    """Go on from the row -> Computed..., Released. `max_new` counts the row's token; it may be less than was asked
    where the pool cannot hold more."""

    rid: Rid
    pages: tuple[PageId, ...]
    row: Row
    max_new: int


class RunWhole(msgspec.Struct, frozen=True):
    """An aggregated request, from its prompt -> Computed..., Released."""

    rid: Rid
    pages: tuple[PageId, ...]
    max_new: int


class ExtendPages(msgspec.Struct, frozen=True):
    rid: Rid
    pages: tuple[PageId, ...]


class AbortEngine(msgspec.Struct, frozen=True):
    """-> Released."""

    rid: Rid


# --- answers ------------------------------------------------------------------------------------------------------


class AnswerFailed(msgspec.Struct, frozen=True):
    """The terminal answer of a leg; at most one answer per rid, ever."""

    rid: Rid
    cause: Cause


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
    | Dial
    | SendFrame
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
    | ExtendPages
    | AbortEngine
    | AnswerFailed
    | AnswerRow
    | Note
    | Count
    | Alarm
)
