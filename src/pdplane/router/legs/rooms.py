"""The rooms dialect: what both legs carry, and what their answers mean.

Both legs get the same body: the client's, with the bootstrap address, a room and a rid per sample appended, and the
policy where our prefill says one. Where a prefill has several data parallel ranks, a room is minted so that room modulo
ranks is the rank that was chosen; where its dispatch does not follow the room, each leg names that rank too. Prefill
answers 2xx when its transfer has ended; decode's answer is the client's.
"""

from __future__ import annotations

import random

import httptools
import msgspec

from pdplane.core.ids import MAX_ROOM, Rid, Room

from ..body import Body
from ..upstream import HEAD_END, MAX_HEAD_BYTES, Leg, Unframer
from ..worker import Worker

_encode = msgspec.json.Encoder().encode
_random = random.Random(random.SystemRandom().getrandbits(256))
_bits = _random.getrandbits


def mint_room(bits: random.Random = _random) -> Room:
    """A fresh room, 1 .. 2**63-1."""
    return Room(bits.getrandbits(63) or MAX_ROOM)


def mint_rooms(count: int) -> tuple[Room, ...]:
    """`count` rooms, all distinct."""
    if count == 1:
        return (Room(_bits(63) or MAX_ROOM),)
    rooms: dict[Room, None] = {}
    while len(rooms) < count:
        rooms[mint_room()] = None
    return tuple(rooms)


def mint_rooms_at(ranks: tuple[int, ...], size: int) -> tuple[Room, ...]:
    """A room for each of `ranks`, out of `size` ranks: room % size is the rank. All distinct."""
    rooms: dict[Room, None] = {}
    for rank in ranks:
        while (room := _room_at(_bits(63), rank, size)) in rooms:
            pass
        rooms[room] = None
    return tuple(rooms)


def _room_at(bits: int, rank: int, size: int) -> Room:
    room = bits - bits % size + rank
    if room > MAX_ROOM:
        room -= size
    return Room(room or size)


def mint_rooms_for(prefill: Worker, samples: int) -> tuple[tuple[Room, ...], tuple[int, ...]]:
    """A room per sample, and the ranks of `prefill` that they are for; no ranks where it has but one."""
    loads = prefill.ranks
    if loads is None:
        return mint_rooms(samples), ()
    ranks = loads.take(samples, together=prefill.pins_ranks)
    return mint_rooms_at(ranks, len(loads.loads)), ranks


def mint_rids(request_id: str, samples: int, attempt: int, sample: int = 0) -> tuple[Rid, ...]:
    """``<request>.<sample>.<attempt>``; a single one is `sample`'s."""
    if samples == 1:
        return (Rid(f"{request_id}.{sample}.{attempt}"),)
    return tuple([Rid(f"{request_id}.{sample}.{attempt}") for sample in range(samples)])


def alone(body: Body, rids: tuple[Rid, ...]) -> bytes:
    """The body for a worker that does both."""
    return b'%b"rid":%b}' % (body.prefix, _encode(rids[0] if body.samples == 1 else rids))


def paired(body: Body, prefill: Worker, rooms: tuple[Room, ...], rids: tuple[Rid, ...]) -> bytes:
    """The body of both legs. A single sample is scalar, several are lists of equal length."""
    if body.samples == 1:
        return b'%b%b%d,"rid":"%b"}' % (body.prefix, prefill.bootstrap, rooms[0], rids[0].encode())
    count = body.samples
    fields = {
        "bootstrap_host": [prefill.address.host] * count,
        "bootstrap_port": [prefill.bootstrap_port()] * count,
        "bootstrap_room": rooms,
        "rid": rids,
    }
    policy = {"decode_allocation_policy": prefill.policy} if prefill.policy else {}
    return body.prefix + _encode(policy | fields)[1:]


def pinned(content: bytes, rank: int) -> tuple[bytes, bytes]:
    """The bodies of prefill's and of decode's leg, made of the common one, where the rank must be named."""
    common = content[:-1]
    return b'%b,"routed_dp_rank":%d}' % (common, rank), b'%b,"disagg_prefill_dp_rank":%d}' % (common, rank)


class PrefillLeg(Leg):
    """Read to its end and thrown away; its status matters."""

    __slots__ = ()

    side = "prefill"

    def _received(self, data: bytes) -> None:
        if 200 <= self.status < 300:
            if self.complete:
                exchange, attempt = self.exchange, self.attempt
                assert exchange is not None
                self._free()
                exchange.prefill_done(attempt)
            elif not self.held:
                self.held = data[:MAX_HEAD_BYTES]  # the head, should the connection's end be the answer's
            return
        self._hold(data)
        if self.complete and self.exchange is not None:
            self._refused()


class DecodeLeg(Leg):
    """Its head is held until the first byte of its body; then its bytes go to the client as they come."""

    __slots__ = ("_body_at", "_tail", "_unframer", "streaming")

    side = "decode"

    def _reset(self) -> None:
        super()._reset()
        self.streaming = False
        self._body_at = 0  # where the body begins in what is held
        self._tail = b""
        self._unframer: Unframer | None = None

    def _received(self, data: bytes) -> None:
        exchange = self.exchange
        assert exchange is not None
        if self.streaming:
            self._tail = data
            exchange.forward(data if self._unframer is None else self._unframer.feed(data))
        elif not self._may_start(data):
            return
        else:
            self._tail = self.held
            self.streaming = True
            exchange.decode_first_byte(self)
        if self.complete:
            attempt = self.attempt
            self._free()
            exchange.decode_done(attempt)

    def _may_start(self, data: bytes) -> bool:
        """Whether the first byte of a 2xx body is here, or its whole answer."""
        self.held = held = self.held + data if self.held else data
        if 200 <= self.status < 300:
            self._body_at = body = held.find(HEAD_END) + 4
            if not self.complete and len(held) > body and b"chunked" in held[:body].lower():
                body = (held.find(b"\r\n", body) + 2) or len(held)
            return self.complete or len(held) > body
        self.held = b""
        self._hold(held)
        if self.complete and self.exchange is not None:
            self._refused()
        return False

    def unframe(self) -> None:
        """From the first byte on, without chunk framing: for a client that knows no chunks."""
        self._unframer = Unframer()

    @property
    def raw(self) -> bool:
        return self._unframer is None

    def take_held(self) -> bytes:
        """What has come of the body, as it is to be sent on; once, when the answer starts."""
        held = self.held
        return held[self._body_at :] if self._unframer is None else self._unframer.feed(held)

    def at_chunk_boundary(self) -> bool:
        """Whether a chunk may be added to what was forwarded: asked of the parser, by offering it the last chunk."""
        if not self._tail.endswith(b"\r\n"):
            return False
        self.complete = False
        try:
            self._parser.feed_data(b"0\r\n\r\n")
        except httptools.HttpParserError:
            return False
        return self.complete


class AggregatedLeg(DecodeLeg):
    """Both sides in one worker: the answer is the client's too."""

    __slots__ = ()
