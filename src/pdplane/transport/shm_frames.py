"""What is said on the local socket of the shared-memory transports: one msgpack array a packet, its first element the
kind. Pages never cross it, page numbers do.

    mover to landing   Bind   first, once; kind shm passes the mover's pool along, read-only
                       Pages  shm: copy these, please       (the landing copies)
                       Placed shm_push: these are in place  (the mover has copied)
    landing to mover   Bound  shm_push only: passes decode's pool and this peer's grant words along
                       Ack    of Pages or Placed, in order: what became of each

`seq` counts a connection's Pages or Placed from 1. Whatever does not fit raises BadData and ends the connection.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from pdplane.core.ids import GrantNo, PageId, Seat

from .contract import PAGES_PER_FRAME
from .landing_table import Verdict
from .tcp_frames import BadData

LOCAL_VERSION = 1
MAX_FRAME_BYTES = 4096
MAX_ACKS = 64

Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
PageList = Annotated[tuple[PageId, ...], Meta(min_length=1, max_length=PAGES_PER_FRAME)]


class Bind(msgspec.Struct, frozen=True, tag="bind", array_like=True):
    """Who dials whom, and the dialler's pool. The token is the target's, from its HELLO."""

    version: int
    src: Seat
    dst: Seat
    token: str
    pages: Count
    page_bytes: Count


class Pages(msgspec.Struct, frozen=True, tag="pages", array_like=True):
    """Page `src[i]` of the mover's pool shall go to page `dst[i]` of the landing's. `checksum` as checksum.py takes it
    of the source; None where none is wanted."""

    seq: int
    grant: GrantNo
    src: PageList
    dst: PageList
    checksum: int | None = None


class Placed(msgspec.Struct, frozen=True, tag="placed", array_like=True):
    """These pages were written under the grant, or, where not `written`, the mover found no such grant to write under
    and asks why."""

    seq: int
    grant: GrantNo
    dst: PageList
    written: bool
    checksum: int | None = None


class Bound(msgspec.Struct, frozen=True, tag="bound", array_like=True):
    """The landing's pool, and how many words its table of grants has."""

    pages: Count
    page_bytes: Count
    slots: Count


class Ack(msgspec.Struct, frozen=True, tag="ack", array_like=True):
    """verdicts[i]: what became of frame `seq` + i."""

    seq: int
    verdicts: Annotated[tuple[Verdict, ...], Meta(min_length=1, max_length=MAX_ACKS)]


ToLanding = Bind | Pages | Placed
ToMover = Bound | Ack

T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode
_to_landing: msgspec.msgpack.Decoder[ToLanding] = msgspec.msgpack.Decoder(ToLanding)
_to_mover: msgspec.msgpack.Decoder[ToMover] = msgspec.msgpack.Decoder(ToMover)


def decode_to_landing(packet: bytes) -> ToLanding:
    return _decode(_to_landing, packet)


def decode_to_mover(packet: bytes) -> ToMover:
    return _decode(_to_mover, packet)


def _decode(decoder: msgspec.msgpack.Decoder[T], packet: bytes) -> T:
    try:
        return decoder.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadData(f"packet of {len(packet)} bytes that is no frame of ours: {error}") from None
