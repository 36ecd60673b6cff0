"""What a simulated page holds: whose it is, head by head, and the same for all who share a prefix."""

from __future__ import annotations

import msgspec
import pytest

from pdplane.core.ids import Rid, Room
from pdplane.core.slices import shard_bytes
from pdplane.sim.content import GROUP, PAGE_BYTES, PAGE_SIZE, Work


def work(serial: int, **changes: object) -> Work:
    drawn = Work(Rid(f"r{serial}"), Room(serial), serial, 10, 2, 2, prompt=7, family=1, family_tokens=5)
    return msgspec.structs.replace(drawn, **changes)


def test_pages_of_two_attempts_differ_and_so_do_two_pages_of_one() -> None:
    assert len({work(1).tag(0), work(1).tag(1), work(2).tag(0), work(2).tag(1)}) == 4


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_holds_its_part_and_all_parts_make_the_page(ranks: int) -> None:
    parts = [work(1).tag(0, rank, ranks) for rank in range(ranks)]
    assert [len(part) for part in parts] == [shard_bytes((GROUP,), PAGE_SIZE, rank, ranks) for rank in range(ranks)]
    assert sum(len(part) for part in parts) == PAGE_BYTES
    assert sorted(b"".join(parts)) == sorted(work(1).tag(0))


def test_where_prefixes_are_shared_full_pages_of_a_prompt_are_alike_and_the_rest_is_not() -> None:
    one, other = work(1, marked_by_prompt=True), work(2, marked_by_prompt=True)
    assert [one.tag(index) == other.tag(index) for index in range(4)] == [True, True, False, False]
    assert one.page_keys == other.page_keys
    assert len(one.page_keys) == 2


def test_another_prompt_of_the_family_shares_the_familys_tokens_alone() -> None:
    one, other = work(1, marked_by_prompt=True), work(2, marked_by_prompt=True, prompt=8)
    assert [one.tag(index) == other.tag(index) for index in range(2)] == [True, False]
    assert [a == b for a, b in zip(one.page_keys, other.page_keys, strict=True)] == [True, False]


def test_where_they_are_not_shared_there_are_no_keys() -> None:
    assert work(1).page_keys == ()
