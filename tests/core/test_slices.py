"""Which bytes of a page a link moves, against a model in which every byte has a name."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdplane.core.ids import Rank, Shape
from pdplane.core.layout import LayoutGroup
from pdplane.core.slices import Slice, Span, heads_of, pairs, shard_bytes, slice_between, source_rank, whole_page

Name = tuple[int, int, int, int, int, int]
"""One byte of a page over all ranks: group, layer, part, token, head (0 in rows without heads), byte of the head."""


@st.composite
def layout_groups(draw: st.DrawFn) -> LayoutGroup:
    heads, parts, head_bytes = draw(st.integers(0, 5)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    layers = tuple(range(draw(st.integers(0, 3))))
    return LayoutGroup("g", parts * max(heads, 1) * head_bytes, layers, "byte", parts=parts, heads=heads)


layouts = st.lists(layout_groups(), min_size=1, max_size=3).map(tuple)
sizes = st.integers(1, 3)
tps = st.integers(1, 6)


def page_of(groups: tuple[LayoutGroup, ...], page_size: int, rank: int, ranks: int) -> list[Name]:
    """A rank's page as core/layout.py lays it out: [layers][parts][page_size][its heads], group after group."""
    page: list[Name] = []
    for number, group in enumerate(groups):
        heads = heads_of(group.heads, rank, ranks) if group.heads else range(1)
        width = range(group.row_bytes // group.parts // max(group.heads, 1))
        rows = product(group.layers, range(group.parts), range(page_size), heads, width)
        page += [(number, *at) for at in rows]
    return page


def carried(cut: Slice) -> list[tuple[int, int]]:
    """(place in prefill's page, place in decode's), for every byte in the order of the way."""
    return [
        (span.src + i * span.src_step + byte, span.dst + i * span.dst_step + byte)
        for span in cut.spans
        for i in range(span.count)
        for byte in range(span.run)
    ]


@settings(max_examples=300)
@given(layouts, sizes, tps, tps)
def test_all_links_together_bring_every_byte_of_every_shard_once_and_from_its_own_place(
    groups: tuple[LayoutGroup, ...], page_size: int, prefill: int, decode: int
) -> None:
    for target in range(decode):
        wanted = page_of(groups, page_size, target, decode)
        assert shard_bytes(groups, page_size, target, decode) == len(wanted)
        got: dict[int, Name] = {}
        for source in range(prefill):
            have = page_of(groups, page_size, source, prefill)
            cut = slice_between(groups, page_size, (source, prefill), (target, decode))
            if cut is None:
                continue
            assert (cut.src_page, cut.dst_page) == (len(have), len(wanted))
            way = carried(cut)
            assert cut.size_bytes == len(way) > 0
            assert not {dst for _, dst in way} & got.keys()
            assert len({dst for _, dst in way}) == len(way)
            got |= {dst: have[src] for src, dst in way}
        assert [got[place] for place in range(len(wanted))] == wanted
        assert len(got) == len(wanted)


@given(layouts, sizes, tps)
def test_between_equal_sizes_each_rank_moves_its_whole_page_to_its_like(
    groups: tuple[LayoutGroup, ...], page_size: int, tp: int
) -> None:
    holding = [rank for rank in range(tp) if shard_bytes(groups, page_size, rank, tp)]
    shape = Shape(tp=tp)
    assert pairs(groups, page_size, shape, shape, (0, 0)) == tuple((Rank(tp=rank), Rank(tp=rank)) for rank in holding)
    for rank in holding:
        cut = slice_between(groups, page_size, (rank, tp), (rank, tp))
        assert cut is not None
        assert cut.whole
        assert cut.size_bytes == shard_bytes(groups, page_size, rank, tp)


@given(sizes, tps, tps)
def test_rows_that_every_rank_holds_whole_come_from_one_rank_and_the_others_are_dummies(
    page_size: int, prefill: int, decode: int
) -> None:
    groups = (LayoutGroup("kv", 656, (0, 1, 2), "fp8_ds_mla"), LayoutGroup("index", 132, (1,), "uint8"))
    links = pairs(groups, page_size, Shape(tp=prefill), Shape(tp=decode), (0, 0))
    assert [target.tp for _, target in links] == list(range(decode))
    for source, target in links:
        assert source.tp == source_rank(target.tp, decode, prefill)
        cut = slice_between(groups, page_size, (source.tp, prefill), (target.tp, decode))
        assert cut is not None
        assert cut.whole
        assert cut.size_bytes == page_size * (3 * 656 + 132)


@given(st.integers(0, 200), st.integers(1, 64))
def test_heads_are_dealt_out_in_order_all_of_them_and_as_evenly_as_whole_heads_allow(heads: int, ranks: int) -> None:
    dealt = [heads_of(heads, rank, ranks) for rank in range(ranks)]
    assert [head for held in dealt for head in held] == list(range(heads))
    assert {len(held) for held in dealt} <= {heads // ranks, -(-heads // ranks)}


@given(tps, tps)
def test_source_ranks_are_ranks_and_shared_evenly(decode: int, prefill: int) -> None:
    sources = [source_rank(rank, decode, prefill) for rank in range(decode)]
    assert sources == sorted(sources)
    assert set(sources) <= set(range(prefill))
    assert max(map(sources.count, sources)) <= -(-decode // prefill)


# --- in numbers ---------------------------------------------------------------------------------------------------

THREE_HEADS = (LayoutGroup("kv", 2 * 3 * 8, (0, 1), "float32", parts=2, heads=3),)


def test_a_rank_without_heads_holds_nothing_and_has_no_link() -> None:
    assert [shard_bytes(THREE_HEADS, 4, rank, 4) for rank in range(4)] == [0, 128, 128, 128]
    links = pairs(THREE_HEADS, 4, Shape(dp=3, tp=4), Shape(tp=2), (2, 0))
    assert [(prefill.tp, decode.tp) for prefill, decode in links] == [(1, 0), (2, 1), (3, 1)]
    assert {(prefill.dp, decode.dp) for prefill, decode in links} == {(2, 0)}


def test_a_part_of_the_heads_is_strided_where_it_lies_among_others_and_one_run_where_it_is_all() -> None:
    cut = slice_between(THREE_HEADS, 4, (0, 1), (1, 2))
    assert cut == Slice(384, 256, (Span(8, 0, 16, 24, 16, 16),))
    assert not cut.whole
    assert slice_between(THREE_HEADS, 4, (0, 1), (0, 1)) == whole_page(384)


def test_a_page_that_lies_elsewhere_or_is_not_all_is_not_whole() -> None:
    assert whole_page(64).whole
    assert not Slice(64, 64, (Span(0, 0, 32, 32, 32, 1),)).whole
    assert not Slice(64, 64, (Span(0, 32, 32, 32, 32, 1), Span(32, 0, 32, 32, 32, 1))).whole


def test_a_group_that_no_layer_has_makes_no_link() -> None:
    empty = (LayoutGroup("kv", 16, (), "float32", parts=2, heads=2),)
    assert pairs(empty, 4, Shape(tp=2), Shape(), (0, 0)) == ()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_pages_of_all_ranks_together_are_the_whole_page(tp: int) -> None:
    assert sum(shard_bytes(THREE_HEADS, 16, rank, tp) for rank in range(tp)) == 2 * 2 * 16 * 3 * 8
