"""The frames of a control session, as types. Their bytes are wire/control.py's business.

One FIFO session joins one (prefill rank, decode rank) pair of instances. Every room frame carries the whole
identity (rule 2): room, grant number, sender instance (`src`), target instance (`dst`) and the prefill rank.
Grant 0 stands for "none yet". What crosses as a time is time left, encoded when the frame is really written.
"""

from __future__ import annotations

from typing import TypedDict

import msgspec

from .errors import Cause
from .ids import NO_GRANT, GrantNo, HoldNo, Instance, PageId, Rank, Rid, Room, Shape
from .layout import Stamp


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: int
    logprob: float


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """What SUCCESS carries beside the pages: prefill's sampled token and what decode needs to go on.

    `finish_reason` ("stop" | "length") is set where prefill saw the end: decode then emits without decoding.
    """

    first_token: int
    prompt_tokens: int
    prompt_digest: bytes
    cached_tokens: int = 0
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()
    finish_reason: str | None = None


class PromptId(msgspec.Struct, frozen=True, array_like=True):
    """Which prompt: blake2b-128 over its token ids as u32 little-endian, and their count."""

    digest: bytes
    tokens: int


# --- session frames -------------------------------------------------------------------------------------------


class DataEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank takes pages by one kind of transport, or (at prefill) that it can send by it.

    `where`: the host that both ends must share ("" for kinds that cross hosts). `token` must be the mover's first
    word there."""

    kind: str
    where: str = ""
    host: str = ""
    port: int = 0
    token: str = ""


class Hello(msgspec.Struct, frozen=True, tag="hello", tag_field="t"):
    """First frame of the dialler (decode). `dst` "" accepts whoever listens. `data`: where prefill may move pages to,
    by kind; the three `data_` fields say the same of tcp, for a prefill of protocol 1."""

    src: Instance
    dst: Instance
    rank: Rank  # of the sender
    stamp: Stamp
    protocol_min: int = 1
    protocol_max: int = 1
    data_host: str = ""
    data_port: int = 0
    data_token: str = ""
    secret: str = ""
    shape: Shape = Shape()
    data: tuple[DataEndpoint, ...] = ()


class Welcome(msgspec.Struct, frozen=True, tag="welcome", tag_field="t"):
    """The listener's (prefill) answer: the session is up, and pages will come by transport `data_kind`."""

    src: Instance
    dst: Instance
    rank: Rank
    stamp: Stamp
    protocol: int = 1
    shape: Shape = Shape()
    data_kind: str = "tcp"


class Reject(msgspec.Struct, frozen=True, tag="reject", tag_field="t"):
    """The session, or one frame on it, is refused; `src` is who the listener is now."""

    src: Instance
    cause: Cause


class Beat(msgspec.Struct, frozen=True, tag="beat", tag_field="t"):
    """Three facts: this session lives; how old the last engine step is and what runs; progress by room."""

    src: Instance
    step_age_s: float = 0.0
    running: int = 0
    waiting: int = 0
    progress: dict[int, int] = {}


class FrameIdentity(TypedDict):
    """Rule 2, as keyword arguments of a room frame."""

    room: Room
    grant: GrantNo
    src: Instance
    dst: Instance
    rank: Rank


# --- room frames, decode to prefill -----------------------------------------------------------------------------


class _RoomFrame(msgspec.Struct, frozen=True, tag_field="t", kw_only=True):
    room: Room
    grant: GrantNo = NO_GRANT
    src: Instance
    dst: Instance
    rank: Rank


class Announce(_RoomFrame, frozen=True, tag="announce", kw_only=True):
    """`prompt`: what decode's leg carries, so that another one is refused before it is computed (protocol 2). `policy`
    is for whoever reads the frames: HELLO has compared it."""

    policy: str = "early"
    prompt: PromptId | None = None


class Grant(_RoomFrame, frozen=True, tag="grant", kw_only=True):
    """`pages[i]` of the receiver's pool takes page decode_prefix_len + i of the prompt. Authorises writes to these
    pages only, and on this session only. `links`: the (prefill rank, decode rank) pairs of the whole grant; () where
    this one is all. `time_left_s` of the request is for whoever reads the frames: each leg has its own deadline.

    decode_prefix_len: how many pages of the prompt's head decode has already, all of them full (protocol 3). With all
    of them there, `pages` is empty, and SUCCESS and row are due all the same. Not sent where it is 0."""

    pages: tuple[PageId, ...]
    prompt: PromptId
    time_left_s: float
    links: tuple[tuple[Rank, Rank], ...] = ()
    decode_prefix_len: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def prefix_pages(self) -> int:
        """decode_prefix_len, 0 where it was not sent."""
        return 0 if self.decode_prefix_len is msgspec.UNSET else self.decode_prefix_len


class Abort(_RoomFrame, frozen=True, tag="abort", kw_only=True):
    cause: Cause


class Received(_RoomFrame, frozen=True, tag="received", kw_only=True):
    """Decode has committed, or given up with all ranks quiet: the row need not be kept any longer."""


# --- room frames, prefill to decode -----------------------------------------------------------------------------


class Ready(_RoomFrame, frozen=True, tag="ready", kw_only=True):
    """The prompt is computed and its KV held: decode may reserve and grant (prefill_complete). `held_s` more, for
    whoever reads the frames; decode trusts no clock but waits for FAILED."""

    held_s: float


class Success(_RoomFrame, frozen=True, tag="success", kw_only=True):
    row: Row


class Failed(_RoomFrame, frozen=True, tag="failed", kw_only=True):
    cause: Cause


class Drained(_RoomFrame, frozen=True, tag="drained", kw_only=True):
    """This rank writes no more under `grant`, ever."""


# --- frames of the params dialect -------------------------------------------------------------------------------------


class HoldIdentity(TypedDict):
    """Rule 2, as keyword arguments of a hold frame."""

    hold: HoldNo
    grant: GrantNo
    src: Instance
    dst: Instance
    rank: Rank


class _HoldFrame(msgspec.Struct, frozen=True, tag_field="t", kw_only=True):
    """`hold` is prefill's number. The consumer is decode's instance and its own `grant`, 0 before it has any."""

    hold: HoldNo
    grant: GrantNo = NO_GRANT
    src: Instance
    dst: Instance
    rank: Rank  # of prefill


class Read(_HoldFrame, frozen=True, tag="read", kw_only=True):
    """Bring held page `src_pages[i]` to granted page `dst_pages[i]`, over this link; on every link of `links` (() where
    this one is all). The pages are the last ones of the hold: what comes before them decode has. Said again after a
    lost session: what was under way goes on, what has failed is said again. `rid`: prefill's name of what it holds,
    which cannot be guessed as a number can."""

    src_pages: tuple[PageId, ...]
    dst_pages: tuple[PageId, ...]
    prompt: PromptId
    links: tuple[tuple[Rank, Rank], ...] = ()
    rid: Rid = Rid("")


class Confirm(_HoldFrame, frozen=True, tag="confirm", kw_only=True):
    """Every read has completed. Was the hold still held, and this consumer's? Answered by CONFIRMED; with that answer
    the hold is over: one consumer each."""


class Release(_HoldFrame, frozen=True, tag="release", kw_only=True):
    """Decode will not read, or not go on reading. Not answered. `rid`: prefill's name of what it holds; numbers can be
    guessed, so that of one who has read nothing yet this is what shows that the hold was answered to it."""

    cause: Cause
    rid: Rid = Rid("")


class _Leases(msgspec.Struct, frozen=True, tag_field="t", kw_only=True):
    src: Instance
    dst: Instance
    rank: Rank  # of prefill
    holds: tuple[HoldNo, ...]


class Renew(_Leases, frozen=True, tag="renew", kw_only=True):
    """All that this decode still wants of this prefill, in one frame."""


class Renewed(_Leases, frozen=True, tag="renewed", kw_only=True):
    """Which of them are held for this decode, for `lease_s` from now. The others are not, and `why` says why: a renewal
    revives nothing. Not sent where all are held."""

    lease_s: float
    why: dict[HoldNo, Cause] | msgspec.UnsetType = msgspec.UNSET


class Confirmed(_HoldFrame, frozen=True, tag="confirmed", kw_only=True):
    """`refusal` None: it was held until this moment, so nothing that was read could have been another's."""

    refusal: Cause | None = None


class ReadFailed(_HoldFrame, frozen=True, tag="read_failed", kw_only=True):
    """The pages of this link will not all come."""

    cause: Cause


SessionFrame = Hello | Welcome | Reject | Beat
ToPrefill = Announce | Grant | Abort | Received
ToDecode = Ready | Success | Failed | Drained
RoomFrame = ToPrefill | ToDecode
ToHolder = Read | Confirm | Release | Renew
ToReader = Confirmed | ReadFailed | Renewed
HoldFrame = ToHolder | ToReader
Frame = SessionFrame | RoomFrame | HoldFrame
