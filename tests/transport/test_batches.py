"""The book of what one link owes: frames in order, and every move ends exactly once."""

from __future__ import annotations

import pytest

from pdplane.core.ids import GrantNo, MoveNo, PageId
from pdplane.transport.batches import Batch, Batches
from pdplane.transport.contract import Pairs
from pdplane.transport.landing_table import Verdict
from pdplane.transport.tcp_frames import BadData

G, OTHER = GrantNo(1), GrantNo(2)


class Book:
    """Frames of at most two pages."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, str]] = []
        self.batches = Batches(lambda number, error: self.ended.append((number, error)), 2)

    def post(self, number: int, *dst: int, grant: GrantNo = G) -> None:
        pages = [PageId(page) for page in dst]
        self.batches.post(Batch(MoveNo(number), grant, Pairs(pages, pages)))

    def begin(self) -> tuple[int, list[int]] | None:
        """(seq, pages) of the next frame, sent."""
        head = self.batches.head()
        if head is None:
            return None
        self.batches.begin()
        return head[0], [pair.dst for pair in head[2]]

    def begin_all(self) -> list[tuple[int, list[int]]]:
        return list(iter(self.begin, None))


@pytest.fixture
def book() -> Book:
    return Book()


def test_frames_are_numbered_and_cut_in_the_order_of_the_moves(book: Book) -> None:
    book.post(1, 10, 11, 12)
    book.post(2, 20)
    assert book.begin_all() == [(1, [10, 11]), (2, [12]), (3, [20])]
    assert book.batches.in_flight == 3
    assert not book.batches.waiting


def test_a_move_ends_with_the_ack_of_its_last_frame(book: Book) -> None:
    book.post(1, 10, 11, 12)
    book.begin()
    book.batches.acked(1, Verdict.LANDED)
    assert book.ended == []
    book.begin()
    book.batches.acked(2, Verdict.LANDED)
    assert book.ended == [(1, "")]


def test_a_discarded_frame_ends_its_move_and_no_other_when_the_frames_under_way_are_acked(book: Book) -> None:
    book.post(1, 10, 11, 12, 13, 14)
    book.post(2, 20)
    assert [book.begin(), book.begin()] == [(1, [10, 11]), (2, [12, 13])]
    book.batches.acked(1, Verdict.REVOKED)
    assert book.ended == []
    assert book.begin() == (3, [20])
    book.batches.acked(2, Verdict.CUT)
    book.batches.acked(3, Verdict.LANDED)
    assert book.ended == [(1, "discarded: revoked"), (2, "")]


@pytest.mark.parametrize("page", [-1, 2**32])
def test_a_page_that_the_wire_has_no_room_for_ends_its_move_and_the_next_goes_on(book: Book, page: int) -> None:
    book.post(1, page)
    book.post(2, 20)
    assert book.begin_all() == [(1, [20])]
    assert book.ended == [(1, "discarded: not granted")]


def test_such_a_page_in_a_later_frame_waits_for_those_under_way(book: Book) -> None:
    book.post(1, 10, 11, 2**32)
    assert book.begin_all() == [(1, [10, 11])]
    assert book.ended == []
    assert not book.batches.waiting
    book.batches.acked(1, Verdict.LANDED)
    assert book.ended == [(1, "discarded: not granted")]


def test_a_cancel_drops_what_has_not_begun_of_that_grant(book: Book) -> None:
    book.post(1, 10, 11, 12)
    book.post(2, 20)
    book.post(3, 30, grant=OTHER)
    book.begin()
    book.batches.cancel(G)
    assert book.ended == [(2, "cancelled")]
    assert book.begin_all() == [(2, [12]), (3, [30])]


def test_a_failure_ends_each_move_once_and_the_next_connection_counts_from_one(book: Book) -> None:
    book.post(1, 10, 11, 12, 13, 14)
    book.post(2, 20)
    book.begin()
    book.begin()
    book.batches.acked(1, Verdict.WRONG_PEER)
    book.batches.fail("gone")
    assert book.ended == [(1, "discarded: wrong peer"), (2, "gone")]
    book.post(3, 30)
    assert book.begin_all() == [(1, [30])]


@pytest.mark.parametrize("seq", [0, 2])
def test_an_ack_out_of_turn_is_not_believed(book: Book, seq: int) -> None:
    book.post(1, 10, 11, 12)
    book.begin_all()
    with pytest.raises(BadData, match=f"ack {seq} where 1 of 2 is due"):
        book.batches.acked(seq, Verdict.LANDED)
    assert book.ended == []


# --- pairs ---------------------------------------------------------------------------------------------------------


def test_pairs_are_a_sequence_of_pairs() -> None:
    pages = [PageId(page) for page in range(4)]
    pairs = Pairs(pages, pages[::-1])
    assert (len(pairs), list(pairs), pairs[-1]) == (4, [pairs[0], pairs[1], pairs[2], pairs[3]], pairs[3])
    assert [(pair.src, pair.dst) for pair in pairs[1:3]] == [(1, 2), (2, 1)]
    assert Pairs.of(pairs) is pairs
    assert list(Pairs.of(list(pairs))) == list(pairs)


def test_pairs_without_a_place_for_each_page_are_refused() -> None:
    with pytest.raises(ValueError, match="1 pages cannot go to 2"):
        Pairs([PageId(1)], [PageId(1), PageId(2)])
