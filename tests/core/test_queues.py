"""The admission queue: priority, then arrival, and a bounded overtaking of a head that does not fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.queues import LOOKED_AT, AdmissionQueue


def always(_: object) -> bool:
    return True


def drained(queue: AdmissionQueue[str]) -> list[str]:
    found = []
    while (item := queue.pop_fitting(always)) is not None:
        found.append(item)
    return found


def test_first_come_first_served() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue()
    for item in "abc":
        queue.push(item)
    assert drained(queue) == ["a", "b", "c"]


@given(st.lists(st.integers(-3, 3)))
def test_higher_priority_first_then_arrival(priorities: list[int]) -> None:
    queue: AdmissionQueue[str] = AdmissionQueue()
    items = [f"{n}" for n in range(len(priorities))]
    for item, priority in zip(items, priorities, strict=True):
        queue.push(item, priority)
    assert list(queue) == sorted(items, key=lambda item: -priorities[int(item)])
    assert drained(queue) == sorted(items, key=lambda item: -priorities[int(item)])


def test_a_head_that_does_not_fit_is_overtaken_so_often_and_no_more() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(max_overtakes=2)
    for item in ["big", "s1", "s2", "s3"]:
        queue.push(item)

    def small(item: str) -> bool:
        return item != "big"

    assert [queue.pop_fitting(small) for _ in range(3)] == ["s1", "s2", None]
    assert drained(queue) == ["big", "s3"]


def test_no_overtaking_at_all_where_the_bound_is_zero() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(max_overtakes=0)
    queue.push("big")
    queue.push("small")
    assert queue.pop_fitting(lambda item: item == "small") is None


def test_a_removed_head_blocks_nobody() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(max_overtakes=0)
    queue.push("big")
    queue.push("small")
    assert queue.pop_fitting(lambda item: item == "small", stamp=1) is None
    queue.remove("big")
    queue.remove("big")
    assert "big" not in queue
    assert queue.pop_fitting(lambda item: item == "small", stamp=1) == "small"
    assert len(queue) == 0


def test_nobody_is_asked_again_while_nothing_has_changed() -> None:
    asked: list[str] = []

    def fits(item: str) -> bool:
        asked.append(item)
        return False

    queue: AdmissionQueue[str] = AdmissionQueue()
    queue.push("a")
    for _ in range(5):
        assert queue.pop_fitting(fits, stamp=1) is None
    assert asked == ["a"]
    queue.pop_fitting(fits, stamp=2)
    queue.push("b")
    queue.pop_fitting(fits, stamp=2)
    assert asked == ["a", "a", "a", "b"]


def test_equal_items_are_still_two() -> None:
    queue: AdmissionQueue[list[int]] = AdmissionQueue()
    one, two = [1], [1]
    queue.push(one)
    queue.push(two)
    queue.remove(two)
    assert queue.pop_fitting(always) is one


def test_a_look_at_a_long_queue_costs_no_more_than_one_at_a_short_one() -> None:
    queue: AdmissionQueue[int] = AdmissionQueue(max_overtakes=8)
    for number in range(10 * LOOKED_AT):
        queue.push(number)
    asked: list[int] = []

    def never(number: int) -> bool:
        asked.append(number)
        return False

    assert queue.pop_fitting(never) is None
    assert asked == list(range(LOOKED_AT))
