"""Which grants a hand-off had, over which links and transports: what `explain` shows, an operator's release names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from pdplane.core.ids import GrantNo, Instance, Link

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

    def of(self, key: K | None) -> Iterable[GrantRecord]:
        return self._of.get(key, {}).values() if key is not None else ()


def describe(record: GrantRecord) -> dict[str, Any]:
    return {
        "grant": record.grant,
        "instance": record.instance,
        "pages": record.pages,
        "links": [msgspec.to_builtins(link) for link in record.links.values()],
    }
