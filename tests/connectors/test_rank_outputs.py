"""RankOutputs against what it stands for: by who has reported what, in any order and however often."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdplane.core.connector import RankOutputs
from pdplane.core.events import KVOutput
from pdplane.core.ids import PageId, Rank, Rid

from .failing import BROKEN
from .file_store import merge

RANKS = [Rank(tp=tp) for tp in range(3)]
STRANGER = Rank(tp=7)
LIVE = [Rid("a"), Rid("b"), Rid("c")]
RIDS = [*LIVE, Rid("gone")]

PROPERTY = settings(
    derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)  # however busy the machine is

some = st.sets(st.sampled_from(RIDS))
outputs = st.builds(
    KVOutput,
    finished_sending=some,
    finished_recving=some,
    failed_recving=st.dictionaries(st.sampled_from(RIDS), st.just(BROKEN)),
    invalid_block_ids=st.sets(st.integers(0, 9).map(PageId)),
    confirmed=some,
)
reports = st.lists(st.tuples(st.sampled_from([*RANKS, STRANGER]), outputs), max_size=12)


def told(said: list[tuple[Rank, KVOutput]], ranks: list[Rank] = RANKS) -> list[KVOutput]:
    one = RankOutputs(ranks, LIVE)
    return [one.add(rank, output) for rank, output in said]


@PROPERTY
@given(reports)
def test_nothing_is_complete_before_every_rank_has_said_it(said: list[tuple[Rank, KVOutput]]) -> None:
    for name in ("finished_sending", "finished_recving", "confirmed"):
        who: dict[Rid, set[Rank]] = {}
        for (rank, output), whole in zip(said, told(said), strict=True):
            for rid in getattr(output, name) if rank in RANKS else ():
                who.setdefault(rid, set()).add(rank)
            for rid in getattr(whole, name) - {Rid("gone")}:
                assert who.pop(rid) == set(RANKS)


@PROPERTY
@given(st.permutations(RANKS), st.lists(st.integers(0, 2), max_size=6))
def test_it_is_complete_when_the_last_rank_has_said_it_however_often_the_others_have(
    order: list[Rank], again: list[int]
) -> None:
    said = [order[0], order[1], *(order[at] for at in again if at < 2), order[2]]
    whole = told([(rank, KVOutput(finished_recving={LIVE[0]}, confirmed={LIVE[0]})) for rank in said])
    assert [bool(each.finished_recving) for each in whole] == [False] * (len(said) - 1) + [True]
    assert whole[-1] == KVOutput(finished_recving={LIVE[0]}, confirmed={LIVE[0]})


@PROPERTY
@given(reports)
def test_what_a_stranger_says_is_not_heard(said: list[tuple[Rank, KVOutput]]) -> None:
    heard = [(rank, output) for rank, output in said if rank in RANKS]
    of_strangers = [whole for (rank, _), whole in zip(said, told(said), strict=True) if rank not in RANKS]
    assert of_strangers == [KVOutput()] * len(of_strangers)
    assert [whole for (rank, _), whole in zip(said, told(said), strict=True) if rank in RANKS] == told(heard)


@PROPERTY
@given(reports)
def test_of_whom_nobody_knows_all_passes_at_once_and_nothing_is_kept(said: list[tuple[Rank, KVOutput]]) -> None:
    gone = Rid("gone")
    for (rank, output), whole in zip(said, told(said), strict=True):
        if rank in RANKS:
            assert (gone in output.finished_recving) == (gone in whole.finished_recving)
            assert (gone in output.finished_sending) == (gone in whole.finished_sending)
            assert (gone in output.confirmed) == (gone in whole.confirmed)
            assert (gone in output.failed_recving) == (gone in whole.failed_recving)


@PROPERTY
@given(reports)
def test_bad_pages_pass_at_once_and_all_of_them(said: list[tuple[Rank, KVOutput]]) -> None:
    for (rank, output), whole in zip(said, told(said), strict=True):
        assert whole.invalid_block_ids == (output.invalid_block_ids if rank in RANKS else set())


@PROPERTY
@given(reports)
def test_a_failure_is_told_with_the_end_of_its_load_or_after_it_and_never_lost(
    said: list[tuple[Rank, KVOutput]],
) -> None:
    failed, over = set[Rid](), set[Rid]()
    for (rank, output), whole in zip(said, told(said), strict=True):
        if rank in RANKS:
            failed |= output.failed_recving.keys()
        assert whole.failed_recving.keys() <= failed | {Rid("gone")}
        over |= whole.finished_recving
        assert whole.failed_recving.keys() <= over | {Rid("gone")}
        assert failed & whole.finished_recving <= whole.failed_recving.keys() | {Rid("gone")}
    late = set[Rid]().union(*(whole.failed_recving.keys() for whole in told(said)))
    assert failed & over & set(LIVE) <= late


@PROPERTY
@given(reports)
def test_nothing_that_has_failed_is_confirmed_any_more(said: list[tuple[Rank, KVOutput]]) -> None:
    failed = set[Rid]()
    for (rank, output), whole in zip(said, told(said), strict=True):
        failed |= output.failed_recving.keys() if rank in RANKS else set()
        assert whole.confirmed & failed <= {Rid("gone")}


@PROPERTY
@given(reports)
def test_one_rank_alone_is_heard_as_it_speaks(said: list[tuple[Rank, KVOutput]]) -> None:
    """With one rank there is nothing to wait for, but that a failure waits for the end of its load."""
    one = [(RANKS[0], output) for _, output in said]
    for (_, output), whole in zip(one, told(one, RANKS[:1]), strict=True):
        assert whole.finished_recving == output.finished_recving
        assert whole.finished_sending == output.finished_sending


@PROPERTY
@given(reports, reports)
def test_who_is_forgotten_begins_anew(before: list[tuple[Rank, KVOutput]], after: list[tuple[Rank, KVOutput]]) -> None:
    one = RankOutputs(RANKS, LIVE)
    for rank, output in before:
        one.add(rank, output)
    for rid in RIDS:
        one.forget(rid)
    assert [one.add(rank, output) for rank, output in after] == told(after)


@PROPERTY
@given(st.lists(outputs, max_size=4))
def test_what_is_said_in_pieces_is_what_is_said_at_once(pieces: list[KVOutput]) -> None:
    """Of one rank, between two questions."""
    whole = KVOutput()
    for piece in pieces:
        merge(whole, piece)
    assert whole.finished_recving == set[Rid]().union(*(piece.finished_recving for piece in pieces))
    assert whole.failed_recving.keys() == set[Rid]().union(*(piece.failed_recving.keys() for piece in pieces))
