"""Which grants a hand-off had, over which links and transports: what `explain` shows, an operator's release names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from pdplane.core.effects import ArmGrant
from pdplane.core.frames import Grant, Read
from pdplane.core.ids import GrantNo, Instance, Link, Rank, Seat

K = TypeVar("K", bound=Hashable)


class LinkRecord(msgspec.Struct, frozen=True):
    """One link of a grant: our rank, the peer's seat, the kind of transport, and bytes of each page."""

    here: str
    there: str
    transport: str = ""
    page_bytes: int = 0


class GrantRecord(msgspec.Struct):
    """`instance`: the decode that granted; grant numbers are its own."""

    grant: GrantNo
    instance: Instance
    pages: int
    links: dict[Link, LinkRecord] = {}


class GrantBook(Generic[K]):
    """The grants of the last `size` hand-offs, oldest out first. K: what one goes by, a room, or in params a rid."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._of: OrderedDict[K, dict[tuple[Instance, GrantNo], GrantRecord]] = OrderedDict()

    def granted(self, key: K, instance: Instance, grant: GrantNo, pages: int) -> GrantRecord:
        """Noted once, however often it is told."""
        grants = self._of.setdefault(key, {})
        while len(self._of) > self._size:
            self._of.popitem(last=False)
        return grants.setdefault((instance, grant), GrantRecord(grant, instance, pages))

    def armed(self, key: K, instance: Instance, armed: ArmGrant) -> None:
        """At decode, which is `instance`: what may land now, and over which lanes."""
        record = self.granted(key, instance, armed.grant, len(armed.pages))
        for lane in armed.lanes:
            here, there = str(lane.link.here), str(lane.link.there)
            record.links[lane.link] = LinkRecord(here, there, lane.kind, lane.slice.size_bytes)

    def asked(self, key: K, frame: Grant | Read, pages: int, dp: int, kind_of: Callable[[Link], str]) -> None:
        """At prefill, of data parallel rank `dp`: as the frame says it. For the record only: the core judges it."""
        record = self.granted(key, frame.src, frame.grant, pages)
        for ours, theirs in frame.links or ((Rank(dp=dp), frame.rank),):
            link = Link(ours, Seat(frame.src, theirs))
            record.links[link] = LinkRecord(str(ours), str(link.there), kind_of(link))

    def of(self, key: K | None) -> Iterable[GrantRecord]:
        return self._of.get(key, {}).values() if key is not None else ()


def describe(record: GrantRecord) -> dict[str, Any]:
    return {
        "grant": record.grant,
        "instance": record.instance,
        "pages": record.pages,
        "links": [msgspec.to_builtins(link) for link in record.links.values()],
    }
