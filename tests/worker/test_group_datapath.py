"""The data plane of a group: effects that speak of links reach the right pool's mover or landing, and what these report
comes back as events that name the link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import pytest

from pdplane.core.effects import (
    ArmGrant,
    CancelMoves,
    ConnectData,
    DisarmGrant,
    Lane,
    MovePages,
    RevokeGrant,
    Teardown,
)
from pdplane.core.events import Event, GrantQuiet, MoveDone, PagesLanded, TornDown
from pdplane.core.frames import DataEndpoint
from pdplane.core.ids import GrantNo, Instance, Link, MoveNo, PageId, Rank, Seat
from pdplane.core.slices import Slice, slice_between
from pdplane.transport.contract import LandedCallback, Landing, Mover, QuietCallback, WroteCallback
from pdplane.transport.memory import MemoryFabric
from pdplane.transport.pool import PagePool
from pdplane.worker.datapath import Landings, Movers

from .fake_engine import spec

MODEL = spec(heads=4, row_bytes=64)
PAGES = 4
P, D = Instance("p"), Instance("d")
GRANT = GrantNo(7)


class Pair:
    """Prefill of tp 2 before decode of tp 4, over two kinds of memory fabric; events of both ends in order."""

    def __init__(self, **fabric: bool) -> None:
        self.fabrics = {"memory": MemoryFabric(**fabric), "other": MemoryFabric(**fabric)}
        self.events: list[Event] = []
        self.sources = [PagePool(PAGES, MODEL.page_bytes // 2) for _ in range(2)]
        self.targets = [PagePool(PAGES, MODEL.page_bytes // 4) for _ in range(4)]
        self.movers = Movers(P, 0, self.sources, ("memory",), self._mover, self.events.append)
        self.landings = Landings(D, 1, self.targets, ("memory", "other"), self._landing, self.events.append)
        self.links = [(here, Link(Rank(dp=1, tp=here), Seat(P, Rank(tp=here // 2)))) for here in range(4)]

    def _mover(self, kind: str, seat: Seat, pool: PagePool, done: WroteCallback) -> tuple[Mover, DataEndpoint]:
        return self.fabrics[kind].mover(seat, pool, done), DataEndpoint(kind)

    def _landing(self, kind: str, seat: Seat, pool: PagePool, landed: LandedCallback, quiet: QuietCallback) -> Landing:
        landing = self.fabrics[kind].landing(seat, pool, landed, quiet)
        landing.endpoint = msgspec.structs.replace(landing.endpoint, kind=kind)
        return landing

    def arm(self, *pages: int) -> None:
        lanes = tuple(Lane(link, "memory", part(here)) for here, link in self.links)
        assert self.landings.do(ArmGrant(GRANT, ids(pages), lanes)) == []

    def connect(self) -> None:
        for here, link in self.links:
            [endpoint] = [one for one in self.landings.offers[here] if one.kind == "memory"]
            assert self.movers.do(ConnectData(outward(link), endpoint, part(here))) == []

    def move(self, src: int, dst: int) -> list[Event]:
        told = []
        for number, (_, link) in enumerate(self.links, start=1):
            effect = MovePages(MoveNo(number), GRANT, outward(link), ids([src]), ids([dst]))
            told += self.movers.do(effect) or []
        return told

    def close(self) -> None:
        self.movers.close()
        self.landings.close()
        for pool in (*self.sources, *self.targets):
            pool.close()


def ids(pages: Iterable[int]) -> tuple[PageId, ...]:
    return tuple(map(PageId, pages))


def outward(link: Link) -> Link:
    """The same link as prefill sees it."""
    return Link(link.there.rank, Seat(D, link.here))


def part(here: int) -> Slice:
    found = slice_between(MODEL.groups, MODEL.page_size, (here // 2, 2), (here, 4))
    assert found is not None
    return found


@pytest.fixture
def it() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_each_link_moves_its_slice_from_its_rank_to_its_rank(it: Pair) -> None:
    whole = bytes(range(256)) * (MODEL.page_bytes // 256)
    rows = MODEL.page_size * 2  # of K and of V
    heads = [[whole[(row * 4 + head) * 8 : (row * 4 + head + 1) * 8] for row in range(rows)] for head in range(4)]
    for rank, pool in enumerate(it.sources):
        pool.page(PageId(2))[:] = b"".join(heads[2 * rank][row] + heads[2 * rank + 1][row] for row in range(rows))
    it.arm(3)
    it.connect()
    assert it.move(2, 3) == []
    for here, pool in enumerate(it.targets):
        assert bytes(pool.page(PageId(3))) == b"".join(heads[here])
    assert {event.link for event in it.events if isinstance(event, PagesLanded)} == {link for _, link in it.links}
    assert [event for event in it.events if isinstance(event, MoveDone)] == [MoveDone(MoveNo(n)) for n in (1, 2, 3, 4)]


def test_a_move_before_its_link_is_connected_fails_at_once(it: Pair) -> None:
    told = it.move(0, 0)
    assert [type(event) for event in told] == [MoveDone] * 4
    assert all(isinstance(event, MoveDone) and "not connected" in event.error for event in told)


def test_a_torn_down_peer_is_connected_no_more(it: Pair) -> None:
    it.arm(1)
    it.connect()
    _, first = it.links[0]
    assert it.movers.kind_of(outward(first)) == "memory"
    assert it.movers.do(Teardown(D)) == []
    assert it.movers.kind_of(outward(first)) == ""
    assert len(it.move(0, 1)) == 4


def test_a_fence_that_closes_at_once_says_so_for_its_rank_and_kind(it: Pair) -> None:
    it.arm(1)
    for here, _ in it.links:
        rank = Rank(dp=1, tp=here)
        assert it.landings.do(RevokeGrant(GRANT, rank, "memory")) == [GrantQuiet(GRANT, rank, "memory")]
        assert it.landings.do(DisarmGrant(GRANT, rank, "memory")) == []


def test_nothing_lands_under_a_revoked_grant(it: Pair) -> None:
    it.arm(1)
    it.connect()
    it.landings.do(RevokeGrant(GRANT, Rank(dp=1, tp=0), "memory"))
    it.move(0, 1)
    landed = [event.link.here.tp for event in it.events if isinstance(event, PagesLanded)]
    assert landed == [1, 2, 3]


def test_a_peer_is_torn_down_when_every_landing_says_so() -> None:
    for proves in (True, False):
        it = Pair(teardown_proves=proves)
        it.arm(1)
        assert it.landings.do(Teardown(P, GrantNo(7))) == ([TornDown(P, GrantNo(7))] if proves else [])
        it.close()


def test_a_rank_without_a_pool_offers_nothing_and_has_nobody_to_ask() -> None:
    it = Pair()
    empty = Landings(D, 0, [None, it.targets[0]], ("memory", "other"), it._landing, it.events.append)
    assert [len(offers) for offers in empty.offers] == [0, 2]
    assert [[one.kind for one in offers] for offers in it.movers.offers] == [["memory"], ["memory"]]
    it.close()


def test_only_kinds_with_a_fence_count_as_fenced() -> None:
    for fence in (True, False):
        it = Pair(fence=fence)
        assert it.landings.fenced == (frozenset({"memory", "other"}) if fence else frozenset())
        it.close()


def test_what_is_no_affair_of_the_data_plane_is_left_to_others(it: Pair) -> None:
    cancel = CancelMoves(GRANT, outward(it.links[0][1]))
    assert it.movers.do(cancel) == []  # of a link that is not connected: nothing to drop
    assert it.landings.do(cancel) is None
    assert it.movers.do(RevokeGrant(GRANT, Rank(), "memory")) is None
