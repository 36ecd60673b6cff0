"""The transport contract: moves pages from pool to pool, and can say when nothing moves any more.

A `Mover` sits at prefill, a `Landing` at decode. Callbacks come on the transport's own thread (or inside the call
for single-threaded ones): the shell hops to its loop. Conformance: tests/transport/test_conformance.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId

PAGES_PER_FRAME = 64


class Capabilities(msgspec.Struct, frozen=True):
    """push: prefill sends. pull: decode reads. fence: decode alone can stop all landing under a grant (a local
    proof). one_sided: bytes land without the receiver's code."""

    push: bool
    pull: bool
    fence: bool
    one_sided: bool


class Pair(msgspec.Struct, frozen=True, array_like=True):
    """Page `src` of the mover's pool goes to page `dst` of the landing's pool."""

    src: PageId
    dst: PageId


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int


WroteCallback = Callable[[MoveNo, str], None]
"""(move, error): error "" means visible at the destination. Called exactly once per move; after it, the source
pages are not read any more."""

LandedCallback = Callable[[GrantNo, Sequence[PageId]], None]
"""These granted pages are complete in the pool; each page of a grant is reported once."""

QuietCallback = Callable[[GrantNo], None]
"""A revoked grant: nothing lands under it any more."""


class Mover(Protocol):
    """Prefill's end. Not thread-safe: one thread calls it."""

    capabilities: Capabilities

    def connect(self, peer: Instance, endpoint: Endpoint, token: str) -> None:
        """Where `peer` takes pages. Replaces an earlier endpoint of the same peer. Dials lazily, never blocks."""

    def move(self, number: MoveNo, grant: GrantNo, peer: Instance, pairs: Sequence[Pair]) -> None:
        """Post a batch; completion by callback. An unknown or dead peer completes with an error, later and not inside
        this call (except on the memory transport)."""

    def cancel(self, grant: GrantNo, peer: Instance) -> None:
        """Drop what has not begun of this grant: those moves complete with error "cancelled"; begun ones run on."""

    def teardown(self, peer: Instance) -> None:
        """Cut everything with this instance: every outstanding move completes with an error, promptly."""

    def close(self) -> None: ...


class Landing(Protocol):
    """Decode's end. Not thread-safe: one thread calls it."""

    capabilities: Capabilities
    endpoint: Endpoint
    token: str

    def arm(self, grant: GrantNo, peer: Instance, pages: Sequence[PageId]) -> None:
        """From now on `peer` may place these pages, each once. Before the grant is told to anyone (O2)."""

    def revoke(self, grant: GrantNo) -> bool:
        """Nothing lands any more. True: quiet now (no QuietCallback follows). False: the callback follows when the last
        begun landing ended. Idempotent; an unknown grant is quiet."""

    def disarm(self, grant: GrantNo) -> None:
        """Forget a grant all of whose pages have landed (or that is quiet)."""

    def teardown(self, peer: Instance) -> None:
        """Cut everything with this instance: no later byte of it can land. Its grants stay armed until revoked."""

    def close(self) -> None: ...
