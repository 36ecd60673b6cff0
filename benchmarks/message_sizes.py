"""How many bytes the control plane sends for one request: every message of a hand-off in both dialects, as encoded.

Frames are what wire/control.py writes, without their 4 bytes of length; JSON is what the router adds to a leg, or
passes on. Names and numbers are as long as a worker makes them.
"""

from __future__ import annotations

import dataclasses

import msgspec

from pdplane.core.effects import AnswerHeld
from pdplane.core.errors import Cause
from pdplane.core.frames import (
    Announce,
    Confirm,
    Confirmed,
    Frame,
    FrameIdentity,
    Grant,
    HoldIdentity,
    PromptId,
    Read,
    Ready,
    Received,
    Release,
    Renew,
    Row,
    Success,
)
from pdplane.core.ids import GrantNo, HoldNo, Instance, PageId, Rank, Rid, Room, Shape
from pdplane.core.layout import pages_for
from pdplane.wire.control import encode
from pdplane.wire.params import answered

PREFILL, DECODE = Instance("1f0c3a5b7d9e2468"), Instance("9e7d5b3a0c1f1357")
RANK = Rank(dp=0, tp=0)
DIGEST = bytes(range(16))
RID = Rid("cmpl-0f1e2d3c4b5a69788796a5b4c3d2e1f0-0")
POOL_PAGES = 1 << 20
"""Page numbers are drawn from a pool of this size, so that they take as many bytes as in a large one."""


@dataclasses.dataclass(frozen=True)
class Message:
    """`size`: bytes, for each link where `per_link`."""

    dialect: str
    name: str
    way: str
    size: int


def messages(tokens: int, page_size: int) -> list[Message]:
    """In the order in which they go, of one link: a prefill of one rank and a decode of one."""
    count = pages_for(tokens, page_size)
    pages = [PageId((37 + 7_919 * i) % POOL_PAGES) for i in range(count)]
    return [*_rooms(tokens, pages), *_params(tokens, pages, page_size)]


def _rooms(tokens: int, pages: list[PageId]) -> list[Message]:
    room, prompt = Room(0x5F3759DF5F3759DF), PromptId(DIGEST, tokens)
    to_prefill: FrameIdentity = {"room": room, "grant": GrantNo(4_711), "src": DECODE, "dst": PREFILL, "rank": RANK}
    to_decode: FrameIdentity = {**to_prefill, "src": PREFILL, "dst": DECODE}
    leg = {
        "rid": RID,
        "bootstrap_host": "10.11.12.13",
        "bootstrap_port": 8998,
        "bootstrap_room": room,
        "decode_allocation_policy": "early",
    }
    grant = Grant(**to_prefill, pages=tuple(pages), prompt=prompt, time_left_s=599.123456789)
    row = Row(first_token=31_337, prompt_tokens=tokens, prompt_digest=DIGEST, logprob=-0.123456789)
    return [
        Message("rooms", "fields of a leg (each of two)", "router to both", len(msgspec.json.encode(leg))),
        _frame("rooms", "D to P", Announce(**to_prefill, prompt=prompt)),
        Message("rooms", "READY (prefill_complete)", "P to D", len(encode(Ready(**to_decode, held_s=30.123456789)))),
        _frame("rooms", "D to P", grant),
        _frame("rooms", "P to D", Success(**to_decode, row=row)),
        _frame("rooms", "D to P", Received(**to_prefill)),
    ]


def _params(tokens: int, pages: list[PageId], page_size: int) -> list[Message]:
    hold = HoldNo(4_711)
    to_prefill: HoldIdentity = {"hold": hold, "grant": GrantNo(815), "src": DECODE, "dst": PREFILL, "rank": RANK}
    to_decode: HoldIdentity = {**to_prefill, "src": PREFILL, "dst": DECODE}
    row = Row(first_token=31_337, prompt_tokens=tokens, prompt_digest=DIGEST)
    held = AnswerHeld(rid=RID, row=row, hold=hold, pages=tuple(pages), lease_s=30.0)
    params = answered(
        held, instance=PREFILL, host="10.11.12.13", ports=[8101], shape=Shape(), dp=0, page_size=page_size
    )
    landing = tuple(PageId(page ^ 1) for page in pages)
    read = Read(**to_prefill, src_pages=tuple(pages), dst_pages=landing, prompt=PromptId(DIGEST, tokens), rid=RID)
    release = Release(**to_prefill, rid=RID, cause=Cause("client_left", "the client has left", 499))
    return [
        Message("params", "kv_transfer_params", "P to router to D", len(msgspec.json.encode(params))),
        _frame("params", "D to P", Renew(src=DECODE, dst=PREFILL, rank=RANK, holds=(hold,))),
        _frame("params", "D to P", read),
        _frame("params", "D to P", Confirm(**to_prefill)),
        _frame("params", "P to D", Confirmed(**to_decode)),
        Message("params", "RELEASE (given up)", "D to P", len(encode(release))),
    ]


def _frame(dialect: str, way: str, frame: Frame) -> Message:
    return Message(dialect, type(frame).__name__.upper(), way, len(encode(frame)))
