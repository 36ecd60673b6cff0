"""A grant's head: how many pages decode has already, on the wire."""

from __future__ import annotations

import msgspec
import pytest

from pdplane.core.frames import Grant, PromptId
from pdplane.core.ids import GrantNo, Instance, PageId, Rank, Room
from pdplane.wire.control import WIRE_VERSION, BadFrame, FrameReader, encode

GRANT = Grant(
    room=Room(9),
    grant=GrantNo(3),
    src=Instance("d1"),
    dst=Instance("p1"),
    rank=Rank(),
    pages=(PageId(1), PageId(300)),
    prompt=PromptId(b"\1\2", 20),
    time_left_s=1.5,
)


def head_of(count: int) -> Grant:
    return msgspec.structs.replace(GRANT, decode_prefix_len=count)


def test_without_a_head_the_bytes_are_those_of_a_release_that_knows_of_none() -> None:
    assert b"decode_prefix_len" not in encode(GRANT)
    assert GRANT.prefix_pages == 0


def test_a_head_is_one_field_more() -> None:
    plain, more = encode(GRANT), encode(head_of(300))
    assert more[5:6] == bytes([plain[5] + 1])  # keys of the map
    assert more.endswith(b"\xb1decode_prefix_len\xcd\x01\x2c")
    assert more[6 : len(plain)] == plain[6:]
    [back] = FrameReader().feed(more)
    assert back == head_of(300)


@pytest.mark.parametrize("count", [0, 1, 2**32])
def test_any_count_is_read_for_the_core_to_judge(count: int) -> None:
    [back] = FrameReader().feed(encode(head_of(count)))
    assert isinstance(back, Grant)
    assert back.prefix_pages == count


def test_less_than_nothing_is_no_count() -> None:
    with pytest.raises(BadFrame, match="a grant says that decode has -1 pages already"):
        FrameReader().feed(encode(head_of(-1)))


@pytest.mark.parametrize("value", ["2", 1.5, True, None])
def test_what_is_no_count_is_malformed(value: object) -> None:
    body = msgspec.to_builtins(GRANT) | {"decode_prefix_len": value, "prompt": [b"\1\2", 20]}
    raw = msgspec.msgpack.encode(body)
    framed = (1 + len(raw)).to_bytes(4, "little") + bytes([WIRE_VERSION]) + raw
    with pytest.raises(BadFrame, match="'grant' is malformed"):
        FrameReader().feed(framed)
