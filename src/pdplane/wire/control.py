"""The control session's bytes: ``u32 length | u8 version | msgpack map``, all little-endian, `length` without itself.

The map's "t" names the kind. Compatible growth is by new fields (ignored by who does not know them) and new kinds
(returned as UnknownKind, to be counted); whatever else changes raises WIRE_VERSION. Anything malformed raises
BadFrame: the session cannot be read on, and its owner counts and closes that one connection.
"""

from __future__ import annotations

import math
import struct
from typing import get_args

import msgspec

from pdplane.core.frames import Frame, Grant, RoomFrame, Success
from pdplane.core.ids import MAX_ROOM

WIRE_VERSION = 1
MAX_FRAME_BYTES = 4 * 1024 * 1024
MAX_TOKEN = 2**32 - 1

_HEAD = struct.Struct("<IB")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_ROOM_FRAMES = tuple(kind for side in get_args(RoomFrame) for kind in (get_args(side) or (side,)))


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
    _check_ranges(frame)
    return frame


def _unknown_or_bad(body: memoryview, error: msgspec.ValidationError) -> UnknownKind:
    try:
        kind = _KIND.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadFrame(f"frame has no kind: {error}") from None
    if kind.t in KINDS:
        raise BadFrame(f"frame {kind.t!r} is malformed: {error}") from None
    return kind


def _check_ranges(frame: Frame) -> None:
    """What the types cannot say. Page numbers are the memory owner's to check, by grant."""
    if not isinstance(frame, _ROOM_FRAMES):
        return
    if isinstance(frame, Success) and not 0 <= frame.row.first_token <= MAX_TOKEN:
        raise BadFrame(f"first token {frame.row.first_token} is not within 0 and {MAX_TOKEN}")
    if not 1 <= frame.room <= MAX_ROOM:
        raise BadFrame(f"room {frame.room} is not within 1 and {MAX_ROOM}")
    if frame.grant < 0:
        raise BadFrame(f"grant {frame.grant} is negative")
    if isinstance(frame, Grant) and not math.isfinite(frame.time_left_s):
        raise BadFrame(f"time left {frame.time_left_s} is not a number of seconds")


def _kinds() -> frozenset[str]:
    sides = [kind for member in get_args(Frame) for kind in (get_args(member) or (member,))]
    return frozenset(str(kind.__struct_config__.tag) for kind in sides)


KINDS = _kinds()
"""The "t" of every frame of core/frames.py."""
