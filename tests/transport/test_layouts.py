"""Layouts are data: pages of an MLA model with an indexer, and of a Llama, byte for byte from pool to pool.

What a pool must hold is worked out here from arrays of whole pages, head by head; the links' slices are what is judged.
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest

from pdplane.core.ids import GrantNo, Instance, MoveNo, PageId, Rank, Seat, Shape
from pdplane.core.layout import LayoutGroup
from pdplane.core.slices import Slice, heads_of, pairs, shard_bytes, slice_between
from pdplane.transport.contract import Landing, Mover, Pair
from pdplane.transport.host_identity import host_identity
from pdplane.transport.memory import MemoryFabric
from pdplane.transport.pool import PagePool

PATIENCE_S = 30.0  # only a failing test ever waits as long
PAGES = 11
BATCH = 3
GRANT = GrantNo(5)
UNTOUCHED = 0xEE

MLA = (
    LayoutGroup("mla", 656, (0, 1, 2, 3), "fp8_ds_mla"),
    LayoutGroup("index", 132, (1, 3), "uint8"),
)
LLAMA = (LayoutGroup("kv", 2 * 3 * 64, (0, 1), "float32", parts=2, heads=3),)
LAYOUTS = {"mla": (MLA, 64), "llama": (LLAMA, 16)}
KINDS = ("memory", "tcp", "shm", "shm_push")

WholePage = list[np.ndarray]
"""Each group's [layers, parts, page_size, heads or 1, bytes of a head]."""


def random_page(groups: Sequence[LayoutGroup], page_size: int, rng: np.random.Generator) -> WholePage:
    def group_of(group: LayoutGroup) -> np.ndarray:
        heads = max(group.heads, 1)
        width = group.row_bytes // group.parts // heads
        return rng.integers(0, 256, (len(group.layers), group.parts, page_size, heads, width), np.uint8)

    return [group_of(group) for group in groups]


def shard_of(page: WholePage, groups: Sequence[LayoutGroup], rank: int, ranks: int) -> bytes:
    held = [heads_of(group.heads, rank, ranks) if group.heads else range(1) for group in groups]
    return b"".join(rows[:, :, :, list(heads)].tobytes() for rows, heads in zip(page, held, strict=True))


class Told:
    """What the ends have said, waited for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.errors: dict[MoveNo, str] = {}
        self.landed: list[tuple[Seat, Seat, PageId]] = []  # by whom, where

    def on_wrote(self, move: MoveNo, error: str) -> None:
        with self._changed:
            assert move not in self.errors
            self.errors[move] = error
            self._changed.notify_all()

    def landing_at(self, here: Seat) -> Landed:
        return Landed(self, here)

    def arrived(self, here: Seat, peer: Seat, pages: Sequence[PageId]) -> None:
        with self._changed:
            self.landed += [(peer, here, page) for page in pages]
            self._changed.notify_all()

    def wait(self, moves: int, landed: int) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.errors) == moves and len(self.landed) == landed, PATIENCE_S)
            assert done, f"{len(self.errors)} of {moves} moves, {len(self.landed)} of {landed} pages; {self.errors}"


class Landed:
    """The LandedCallback of one decode rank."""

    def __init__(self, told: Told, here: Seat) -> None:
        self._told, self._here = told, here

    def __call__(self, grant: GrantNo, peer: Seat, pages: Sequence[PageId]) -> None:
        assert grant == GRANT
        self._told.arrived(self._here, peer, pages)


class Pair1P1D:
    """A prefill and a decode of so many tensor parallel ranks, with a pool and an end of transport for each rank that
    holds anything."""

    def __init__(self, kind: str, layout: str, prefill: int, decode: int, seed: int = 0) -> None:
        self.groups, self.page_size = LAYOUTS[layout]
        self.shapes = Shape(tp=prefill), Shape(tp=decode)
        self.told = Told()
        self._open = ExitStack()
        self._fabric = MemoryFabric()
        self._kind = kind
        rng = np.random.default_rng(seed)
        self.pages = [random_page(self.groups, self.page_size, rng) for _ in range(PAGES)]
        self.sources, self.movers = {}, {}
        for rank in self._holding(prefill):
            self.sources[rank] = self._pool(rank, prefill)
            for number, page in enumerate(self.pages):
                self.sources[rank].page(PageId(number))[:] = shard_of(page, self.groups, rank, prefill)
            self.movers[rank] = self._mover(seat("p", rank), self.sources[rank])
        self.targets, self.landings = {}, {}
        for rank in self._holding(decode):
            self.targets[rank] = self._pool(rank, decode)
            self.targets[rank].memory[:] = bytes([UNTOUCHED]) * len(self.targets[rank].memory)
            self.landings[rank] = self._landing(seat("d", rank), self.targets[rank])

    def _holding(self, tp: int) -> list[int]:
        return [rank for rank in range(tp) if shard_bytes(self.groups, self.page_size, rank, tp)]

    def _pool(self, rank: int, tp: int) -> PagePool:
        pool = PagePool(PAGES, shard_bytes(self.groups, self.page_size, rank, tp))
        self._open.callback(pool.close)
        return pool

    def _mover(self, here: Seat, pool: PagePool) -> Mover:
        mover: Mover
        if self._kind == "memory":
            mover = self._fabric.mover(here, pool, self.told.on_wrote)
        else:
            mover = end_of(self._kind, "Mover")(here, pool, self.told.on_wrote)
        self._open.callback(mover.close)
        return mover

    def _landing(self, here: Seat, pool: PagePool) -> Landing:
        landing: Landing
        told = self.told.landing_at(here)
        if self._kind == "memory":
            landing = self._fabric.landing(here, pool, told, lambda grant: None)
        else:
            landing = end_of(self._kind, "Landing")(here, pool, told, lambda grant: None)
        self._open.callback(landing.close)
        return landing

    @property
    def links(self) -> tuple[tuple[Rank, Rank], ...]:
        return pairs(self.groups, self.page_size, *self.shapes, (0, 0))

    def slice_of(self, source: Rank, target: Rank) -> Slice:
        sides = (source.tp, self.shapes[0].tp), (target.tp, self.shapes[1].tp)
        cut = slice_between(self.groups, self.page_size, *sides)
        assert cut is not None
        return cut

    def move(self, way: Sequence[tuple[int, int]]) -> None:
        """Each (src, dst) of `way` over every link, a few at a time; returns when all is told."""
        for source, target in self.links:
            cut, peer = self.slice_of(source, target), seat("d", target.tp)
            self.landings[target.tp].arm(GRANT, seat("p", source.tp), [PageId(dst) for _, dst in way], cut)
            self.movers[source.tp].connect(peer, self.landings[target.tp].endpoint, cut)
        batches = [way[start : start + BATCH] for start in range(0, len(way), BATCH)]
        moves = 0
        for batch in batches:
            for source, target in self.links:
                moves += 1
                cut_pairs = [Pair(PageId(src), PageId(dst)) for src, dst in batch]
                self.movers[source.tp].move(MoveNo(moves), GRANT, seat("d", target.tp), cut_pairs)
        self.told.wait(moves, len(way) * len(self.links))
        assert set(self.told.errors.values()) == {""}

    def expected(self, rank: int, way: Sequence[tuple[int, int]]) -> list[bytes]:
        """Decode's pool of this rank, page by page."""
        tp = self.shapes[1].tp
        pages = [bytes([UNTOUCHED]) * self.targets[rank].page_bytes] * PAGES
        for src, dst in way:
            pages[dst] = shard_of(self.pages[src], self.groups, rank, tp)
        return pages

    def close(self) -> None:
        self._open.close()


def seat(instance: str, tp: int) -> Seat:
    return Seat(Instance(instance), Rank(tp=tp))


def end_of(kind: str, end: str) -> type:
    """shm_push, Landing: transport/shm_push_landing.py's ShmPushLanding."""
    name = "".join(word.capitalize() for word in kind.split("_")) + end
    found = getattr(importlib.import_module(f"pdplane.transport.{kind}_{end.lower()}"), name)
    assert isinstance(found, type)
    return found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name.startswith("shm") and not host_identity():
        pytest.skip("pools cannot be shared on this host")
    return name


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_pages_arrive_byte_for_byte_and_nothing_else_does(
    kind: str, layout: str, prefill: int, decode: int, opened: ExitStack
) -> None:
    pair = Pair1P1D(kind, layout, prefill, decode)
    opened.callback(pair.close)
    way = [(0, 7), (4, 2), (10, 0), (3, 10), (9, 9)]
    pair.move(way)
    for rank, pool in pair.targets.items():
        assert [bytes(pool.page(PageId(page))) for page in range(PAGES)] == pair.expected(rank, way)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_any_permutation_of_a_whole_pool_arrives(kind: str, layout: str, seed: int, opened: ExitStack) -> None:
    pair = Pair1P1D(kind, layout, 1 + seed % 2, 2 - seed % 2, seed)
    opened.callback(pair.close)
    way = list(zip(range(PAGES), random.Random(seed).sample(range(PAGES), PAGES), strict=True))
    pair.move(way)
    for rank, pool in pair.targets.items():
        assert [bytes(pool.page(PageId(page))) for page in range(PAGES)] == pair.expected(rank, way)


def test_mla_rows_go_whole_from_one_rank_and_the_other_prefill_rank_is_a_dummy(opened: ExitStack) -> None:
    pair = Pair1P1D("memory", "mla", 2, 1)
    opened.callback(pair.close)
    assert pair.links == ((Rank(tp=0), Rank(tp=0)),)
    pair.move([(1, 1)])
    assert {peer for peer, _, _ in pair.told.landed} == {seat("p", 0)}
    assert pair.slice_of(*pair.links[0]).whole
    assert pair.targets[0].page_bytes == 64 * (4 * 656 + 2 * 132)


def test_heads_of_one_decode_page_come_from_every_prefill_rank_that_has_some(opened: ExitStack) -> None:
    pair = Pair1P1D("memory", "llama", 4, 1)
    opened.callback(pair.close)
    assert [source.tp for source, _ in pair.links] == [1, 2, 3]
    assert 0 not in pair.sources
    pair.move([(2, 8)])
    assert sorted((peer.rank.tp, page) for peer, _, page in pair.told.landed) == [(1, 8), (2, 8), (3, 8)]
