"""The control session of a rank pair: who is at the other end, is it there, is it still the same.

Decode dials (dialler.py, one for each prefill endpoint and rank of ours); prefill listens (acceptor.py, all its
guests). HELLO names both instances, so that a successor process on the same address is never taken for the one that was
granted (I18). A session lost has a grace in which the same instance may come back; then that instance is gone, on all
of its links, and it alone.

Both return notices, which the node turns into events of rooms, and put frames and dials into the node's outbox.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .errors import Cause
from .frames import DataEndpoint
from .ids import ConnId, Instance, Link, Rank, Shape
from .layout import OLDEST_PROTOCOL, Stamp
from .slices import Slice, pairs

NO_CONN = ConnId(0)


class SessionTimes(msgspec.Struct, frozen=True):
    """Seconds. A frozen or dead peer is gone after silent_s + grace_s, plus at most one beat."""

    beat_s: float = 2.0
    silent_s: float = 5.0
    grace_s: float = 2.0
    redial_min_s: float = 0.05
    redial_max_s: float = 0.5


class Identity(msgspec.Struct, frozen=True):
    """Who this end is: one data parallel group with all its tensor parallel ranks.

    data[tp]: at decode, where that rank takes pages; at prefill, by which kinds it can send. By preference.
    """

    instance: Instance
    stamp: Stamp
    secret: str = ""
    shape: Shape = Shape()
    dp: int = 0
    data: tuple[tuple[DataEndpoint, ...], ...] = ((),)

    def rank(self, tp: int) -> Rank:
        return Rank(dp=self.dp, tp=tp)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(self.rank(tp) for tp in range(self.shape.tp))


class Up(msgspec.Struct, frozen=True):
    """The session of this link is up (again): resync its rooms. Pages of the link go to `endpoint` (prefill's end), or
    come by its kind (decode's end). `shape`: the peer's group, in its own words. `protocol`: what is spoken."""

    link: Link
    endpoint: DataEndpoint
    slice: Slice
    shape: Shape = Shape()
    protocol: int = OLDEST_PROTOCOL


class TurnedAway(msgspec.Struct, frozen=True):
    """No session with this endpoint now; rooms that wait for their first one fail with the cause."""

    cause: Cause


class Gone(msgspec.Struct, frozen=True):
    """This instance is down for good as far as its rooms are concerned."""

    instance: Instance


Notice = Up | TurnedAway | Gone


def links_between(me: Identity, link: Link, theirs: Shape) -> frozenset[tuple[Rank, Rank]]:
    """All links between our group (prefill's) and the decode group of shape `theirs` that this session's peer is of."""
    stamp, dp = me.stamp, link.there.rank.dp
    return frozenset(pairs(stamp.groups, stamp.page_size, me.shape, theirs, (me.dp, dp)))


def no_transport(prefill: Sequence[DataEndpoint], decode: Sequence[DataEndpoint]) -> Cause:
    ours, theirs = (
        ", ".join(f"{d.kind} on {d.where}" if d.where else d.kind for d in side) for side in (prefill, decode)
    )
    text = f"no transport in common: prefill has {ours or 'none'}, decode offers {theirs or 'none'}"
    return Cause("incompatible", f"{text}; give both --transport tcp, or run both on one host", 503, retryable=True)


def no_slice(prefill: Rank, prefill_shape: Shape, decode: Rank, decode_shape: Shape) -> Cause:
    text = f"prefill rank {prefill} of ({prefill_shape}) holds nothing for decode rank {decode} of ({decode_shape})"
    return Cause("incompatible", f"{text}; this pair of ranks needs no session", 400)
