"""The transport contract: moves pages from pool to pool, and can say when nothing moves any more.

A `Mover` sits at a rank of prefill, a `Landing` at a rank of decode. Both ends of a link know its `Slice`: which bytes
of every page it moves. Callbacks come on the transport's own thread (or inside the call for single-threaded ones): the
shell hops to its loop. Conformance: tests/transport/test_conformance.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, overload

import msgspec

from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId, Seat
from pdplane.core.slices import Slice

PAGES_PER_FRAME = 64


class Capabilities(msgspec.Struct, frozen=True):
    """push: prefill sends. pull: decode reads. fence: decode alone can stop all landing under a grant (a local
    proof, and the only one: what prefill has given up may still lie in a buffer). one_sided: bytes land without the
    receiver's code. teardown_proves: after `Landing.teardown` no later byte of that instance can land."""

    push: bool
    pull: bool
    fence: bool
    one_sided: bool
    teardown_proves: bool = True


class Pair(msgspec.Struct, frozen=True, array_like=True):
    """Page `src` of the mover's pool goes to page `dst` of the landing's pool."""

    src: PageId
    dst: PageId


class Pairs(Sequence[Pair]):
    """Page src[i] of the mover's pool goes to page dst[i] of the landing's. A hundred thousand of them cost no more
    than one until they are looked at. Nobody changes the two lists afterwards."""

    __slots__ = ("dst", "src")

    def __init__(self, src: Sequence[PageId], dst: Sequence[PageId]) -> None:
        """ValueError where they are not equally long."""
        if len(src) != len(dst):
            raise ValueError(f"{len(src)} pages cannot go to {len(dst)}")
        self.src = src
        self.dst = dst

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Pairs:
        if isinstance(pairs, Pairs):
            return pairs
        return cls([pair.src for pair in pairs], [pair.dst for pair in pairs])

    def __len__(self) -> int:
        return len(self.src)

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> Pairs: ...

    def __getitem__(self, index: int | slice) -> Pair | Pairs:
        if isinstance(index, slice):
            return Pairs(self.src[index], self.dst[index])
        return Pair(self.src[index], self.dst[index])

    def __iter__(self) -> Iterator[Pair]:
        return map(Pair, self.src, self.dst)


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """A host and port, dialled by tcp."""

    host: str
    port: int


WroteCallback = Callable[[MoveNo, str], None]
"""(move, error): error "" means visible at the destination. Called exactly once per move; after it, the source
pages are not read any more."""

LandedCallback = Callable[[GrantNo, Seat, Sequence[PageId]], None]
"""What this peer brings of these granted pages is complete in the pool; each page is reported once per peer."""

QuietCallback = Callable[[GrantNo], None]
"""A revoked grant: nothing lands under it any more."""


class Mover(Protocol):
    """Prefill's end, one per rank and kind. Not thread-safe: one thread calls it."""

    capabilities: Capabilities

    def connect(self, peer: Seat, endpoint: DataEndpoint, slice_: Slice) -> None:
        """Where `peer` takes pages. Replaces an earlier endpoint of the same peer. Dials lazily, never blocks."""

    def move(self, number: MoveNo, grant: GrantNo, peer: Seat, pairs: Sequence[Pair]) -> None:
        """Post a batch; completion by callback. An unknown or dead peer completes with an error, later and not inside
        this call (except on the memory transport). Give a long batch as `Pairs`."""

    def cancel(self, grant: GrantNo, peer: Seat) -> None:
        """Drop what has not begun of this grant: those moves complete with error "cancelled"; begun ones run on."""

    def teardown(self, peer: Instance) -> None:
        """Cut everything with this instance, all of its ranks: every outstanding move completes with an error,
        promptly."""

    def close(self) -> None: ...


class Landing(Protocol):
    """Decode's end, one per rank and kind. Not thread-safe: one thread calls it."""

    capabilities: Capabilities
    endpoint: DataEndpoint

    def arm(self, grant: GrantNo, peer: Seat, pages: Sequence[PageId], slice_: Slice) -> None:
        """From now on `peer` may place its slice of these pages, each once. Before the grant is told to anyone (O2).
        Once for each peer of the grant."""

    def revoke(self, grant: GrantNo) -> bool:
        """Nothing lands any more, from no peer. True: quiet now (no QuietCallback follows). False: the callback follows
        when the last begun landing ended; where there is no fence, perhaps never. Idempotent; an unknown grant is
        quiet."""

    def disarm(self, grant: GrantNo) -> None:
        """Forget a grant all of whose pages have landed (or that is quiet)."""

    def teardown(self, peer: Instance) -> bool:
        """Cut everything with this instance. Its grants stay armed until revoked. True: no later byte of it can land,
        as `capabilities.teardown_proves` says."""

    def close(self) -> None: ...
