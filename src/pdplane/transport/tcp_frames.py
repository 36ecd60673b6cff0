"""The data connection's bytes, all little-endian. Prefill dials and says BIND once, then PAGES; decode answers ACKs.

    BIND   "pdkv" version 1 | src_len u16 | dst_len u16 | token_len u16 | page_bytes u32 |
           [version 2: src rank and dst rank, each dp, cp, tp, pp u16] | src, dst, token (UTF-8)
    PAGES  "pdkv" version 2 | count u16 | page_bytes u32 | seq u64 | grant u64 | [version 2: 0 u64] |
           count x page u32 | count x page_bytes
    ACK    "pdkv" version 3 | verdict u16 | seq u64
    SUMMED "pdkv" version 4 | as PAGES of version 2, with the pages' xxh3_64 in place of the 0

BIND's `page_bytes` is a page of decode's pool, that of PAGES what the link's slice moves of one. `seq` counts the
connection's PAGES frames from 1. An ACK says that the frame's last byte has been read, and what became of it
(landing_table.Verdict): 0 means visible in the pool. Which head comes next is known from the state, so a head is read
at its full length; anything unexpected raises BadData and ends the connection.

Version 1 joins the ranks 0 of both sides and moves whole pages without a checksum. A connection keeps its BIND's
version; a mover speaks the lowest one that says what it has to say, so that either version pairs with the other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from pdplane.core.ids import GrantNo, Instance, PageId, Rank, Seat

from .contract import PAGES_PER_FRAME
from .landing_table import Verdict

MAGIC = b"pdkv"
VERSIONS = (1, 2)
MAX_NAME_BYTES = 512

_BIND, _PAGES, _ACK, _SUMMED = 1, 2, 3, 4
_BIND_HEAD = struct.Struct("<4sBBHHHI")
_RANKS = struct.Struct("<8H")
_PAGES_HEAD = {1: struct.Struct("<4sBBHIQQ"), 2: struct.Struct("<4sBBHIQQQ")}
_ACK_FRAME = struct.Struct("<4sBBHQ")

BIND_HEAD_BYTES = _BIND_HEAD.size
ACK_BYTES = _ACK_FRAME.size


class BadData(ValueError):
    """The data stream is not ours from here on."""


class Bind(msgspec.Struct, frozen=True):
    """Who dials whom. The token is the target's, from its HELLO."""

    src: Seat
    dst: Seat
    token: str
    page_bytes: int
    version: int = 2


class BindHead(msgspec.Struct, frozen=True):
    """The lengths of what follows it."""

    version: int
    src: int
    dst: int
    token: int
    page_bytes: int

    @property
    def rest(self) -> int:
        ranks = _RANKS.size if self.version > 1 else 0
        return ranks + self.src + self.dst + self.token


class PagesHead(msgspec.Struct, frozen=True):
    """`count` page numbers of 4 bytes, then as many pages of `page_bytes`, follow."""

    count: int
    seq: int
    grant: GrantNo
    page_bytes: int
    checksum: int | None = None


def pages_head_bytes(version: int) -> int:
    return _PAGES_HEAD[version].size


def encode_bind(bind: Bind) -> bytes:
    names = [part.encode() for part in (bind.src.instance, bind.dst.instance, bind.token)]
    head = _BIND_HEAD.pack(MAGIC, bind.version, _BIND, *(len(name) for name in names), bind.page_bytes)
    return head + (_encode_ranks(bind.src.rank, bind.dst.rank) if bind.version > 1 else b"") + b"".join(names)


def _encode_ranks(*ranks: Rank) -> bytes:
    return _RANKS.pack(*(axis for rank in ranks for axis in (rank.dp, rank.cp, rank.tp, rank.pp)))


def decode_bind_head(data: bytes | bytearray) -> BindHead:
    magic, version, kind, src, dst, token, page_bytes = _BIND_HEAD.unpack(data)
    _check(magic, version, VERSIONS)
    _check_kind(kind, _BIND)
    if max(src, dst, token) > MAX_NAME_BYTES or not src:
        raise BadData(f"bind with names of {src}, {dst} and {token} bytes: 1 to {MAX_NAME_BYTES} are legal")
    return BindHead(version, src, dst, token, page_bytes)


def decode_bind(head: BindHead, rest: bytes | bytearray) -> Bind:
    axes = _RANKS.unpack_from(rest) if head.version > 1 else (0,) * 8
    names = rest[len(rest) - head.src - head.dst - head.token :]
    try:
        src, dst, token = (
            bytes(part).decode()
            for part in (names[: head.src], names[head.src : head.src + head.dst], names[head.src + head.dst :])
        )
    except UnicodeDecodeError as error:
        raise BadData(f"bind with a name that is not UTF-8: {error}") from None
    seats = Seat(Instance(src), Rank(*axes[:4])), Seat(Instance(dst), Rank(*axes[4:]))
    return Bind(*seats, token, head.page_bytes, head.version)


def encode_pages_head(head: PagesHead, pages: Sequence[PageId], version: int = 2) -> bytes:
    kind = _PAGES if head.checksum is None else _SUMMED
    fields = [MAGIC, version, kind, head.count, head.page_bytes, head.seq, head.grant]
    if version > 1:
        fields.append(head.checksum or 0)
    return _PAGES_HEAD[version].pack(*fields) + struct.pack(f"<{len(pages)}I", *pages)


def decode_pages_head(data: bytes | bytearray, version: int = 2) -> PagesHead:
    magic, their_version, kind, count, page_bytes, seq, grant, *checksum = _PAGES_HEAD[version].unpack(data)
    _check(magic, their_version, (version,))
    summed = version > 1 and kind == _SUMMED
    if not summed:
        _check_kind(kind, _PAGES)
    if not 1 <= count <= PAGES_PER_FRAME:
        raise BadData(f"frame of {count} pages: 1 to {PAGES_PER_FRAME} are legal")
    return PagesHead(count, seq, GrantNo(grant), page_bytes, checksum[0] if summed else None)


def decode_page_ids(data: bytes | bytearray) -> list[PageId]:
    return [PageId(page) for page in struct.unpack(f"<{len(data) // 4}I", data)]


def encode_ack(seq: int, verdict: Verdict, version: int = 2) -> bytes:
    """Version 1 knows no verdict beyond CUT."""
    if version == 1 and verdict > Verdict.CUT:
        verdict = Verdict.NOT_GRANTED
    return _ACK_FRAME.pack(MAGIC, version, _ACK, verdict, seq)


def decode_ack(data: bytes | bytearray | memoryview, version: int = 2) -> tuple[int, Verdict]:
    magic, their_version, kind, verdict, seq = _ACK_FRAME.unpack(data)
    _check(magic, their_version, (version,))
    _check_kind(kind, _ACK)
    try:
        return seq, Verdict(verdict)
    except ValueError:
        raise BadData(f"ack with the unknown verdict {verdict}") from None


def _check(magic: bytes, version: int, spoken: tuple[int, ...]) -> None:
    if magic != MAGIC:
        raise BadData(f"frame begins with {magic!r}, not {MAGIC!r}: is this a data port?")
    if version not in spoken:
        raise BadData(f"data frame of version {version}, this side reads version {' and '.join(map(str, spoken))} here")


def _check_kind(kind: int, wanted: int) -> None:
    if kind != wanted:
        raise BadData(f"data frame of kind {kind} where {wanted} is due")
