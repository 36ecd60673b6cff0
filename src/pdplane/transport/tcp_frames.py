"""The data connection's bytes, all little-endian. Prefill dials and says BIND once, then PAGES; decode answers ACKs.

    BIND   "pdkv" version 1 | src_len u16 | dst_len u16 | token_len u16 | page_bytes u32 | src, dst, token (UTF-8)
    PAGES  "pdkv" version 2 | count u16 | page_bytes u32 | seq u64 | grant u64 | count x page u32 | count x page_bytes
    ACK    "pdkv" version 3 | verdict u16 | seq u64

`seq` counts the connection's PAGES frames from 1. An ACK says that the frame's last byte has been read, and what
became of it (landing_table.Verdict): 0 means visible in the pool. Which head comes next is known from the state, so a
head is read at its full length; anything unexpected raises BadData and ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from pdplane.core.ids import GrantNo, Instance, PageId

from .contract import PAGES_PER_FRAME
from .landing_table import Verdict

MAGIC = b"pdkv"
DATA_VERSION = 1
MAX_NAME_BYTES = 512

_BIND, _PAGES, _ACK = 1, 2, 3
_BIND_HEAD = struct.Struct("<4sBBHHHI")
_PAGES_HEAD = struct.Struct("<4sBBHIQQ")
_ACK_FRAME = struct.Struct("<4sBBHQ")

BIND_HEAD_BYTES = _BIND_HEAD.size
PAGES_HEAD_BYTES = _PAGES_HEAD.size
ACK_BYTES = _ACK_FRAME.size


class BadData(ValueError):
    """The data stream is not ours from here on."""


class Bind(msgspec.Struct, frozen=True):
    """Who dials whom. The token is the target's, from its HELLO."""

    src: Instance
    dst: Instance
    token: str
    page_bytes: int


class PagesHead(msgspec.Struct, frozen=True):
    """`count` page numbers of 4 bytes, then as many pages, follow."""

    count: int
    seq: int
    grant: GrantNo


def encode_bind(bind: Bind) -> bytes:
    names = [part.encode() for part in (bind.src, bind.dst, bind.token)]
    head = _BIND_HEAD.pack(MAGIC, DATA_VERSION, _BIND, *(len(name) for name in names), bind.page_bytes)
    return head + b"".join(names)


def bind_lengths(head: bytes | bytearray) -> tuple[int, int, int, int]:
    """(src, dst, token lengths, page_bytes) of a BIND head."""
    magic, version, kind, src, dst, token, page_bytes = _BIND_HEAD.unpack(head)
    _check(magic, version, kind, _BIND)
    if max(src, dst, token) > MAX_NAME_BYTES or not src:
        raise BadData(f"bind with names of {src}, {dst} and {token} bytes: 1 to {MAX_NAME_BYTES} are legal")
    return src, dst, token, page_bytes


def decode_bind(lengths: tuple[int, int, int, int], names: bytes | bytearray) -> Bind:
    src, dst, _token, page_bytes = lengths
    try:
        text = [bytes(part).decode() for part in (names[:src], names[src : src + dst], names[src + dst :])]
    except UnicodeDecodeError as error:
        raise BadData(f"bind with a name that is not UTF-8: {error}") from None
    return Bind(Instance(text[0]), Instance(text[1]), text[2], page_bytes)


def encode_pages_head(head: PagesHead, page_bytes: int, pages: Sequence[PageId]) -> bytes:
    fixed = _PAGES_HEAD.pack(MAGIC, DATA_VERSION, _PAGES, head.count, page_bytes, head.seq, head.grant)
    return fixed + struct.pack(f"<{len(pages)}I", *pages)


def decode_pages_head(data: bytes | bytearray, page_bytes: int) -> PagesHead:
    magic, version, kind, count, their_page_bytes, seq, grant = _PAGES_HEAD.unpack(data)
    _check(magic, version, kind, _PAGES)
    if not 1 <= count <= PAGES_PER_FRAME:
        raise BadData(f"frame of {count} pages: 1 to {PAGES_PER_FRAME} are legal")
    if their_page_bytes != page_bytes:
        raise BadData(f"pages of {their_page_bytes} bytes, this pool has pages of {page_bytes}")
    return PagesHead(count, seq, GrantNo(grant))


def decode_page_ids(data: bytes | bytearray) -> list[PageId]:
    return [PageId(page) for page in struct.unpack(f"<{len(data) // 4}I", data)]


def encode_ack(seq: int, verdict: Verdict) -> bytes:
    return _ACK_FRAME.pack(MAGIC, DATA_VERSION, _ACK, verdict, seq)


def decode_ack(data: bytes | bytearray | memoryview) -> tuple[int, Verdict]:
    magic, version, kind, verdict, seq = _ACK_FRAME.unpack(data)
    _check(magic, version, kind, _ACK)
    try:
        return seq, Verdict(verdict)
    except ValueError:
        raise BadData(f"ack with the unknown verdict {verdict}") from None


def _check(magic: bytes, version: int, kind: int, wanted: int) -> None:
    if magic != MAGIC:
        raise BadData(f"frame begins with {magic!r}, not {MAGIC!r}: is this a data port?")
    if version != DATA_VERSION:
        raise BadData(f"data frame of version {version}, this side reads version {DATA_VERSION}")
    if kind != wanted:
        raise BadData(f"data frame of kind {kind} where {wanted} is due")
