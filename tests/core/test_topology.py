"""The rank mapping: SGLang's table row by row, its laws over all shapes, and that our own slices follow it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.ids import Rank, Shape
from pdplane.core.layout import LayoutGroup
from pdplane.core.slices import pairs
from pdplane.core.topology import PLAIN, KvSpread, RankMap, contradiction, map_ranks, ranks_of

MLA = KvSpread(mla=True)


def over_tp(prefill: int, decode: int, tp: int, spread: KvSpread = PLAIN) -> RankMap:
    return map_ranks(Shape(tp=prefill), Shape(tp=decode), Rank(tp=tp), 0, spread)


def shown(found: RankMap) -> tuple[list[int], int, int]:
    return [target.rank.tp for target in found.targets], *needed(found)


def needed(found: RankMap) -> tuple[int, int]:
    return found.required_dst_info_num, found.required_prefill_response_num


# --- the table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "tp", "targets", "dst_infos", "responses"),
    [
        (1, 1, 0, [0], 1, 1),
        (4, 4, 3, [3], 1, 1),
        (1, 2, 1, [0], 2, 1),
        (2, 4, 1, [0], 2, 1),
        (2, 4, 2, [1], 2, 1),
        (2, 1, 0, [0, 1], 1, 2),
        (4, 2, 1, [2, 3], 1, 2),
        (8, 1, 0, [0, 1, 2, 3, 4, 5, 6, 7], 1, 8),
    ],
)
def test_heads_are_taken_from_the_ranks_that_hold_them(
    prefill: int, decode: int, tp: int, targets: list[int], dst_infos: int, responses: int
) -> None:
    found = over_tp(prefill, decode, tp)
    assert shown(found) == (targets, dst_infos, responses)
    assert not any(target.dummy for target in found.targets)


def test_of_mla_ranks_the_first_is_real_and_the_others_are_dummies() -> None:
    found = over_tp(4, 2, 1, MLA)
    assert [(target.rank.tp, target.dummy) for target in found.targets] == [(2, False), (3, True)]
    assert found.real == (Rank(tp=2),)
    assert needed(found) == (1, 1)


def test_sharded_mla_pages_come_from_every_rank_and_all_are_real() -> None:
    found = over_tp(4, 4, 2, KvSpread(mla=True, sharded=True))
    assert shown(found) == ([0, 1, 2, 3], 4, 4)
    assert len(found.real) == 4


def test_sharding_says_nothing_of_heads() -> None:
    assert over_tp(4, 4, 2, KvSpread(sharded=True)) == over_tp(4, 4, 2)


@pytest.mark.parametrize(
    ("spread", "cps", "responses"),
    [
        (PLAIN, [0], 1),
        (MLA, [0], 1),
        (KvSpread(all_cp=True), [0, 1, 2], 3),
        (KvSpread(sharded=True), [0, 1, 2], 3),
        (KvSpread(mla=True, sharded=True), [0, 1, 2], 3),
    ],
)
def test_context_parallel_ranks_are_all_asked_only_where_all_send(
    spread: KvSpread, cps: list[int], responses: int
) -> None:
    found = map_ranks(Shape(cp=3), Shape(), Rank(), 0, spread)
    assert [target.rank.cp for target in found.targets] == cps
    assert needed(found) == (1, responses)


def test_as_many_pipeline_stages_face_each_other() -> None:
    found = map_ranks(Shape(pp=3), Shape(pp=3), Rank(pp=1), 0)
    assert found.real == (Rank(pp=1),)
    assert needed(found) == (1, 1)


def test_a_decode_of_one_stage_takes_every_stage_from_the_last_down() -> None:
    found = map_ranks(Shape(tp=2, pp=3), Shape(tp=1), Rank(), 5)
    assert found.real == tuple(Rank(5, 0, tp, pp) for tp in (0, 1) for pp in (2, 1, 0))
    assert needed(found) == (1, 6)


# --- contradictions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "spread", "named"),
    [
        (Shape(cp=4), Shape(cp=2), PLAIN, "cp sizes .*: prefill has 4, decode has 2"),
        (Shape(pp=4), Shape(pp=2), PLAIN, "pp sizes .*: prefill has 4, decode has 2"),
        (Shape(tp=4), Shape(tp=3), PLAIN, "tp sizes .*: prefill has 4, decode has 3"),
        (Shape(tp=4), Shape(tp=2), KvSpread(mla=True, sharded=True), "tp sizes .* 4, decode has 2; MLA"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused_with_both_values(
    prefill: Shape, decode: Shape, spread: KvSpread, named: str
) -> None:
    cause = contradiction(prefill, decode, spread)
    assert cause is not None
    assert (cause.code, cause.status) == ("incompatible", 503)
    assert re.search(named, cause.message)


def test_only_sglangs_rule_wants_one_rank_for_prefill_complete() -> None:
    assert contradiction(Shape(tp=2), Shape(tp=2)) is None
    assert contradiction(Shape(dp=4), Shape(), one_rank_only=True) is None
    cause = contradiction(Shape(tp=2), Shape(tp=2), one_rank_only=True)
    assert cause is not None
    assert "this one has tp 2, cp 1, pp 1" in cause.message


# --- laws --------------------------------------------------------------------------------------------------------

Pair = tuple[Shape, Shape, KvSpread]

sizes = st.sampled_from((1, 2, 3, 4, 6, 8))


@st.composite
def tp_pairs(draw: st.DrawFn) -> tuple[int, int]:
    """One a multiple of the other."""
    small, times = draw(sizes), draw(st.integers(1, 4))
    return draw(st.sampled_from(((small, small * times), (small * times, small))))


@st.composite
def pairs_of_groups(draw: st.DrawFn) -> Pair:
    """Groups that go together."""
    spread = KvSpread(draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
    prefill_tp, decode_tp = draw(tp_pairs())
    cp, pp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if spread.mla and spread.sharded and cp == 1:
        decode_tp = prefill_tp
    prefill = Shape(cp=cp, tp=prefill_tp, pp=pp)
    decode = Shape(tp=decode_tp, pp=draw(st.sampled_from((1, pp))))
    assert contradiction(prefill, decode, spread) is None
    return prefill, decode, spread


def decode_ranks(decode: Shape) -> list[Rank]:
    return sorted(ranks_of(decode))


@given(pair=pairs_of_groups())
def test_targets_are_ranks_of_the_group_in_order_and_each_is_named_once(pair: Pair) -> None:
    prefill, decode, spread = pair
    for here in decode_ranks(decode):
        ranks = [target.rank for target in map_ranks(prefill, decode, here, 0, spread).targets]
        assert set(ranks) <= set(ranks_of(prefill))
        assert ranks == [rank for rank in ranks_of(prefill) if rank in set(ranks)]


@given(pair=pairs_of_groups())
def test_as_many_answer_as_write_and_as_many_tell_as_each_writer_expects(pair: Pair) -> None:
    prefill, decode, spread = pair
    maps = [map_ranks(prefill, decode, here, 0, spread) for here in decode_ranks(decode)]
    for found in maps:
        assert found.required_prefill_response_num == len(found.real)
    for found in maps:
        for rank in found.real:
            tellers = sum(rank in {target.rank for target in other.targets} for other in maps)
            assert tellers == found.required_dst_info_num


@given(pair=pairs_of_groups())
def test_every_rank_that_holds_heads_has_a_taker(pair: Pair) -> None:
    prefill, decode, _ = pair
    spread = KvSpread(all_cp=True)
    taken = {rank for here in decode_ranks(decode) for rank in map_ranks(prefill, decode, here, 0, spread).real}
    assert taken == set(ranks_of(prefill))


# --- our own workers ---------------------------------------------------------------------------------------------

heads = st.integers(1, 40)


@given(tps=tp_pairs(), count=heads)
def test_our_slices_move_between_these_ranks_where_each_has_heads(tps: tuple[int, int], count: int) -> None:
    """A rank without heads (fewer heads than ranks) is left out of the links, but it is still a target."""
    prefill, decode = tps
    ours, theirs = Shape(tp=prefill), Shape(tp=decode)
    group = LayoutGroup("kv", 64 * count * 2, (0, 1), "float32", parts=2, heads=count)
    linked = set(pairs([group], 16, ours, theirs, (2, 1)))
    mapped = {
        (rank, Rank(dp=1, tp=tp)) for tp in range(decode) for rank in map_ranks(ours, theirs, Rank(dp=1, tp=tp), 2).real
    }
    assert linked <= mapped
    if count >= max(prefill, decode):
        assert linked == mapped


@given(tps=tp_pairs())
def test_our_mla_rows_come_from_the_real_rank(tps: tuple[int, int]) -> None:
    prefill, decode = tps
    ours, theirs = Shape(tp=prefill), Shape(tp=decode)
    group = LayoutGroup("mla", 656, (0, 2), "fp8_ds_mla")
    mapped = {(rank, Rank(tp=tp)) for tp in range(decode) for rank in map_ranks(ours, theirs, Rank(tp=tp), 0, MLA).real}
    assert set(pairs([group], 64, ours, theirs, (0, 0))) == mapped


def test_the_ranks_of_a_group_are_listed_as_they_are_looked_up() -> None:
    assert ranks_of(Shape(dp=2, tp=2)) == (Rank(), Rank(tp=1), Rank(dp=1), Rank(dp=1, tp=1))
    assert ranks_of(Shape(pp=2)) == (Rank(pp=1), Rank())
