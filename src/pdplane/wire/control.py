"""The control session's bytes: ``u32 length | u8 version | msgpack map``, all little-endian, `length` without itself.

The map's "t" names the kind. Compatible growth is by new fields (ignored by who does not know them) and new kinds
(returned as UnknownKind, to be counted); whatever else changes raises WIRE_VERSION. Anything malformed raises
BadFrame: the session cannot be read on, and its owner counts and closes that one connection.

Greetings are read in two phases. A HELLO or WELCOME of a later schema may not be one of ours, but it still says who
speaks which protocols. Where these meet ours not at all it becomes a greeting with an empty stamp, which the core
refuses by naming both ranges: the peer is told, instead of being cut off without a word.
"""

from __future__ import annotations

import math
import struct
from typing import get_args

import msgspec

from pdplane.core.frames import (
    Abort,
    Announce,
    Beat,
    Drained,
    Failed,
    Frame,
    Grant,
    Hello,
    HoldFrame,
    Read,
    Ready,
    Received,
    Reject,
    Renew,
    Renewed,
    RoomFrame,
    Success,
    Welcome,
)
from pdplane.core.ids import MAX_ROOM, Instance, Rank, Shape
from pdplane.core.layout import OLDEST_PROTOCOL, PROTOCOL_VERSION, Stamp

WIRE_VERSION = 1
MAX_FRAME_BYTES = 4 * 1024 * 1024
MAX_TOKEN = 2**32 - 1
MAX_SHAPE = 4096  # ranks along one axis
MAX_LINKS = 4096
MAX_ENDPOINTS = 16
MAX_KIND = 32  # characters, as the following
MAX_HOST = 255
MAX_INSTANCE = 128
MAX_DATA_TOKEN = 256
MAX_PORT = 65_535
MAX_HOLD = 2**63 - 1

_HEAD = struct.Struct("<IB")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class BadFrame(ValueError):
    """The byte stream is not ours from here on; the message names what was wrong.

    `before` holds the good frames of the same `feed` that came first: they are facts and may be acted on.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.before: list[Frame | UnknownKind] = []


class UnknownKind(msgspec.Struct, frozen=True):
    """A well-formed frame of a kind this version does not know: counted and passed over."""

    t: str


_KIND = msgspec.msgpack.Decoder(UnknownKind)


class _Greeting(msgspec.Struct, frozen=True):
    """What a HELLO or a WELCOME of any protocol says, whatever else is in it."""

    t: str
    src: Instance
    protocol_min: int
    protocol_max: int
    dst: Instance = Instance("")
    secret: str = ""

    @property
    def meets(self) -> bool:
        """Some protocol is spoken on both sides."""
        return self.protocol_min <= PROTOCOL_VERSION and self.protocol_max >= OLDEST_PROTOCOL

    @property
    def stamp(self) -> Stamp:
        return Stamp("", "", "", 1, 1, "", (), protocol_min=self.protocol_min, protocol_max=self.protocol_max)

    def as_frame(self) -> Hello | Welcome:
        if self.t == "welcome":
            return Welcome(self.src, self.dst, Rank(), self.stamp, self.protocol_min)
        return Hello(
            self.src,
            self.dst,
            Rank(),
            self.stamp,
            protocol_min=self.protocol_min,
            protocol_max=self.protocol_max,
            secret=self.secret,
        )


_GREETING = msgspec.msgpack.Decoder(_Greeting)
_GREETINGS = ("hello", "welcome")


def encode(frame: Frame) -> bytes:
    """The whole frame. BadFrame over MAX_FRAME_BYTES, which the peer would refuse."""
    body = _ENCODER.encode(frame)
    _check_length(1 + len(body))
    return _HEAD.pack(1 + len(body), WIRE_VERSION) + body


class FrameReader:
    """Cuts a byte stream into frames. One per connection; after a BadFrame it refuses everything."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._broken: BadFrame | None = None

    @property
    def half_frame_bytes(self) -> int:
        """Bytes of a frame that has begun and is not whole: not 0 at the end of a stream means a half frame."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame | UnknownKind]:
        """The frames that `data` completes, in order. Raises BadFrame."""
        if self._broken is not None:
            raise self._broken
        self._buffer += data
        frames: list[Frame | UnknownKind] = []
        start = 0
        try:
            while (end := self._frame_end(start)) is not None:
                frames.append(_decode(memoryview(self._buffer)[start + _HEAD.size : end]))
                start = end
        except BadFrame as bad:
            bad.before = frames
            self._broken = bad
            raise
        finally:
            del self._buffer[:start]
        return frames

    def _frame_end(self, start: int) -> int | None:
        """Where the frame at `start` ends, None while it is incomplete. A bad head is refused before its body."""
        if len(self._buffer) - start < _HEAD.size:
            return None
        length, version = _HEAD.unpack_from(self._buffer, start)
        _check_length(length)
        if version != WIRE_VERSION:
            raise BadFrame(f"frame version {version}, this side reads version {WIRE_VERSION}: is this a control port?")
        end = start + _HEAD.size - 1 + length
        return end if end <= len(self._buffer) else None


def _check_length(length: int) -> None:
    if length < 2:
        raise BadFrame(f"frame of {length} bytes: the least is a version and a body")
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {length} bytes, the most is {MAX_FRAME_BYTES}: is this a control port?")


def _decode(body: memoryview) -> Frame | UnknownKind:
    with body:
        try:
            frame = _DECODER.decode(body)
        except msgspec.ValidationError as error:
            return _unknown_or_bad(body, error)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"frame is not msgpack: {error}") from None
        try:
            _check_ranges(frame)
        except BadFrame:
            if (foreign := _of_another_protocol(body)) is not None:
                return foreign
            raise
    return frame


def _unknown_or_bad(body: memoryview, error: msgspec.ValidationError) -> Hello | Welcome | UnknownKind:
    try:
        kind = _KIND.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadFrame(f"frame has no kind: {error}") from None
    if kind.t not in KINDS:
        return kind
    if (foreign := _of_another_protocol(body)) is not None:
        return foreign
    raise BadFrame(f"frame {kind.t!r} is malformed: {error}") from None


def _of_another_protocol(body: memoryview) -> Hello | Welcome | None:
    """A greeting of a peer with which we share no protocol, for the core to refuse; None where it is anything else."""
    try:
        greeting = _GREETING.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    known = greeting.t in _GREETINGS and 1 <= len(greeting.src) <= MAX_INSTANCE
    return greeting.as_frame() if known and not greeting.meets else None


def _check_ranges(frame: Frame) -> None:
    """What the types cannot say. Page numbers are the memory owner's to check, by grant."""
    if not 1 <= len(frame.src) <= MAX_INSTANCE:
        raise BadFrame(f"a sender's instance has {len(frame.src)} characters, not 1 to {MAX_INSTANCE}")
    match frame:
        case Hello():
            _check_seat(frame.rank, frame.shape)
            _check_offer(frame)
        case Welcome():
            _check_seat(frame.rank, frame.shape)
            _check_text("data kind", frame.data_kind, MAX_KIND)
        case Reject() | Beat():
            pass
        case Announce() | Grant() | Abort() | Received() | Ready() | Success() | Failed() | Drained():
            _check_room_frame(frame)
        case _:
            _check_hold_frame(frame)


def _check_room_frame(frame: RoomFrame) -> None:
    if not 1 <= frame.room <= MAX_ROOM:
        raise BadFrame(f"room {frame.room} is not within 1 and {MAX_ROOM}")
    _check_grant(frame.grant)
    _check_rank(frame.rank)
    match frame:
        case Grant():
            if not math.isfinite(frame.time_left_s):
                raise BadFrame(f"time left {frame.time_left_s} is not a number of seconds")
            if frame.prefix_pages < 0:
                raise BadFrame(f"a grant says that decode has {frame.prefix_pages} pages already")
            _check_links(frame)
        case Ready() if not (math.isfinite(frame.held_s) and frame.held_s >= 0):
            raise BadFrame(f"held for {frame.held_s} is not a number of seconds from 0 on")
        case Success() if not 0 <= frame.row.first_token <= MAX_TOKEN:
            raise BadFrame(f"first token {frame.row.first_token} is not within 0 and {MAX_TOKEN}")


def _check_hold_frame(frame: HoldFrame) -> None:
    _check_rank(frame.rank)
    if isinstance(frame, Renew | Renewed):
        for hold in frame.holds:
            _check_hold(hold)
        if isinstance(frame, Renewed) and not (math.isfinite(frame.lease_s) and frame.lease_s >= 0):
            raise BadFrame(f"lease of {frame.lease_s} is not a number of seconds from 0 on")
        return
    _check_hold(frame.hold)
    _check_grant(frame.grant)
    if isinstance(frame, Read):
        if len(frame.src_pages) != len(frame.dst_pages):
            raise BadFrame(f"a read of {len(frame.src_pages)} pages into {len(frame.dst_pages)}")
        _check_links(frame)


def _check_hold(hold: int) -> None:
    if not 1 <= hold <= MAX_HOLD:
        raise BadFrame(f"hold {hold} is not within 1 and {MAX_HOLD}")


def _check_grant(grant: int) -> None:
    if grant < 0:
        raise BadFrame(f"grant {grant} is negative")


def _check_rank(rank: Rank) -> None:
    if not all(0 <= place < MAX_SHAPE for place in (rank.dp, rank.cp, rank.tp, rank.pp)):
        raise BadFrame(f"rank {rank} is not within 0 and {MAX_SHAPE - 1} on every axis")


def _check_seat(rank: Rank, shape: Shape) -> None:
    """A shape of sizes that can be, and a rank of it."""
    sizes = (shape.dp, shape.cp, shape.tp, shape.pp)
    if not all(1 <= size <= MAX_SHAPE for size in sizes):
        raise BadFrame(f"shape ({shape}) is not within 1 and {MAX_SHAPE} on every axis")
    if not all(0 <= place < size for place, size in zip((rank.dp, rank.cp, rank.tp, rank.pp), sizes, strict=True)):
        raise BadFrame(f"rank {rank} is not one of a group of shape ({shape})")


def _check_links(frame: Grant | Read) -> None:
    """() or pairs of which each is named once; one is this session's prefill rank's."""
    what = "read" if isinstance(frame, Read) else "grant"
    if len(frame.links) > MAX_LINKS:
        raise BadFrame(f"a {what} of {len(frame.links)} links, the most is {MAX_LINKS}")
    for prefill, decode in frame.links:
        _check_rank(prefill)
        _check_rank(decode)
    if len(set(frame.links)) != len(frame.links):
        raise BadFrame(f"a {what} names a link twice")
    if frame.links and all(prefill != frame.rank for prefill, _ in frame.links):
        raise BadFrame(f"a {what} on rank {frame.rank} names links, and none of them is this rank's")


def _check_offer(hello: Hello) -> None:
    _check_endpoint(hello.data_host, hello.data_port, hello.data_token)
    if len(hello.data) > MAX_ENDPOINTS:
        raise BadFrame(f"a hello with {len(hello.data)} data endpoints, the most is {MAX_ENDPOINTS}")
    for endpoint in hello.data:
        _check_text("data kind", endpoint.kind, MAX_KIND)
        if not endpoint.kind:
            raise BadFrame("a data endpoint names no kind of transport")
        _check_text("data where", endpoint.where, MAX_HOST)
        _check_endpoint(endpoint.host, endpoint.port, endpoint.token)


def _check_endpoint(host: str, port: int, token: str) -> None:
    _check_text("data host", host, MAX_HOST)
    _check_text("data token", token, MAX_DATA_TOKEN, shown=False)
    if not 0 <= port <= MAX_PORT:
        raise BadFrame(f"data port {port} is not within 0 and {MAX_PORT}")


def _check_text(name: str, text: str, most: int, *, shown: bool = True) -> None:
    if len(text) > most:
        what = f" {text[:20]!r}..." if shown else ""
        raise BadFrame(f"{name}{what} has {len(text)} characters, the most is {most}")


def _kinds() -> frozenset[str]:
    sides = [kind for member in get_args(Frame) for kind in (get_args(member) or (member,))]
    return frozenset(str(kind.__struct_config__.tag) for kind in sides)


KINDS = _kinds()
"""The "t" of every frame of core/frames.py."""
