"""Data parallel ranks of prefills: which a request goes to, how its room says so, and what is counted of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.core.ids import MAX_ROOM, dp_of
from pdplane.router.backends.pdplane import take
from pdplane.router.config import parse_address
from pdplane.router.legs import rooms as dialect
from pdplane.router.ranks import RankLoads
from pdplane.router.worker import Worker
from pdplane.wire.registry import MAX_RANKS

from .router_fakes import STAMP, asked_of, fleet, ok, refuse, until


@given(st.integers(0, MAX_ROOM), st.integers(1, 4096), st.data())
def test_a_room_says_its_rank_and_stays_a_room(bits: int, size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    room = dialect._room_at(bits, rank, size)
    assert 0 < room <= MAX_ROOM
    assert dp_of(room, size) == rank


def test_rooms_of_one_request_are_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = iter([8, 9, 20, 30])  # the first two fall onto one room
    monkeypatch.setattr(dialect, "_bits", lambda count: next(bits))
    assert dialect.mint_rooms_at((1, 1, 3), 4) == (9, 21, 31)


def test_the_least_loaded_rank_is_next_and_equals_take_turns() -> None:
    loads = RankLoads(3)
    assert sorted(loads.take(3, together=False)) == [0, 1, 2]
    one = loads.take(1, together=False)
    assert loads.take(2, together=False) != one * 2
    assert loads.loads == [2, 2, 2]
    loads.let_go(one)
    assert loads.take(1, together=False) == one


def test_samples_that_must_stay_together_do() -> None:
    loads = RankLoads(2)
    first, second = loads.take(3, together=True), loads.take(2, together=True)
    assert set(first).isdisjoint(second)
    assert len(set(first)) == len(set(second)) == 1
    assert sorted(loads.loads) == [2, 3]


def test_a_rank_below_zero_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="below zero"):
        RankLoads(2).let_go((1,))


async def test_64_requests_use_every_rank_and_both_legs_carry_the_room_of_its_rank() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.sized(2)
        for _ in range(64):
            assert (await it.post({})).status == 200
        ranks = Counter(asked.room % 2 for asked in it.prefill.seen)
        assert ranks == {0: 32, 1: 32}
        assert [asked.raw for asked in it.decode.seen] == [asked.raw for asked in it.prefill.seen]
        assert not any("dp_rank" in key for asked in it.prefill.seen for key in asked.body)
        await it.idle()
        assert it.router.pairing.prefills[0].ranks.loads == [0, 0]  # type: ignore[union-attr]


async def test_a_busy_rank_is_passed_over_and_workers_show_the_load_of_each() -> None:
    async with fleet(decode=ok) as it:
        await it.sized(2)
        async with it.client() as slow, it.client() as quick:
            slow.post(b"{}")
            held = await it.prefill.next()
            for _ in range(3):
                quick.post(b"{}")
                other = await it.prefill.next()
                assert other.room % 2 != held.room % 2
                other.reply()
                await quick.read()
                await until(lambda: it.router.pairing.prefills[0].load == 1)
            [entry] = [w for w in (await it.get("/workers")).json["workers"] if w["role"] == "prefill"]
            assert entry["rank_load"][held.room % 2] == 1
            assert sum(entry["rank_load"]) == 1
            assert entry["shape"] == {"dp": 2, "tp": 1, "cp": 1, "pp": 1}
            lines = (await it.get("/metrics")).body.decode()
            assert f'pdplane_router_rank_load{{worker="{it.prefill.url}",rank="{held.room % 2}"}} 1' in lines
            held.reply()
        await it.idle()
        assert it.router.pairing.prefills[0].ranks.loads == [0, 0]  # type: ignore[union-attr]


async def test_the_samples_of_a_batch_are_spread_over_the_ranks() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.sized(4)
        assert (await it.post({"n": 8})).status == 200
        rooms = it.prefill.seen[0].room
        assert Counter(room % 4 for room in rooms) == {0: 2, 1: 2, 2: 2, 3: 2}
        assert it.decode.seen[0].room == rooms
        await it.idle()


async def test_a_dispatch_that_does_not_follow_the_room_is_told_the_rank_on_each_leg() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.sized(2, load_balance_method="round_robin")
        for body in ({}, {"n": 3}):
            assert (await it.post(body)).status == 200
            prefill, decode = it.prefill.seen[-1].body, it.decode.seen[-1].body
            rank = prefill.pop("routed_dp_rank")
            assert decode.pop("disagg_prefill_dp_rank") == rank
            assert prefill == decode
            rooms = prefill["bootstrap_room"]
            assert {room % 2 for room in (rooms if isinstance(rooms, list) else [rooms])} == {rank}
        await it.idle()


async def test_the_record_names_the_rank_of_each_sample() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.sized(2)
        answer = await it.post({"n": 2})
        [attempt] = (await it.get(f"/requests/{answer.headers['x-request-id']}")).json["attempts"]
        assert attempt["prefill_ranks"] == [room % 2 for room in attempt["rooms"]]
        await it.idle()


async def test_a_retry_gives_the_rank_of_the_failed_attempt_back() -> None:
    async with fleet(2, 1, prefill=ok, decode=ok) as it:
        await it.sized(2)
        it.prefills[0].behaviour = refuse(500)
        for _ in range(8):
            assert (await it.post({"n": 2})).status == 200
        await it.idle()
        assert [worker.ranks.loads for worker in it.router.pairing.prefills] == [[0, 0], [0, 0]]  # type: ignore[union-attr]


async def test_a_prefill_that_comes_back_with_more_ranks_is_counted_anew_and_the_old_count_ends_at_zero() -> None:
    async with fleet(decode=ok) as it:
        await it.sized(2)
        worker = it.router.pairing.prefills[0]
        old = worker.ranks
        assert old is not None
        async with it.client() as client:
            client.post(b"{}")
            held = await it.prefill.next()
            await it.sized(3)
            assert worker.ranks is not old
            assert sum(old.loads) == 1
            held.reply()
            await client.read()
        await it.idle()
        assert old.loads == [0, 0]
        assert worker.ranks.loads == [0, 0, 0]  # type: ignore[union-attr]
        await it.sized(1)
        assert worker.ranks is None


# Where a request is when it ends, and what ends it. In `drained`, the client's answer is out and prefill's leg is open.
PHASES = ("asked", "computed", "streamed", "drained", "retried")
ENDS = ("left", "aborted", "deadline", "prefill refuses", "prefill resets", "decode refuses", "decode resets", "limit")
CANNOT = {
    ("computed", "prefill refuses"), ("computed", "prefill resets"), ("streamed", "decode refuses"),
    ("drained", "decode refuses"), ("drained", "decode resets"), ("drained", "deadline"),
    ("asked", "limit"), ("computed", "limit"), ("streamed", "limit"), ("retried", "limit"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "end"), [(phase, end) for phase in PHASES for end in ENDS if (phase, end) not in CANNOT]
)
async def test_whatever_ends_a_request_wherever_it_is_its_ranks_are_free_again(phase: str, end: str) -> None:
    async with fleet(2, 2, retries=1, drain_s=60.0) as it, it.client() as client:
        await it.sized(4)
        client.post(b'{"n": 3}')
        prefill, decode = await asked_of(it.prefills), await asked_of(it.decodes)
        if phase == "retried":
            prefill.fail(500)
            prefill, decode = await asked_of(it.prefills), await asked_of(it.decodes)
        elif phase == "computed":
            prefill.reply()
            await until(lambda: not any(worker.load for worker in it.router.pairing.prefills))
        elif phase == "streamed":
            decode.start()
            decode.chunk(b"data: 1\n\n")
            await client.head()
        elif phase == "drained":
            decode.reply()
            assert (await client.read()).status == 200
        in_use = sum(sum(worker.ranks.loads) for worker in it.router.pairing.prefills if worker.ranks)
        assert in_use == (0 if phase == "computed" else 3)
        if end == "left":
            client.leave()
        elif end == "aborted":
            assert it.router.abort_all(b"") == (0 if phase == "drained" else 1)
        elif end in ("deadline", "limit"):
            for exchange in (*it.router.active.values(), *it.router.draining):
                exchange.deadline = 0.0
            it.router.sweep()
        elif end.startswith("prefill"):
            prefill.fail(500) if end.endswith("refuses") else prefill.reset()
        elif end.startswith("decode"):
            decode.fail(400) if end.endswith("refuses") else decode.reset()
        if phase in ("asked", "computed") and end.endswith(("prefill refuses", "resets")):
            for fakes in (it.prefills, it.decodes):
                (await asked_of(fakes)).reply()  # the second attempt
        if phase == "streamed" and end.startswith("prefill"):
            await until(lambda: not any(worker.load for worker in it.router.pairing.prefills))  # while decode streams
            decode.finish()
        if phase == "drained" and end in ("left", "aborted"):
            prefill.reply()  # the client has its answer: nothing of this is its to end any more
        await it.idle()
        for worker in it.router.pairing.prefills:
            assert worker.ranks is not None
            assert worker.ranks.loads == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("info", "dp", "pinned"),
    [
        ({"dp_size": 2, "tp_size": 4}, 2, False),
        ({"dp_size": 2, "load_balance_method": "follow_bootstrap_room"}, 2, False),
        ({"dp_size": 2, "load_balance_method": "auto"}, 2, False),
        ({"dp_size": 2, "load_balance_method": None}, 2, False),
        ({"dp_size": 2, "load_balance_method": "total_tokens"}, 2, True),
        ({"dp_size": None}, 1, False),
        ({"dp_size": 1, "load_balance_method": "round_robin"}, 1, False),
        ({"shape": {"dp": 3, "later": 9}, "dp_size": 1}, 3, False),
        ({"shape": None, "dp_size": 1_000_000}, MAX_RANKS, False),
    ],
)
def test_sizes_are_read_by_our_names_or_the_fields(info: dict[str, Any], dp: int, pinned: bool) -> None:
    worker = Worker(parse_address("http://w:1"), "prefill")
    assert take(worker, msgspec.json.encode(info)) == ""
    assert (worker.shape.dp, worker.pins_ranks) == (dp, pinned)
    assert (worker.ranks is not None) is (dp > 1)


@pytest.mark.parametrize("shape", [{"dp": 0}, {"dp": 5000}, {"dp": "2"}, [2, 1, 1, 1], 2])
def test_a_shape_that_is_none_puts_the_worker_out(shape: object) -> None:
    worker = Worker(parse_address("http://w:1"), "prefill")
    assert "/server_info cannot be read" in take(worker, msgspec.json.encode({"shape": shape}))


# --- the policy and what else rides on a leg ------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{}, {"n": 2}])
async def test_the_policy_of_our_prefill_rides_on_both_legs(body: dict[str, Any]) -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        for one in (it.prefill, it.decode):
            one.info = {
                "stamp": {**STAMP, "policy": "prefill_complete"},
                "decode_allocation_policy": "prefill_complete",
            }
        await until(lambda: bool(it.router.pairing.prefills[0].policy and it.router.pairing.decodes[0].policy))
        assert (await it.post(body)).status == 200
        for one in (it.prefill, it.decode):
            assert one.seen[0].body["decode_allocation_policy"] == "prefill_complete"


async def test_a_native_prefill_is_told_no_policy() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.sized(2, policy="fcfs", decode_allocation_policy="early")
        assert (await it.post({})).status == 200
        assert "decode_allocation_policy" not in it.prefill.seen[0].body


@pytest.mark.parametrize(
    "field", ["decode_allocation_policy", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"]
)
async def test_a_clients_word_on_ranks_and_policy_is_stripped_and_counted(field: str) -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        assert (await it.post({field: 1, "x": 2})).status == 200
        for one in (it.prefill, it.decode):
            assert field not in one.seen[0].body
            assert one.seen[0].body["x"] == 2
        text = (await it.get("/metrics")).body.decode()
        assert f'pdplane_router_stripped_fields_total{{field="{field}"}} 1' in text


async def test_a_priority_passes_to_both_legs() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        assert (await it.post({"priority": 7})).status == 200
        assert it.prefill.seen[0].body["priority"] == it.decode.seen[0].body["priority"] == 7
