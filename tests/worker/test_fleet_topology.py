"""Groups and ranks of every size on either side: right text, whoever holds which KV head, however pages move."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from pdplane.core.layout import LayoutGroup
from pdplane.transport import checksum

from .fake_engine import spec
from .fleets import COMPLETIONS, Fleet, Talk, completion, essence, fleet, pairing, texts, until

TP = [(1, 2), (2, 1), (2, 4), (4, 1), (4, 4)]
TRANSPORTS = ["shm", "shm_push", "tcp"]
POLICIES = ["early", "prefill_complete"]

THREE_HEADS = spec(heads=3, row_bytes=3 * 2 * 32)
"""At tp 4 rank 0 holds none of them."""

MLA = spec(
    groups=(LayoutGroup("latent", 656, (0, 1), "fp8_ds_mla"), LayoutGroup("index", 132, (1,), "uint8")),
)
"""Rows that every rank holds whole, and index rows on one layer only."""

PROMPTS = ["x", "a page", "some more than a page of tokens ", "many pages of tokens, a chunk and another " * 4]


async def answers_right(it: Fleet, prompts: list[str] = PROMPTS, **more: Any) -> None:
    asked = [completion(prompt, max_tokens=9, **more) for prompt in prompts]
    pairs = await asyncio.gather(*(it.post(*one) for one in asked))
    wholes = await asyncio.gather(*(it.whole.post(*one) for one in asked))
    assert [essence(pair) for pair in pairs] == [essence(whole) for whole in wholes], [one.text for one in pairs]
    await it.at_rest()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("prefill", "decode"), TP)
async def test_text_is_right_between_unequal_tp_sizes(prefill: int, decode: int, transport: str, policy: str) -> None:
    both = {"transport": (transport,), "decode_allocation_policy": policy}
    async with fleet(whole=True, both=both, prefill={"tp": prefill}, decode={"tp": decode}) as it:
        await answers_right(it)
        await answers_right(it)  # with prefixes in prefill's cache


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (4, 2), (2, 4)])
async def test_a_rank_without_a_head_is_a_dummy(prefill: int, decode: int) -> None:
    async with fleet(whole=True, model=THREE_HEADS, prefill={"tp": prefill}, decode={"tp": decode}) as it:
        await answers_right(it)
        for one, tp in ((it.prefill, prefill), (it.decode, decode)):
            assert (one.shell.parts.pools[0] is None) == (tp == 4)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (4, 2)])
async def test_rows_that_every_rank_holds_whole_arrive_on_all_of_them(prefill: int, decode: int) -> None:
    async with fleet(whole=True, model=MLA, prefill={"tp": prefill}, decode={"tp": decode}) as it:
        await answers_right(it)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_text_is_right_from_dp_2_to_dp_4(transport: str) -> None:
    async with fleet(whole=True, both={"transport": (transport,)}, prefill={"dp": 2}, decode={"dp": 4}) as it:
        await answers_right(it, [f"prompt {i} " * (1 + i % 5) for i in range(24)])
        assert all(engine.added for one in (it.prefill, it.decode) for engine in one.engines)


@pytest.mark.parametrize("policy", POLICIES)
async def test_dp_and_tp_at_once(policy: str) -> None:
    both = {"decode_allocation_policy": policy}
    async with fleet(whole=True, both=both, prefill={"dp": 2, "tp": 2}, decode={"dp": 2, "tp": 4}) as it:
        await answers_right(it, [f"prompt {i} " * (1 + i % 5) for i in range(16)])


@pytest.mark.skipif(not checksum.AVAILABLE, reason=checksum.REMEDY)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_checked_pages_arrive_as_they_left_between_unequal_tp_sizes(transport: str) -> None:
    both = {"transport": (transport,), "checksum": True}
    async with fleet(whole=True, both=both, prefill={"tp": 2}, decode={"tp": 4}) as it:
        await answers_right(it)


async def test_the_preferred_transport_is_taken_where_both_have_it() -> None:
    mine = {"transport": ("shm_push", "tcp")}
    for theirs, taken in ((("tcp", "shm_push"), "shm_push"), (("tcp",), "tcp")):
        async with fleet(prefill=mine, decode={"transport": theirs}) as it:
            answer = await it.post(*completion())
            [leg] = (await it.decode.get(f"/requests/{answer.json()['id']}")).json()["legs"]
            assert [link["transport"] for grant in leg["grants"] for link in grant["links"]] == [taken]


async def test_sides_without_a_transport_in_common_are_told_so() -> None:
    async with fleet(prefill={"transport": ("shm",)}, decode={"transport": ("tcp",)}, ready=False) as it:
        await until(lambda: "transport" in it.router.pairing.missing())
        leg = Talk(it.prefill.url, {**completion()[1], **pairing(it, 4)})
        straight = await it.decode.post(COMPLETIONS, {**completion()[1], **pairing(it, 4)})
        await leg.drop()
        for answer in (await it.post(*completion()), straight):
            assert answer.status_code == 503
            assert "shm" in answer.text
            assert "tcp" in answer.text
        await it.at_rest()


# --- ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["follow_bootstrap_room", "total_requests"])
async def test_sixty_four_requests_without_a_rank_find_theirs_and_both_prefill_ranks_work(method: str) -> None:
    async with fleet(whole=True, prefill={"dp": 2, "load_balance_method": method}, decode={"dp": 4}) as it:
        await answers_right(it, [f"prompt {i}" for i in range(64)])
        assert all(len(engine.added) > 8 for engine in it.prefill.engines)
        assert all(engine.added for engine in it.decode.engines)


async def test_an_explicit_prefill_rank_is_the_one_that_decode_fetches_from() -> None:
    async with fleet(prefill={"dp": 2, "load_balance_method": "total_requests"}, decode={"dp": 4}) as it:
        for room, dp in itertools.product(range(100, 108), range(2)):
            number = room * 2 + 1 - dp  # the room's own rank would be the other
            body = {**completion(f"prompt {room} {dp}", max_tokens=3)[1], **pairing(it, number)}
            before = [len(engine.added) for engine in it.prefill.engines]
            legs = await asyncio.gather(
                it.prefill.post(COMPLETIONS, {**body, "routed_dp_rank": dp}),
                it.decode.post(COMPLETIONS, {**body, "disagg_prefill_dp_rank": dp, "routed_dp_rank": room % 4}),
            )
            assert [leg.status_code for leg in legs] == [200, 200], [leg.text for leg in legs]
            before[dp] += 1
            assert [len(engine.added) for engine in it.prefill.engines] == before
        await it.at_rest()
        assert all(engine.added for engine in it.decode.engines)


@pytest.mark.parametrize("policy", POLICIES)
async def test_one_body_that_names_the_prefills_rank_serves_both_legs(policy: str) -> None:
    by_load = {"dp": 2, "load_balance_method": "total_requests"}
    async with fleet(whole=True, both={"decode_allocation_policy": policy}, prefill=by_load) as it:
        for dp, room in ((0, 31), (1, 32), (1, 33), (0, 34)):
            asked = completion(f"prompt {room}", max_tokens=3)[1]
            body = {**asked, **pairing(it, room), "disagg_prefill_dp_rank": dp}
            legs = await asyncio.gather(it.prefill.post(COMPLETIONS, body), it.decode.post(COMPLETIONS, body))
            assert [leg.status_code for leg in legs] == [200, 200], [leg.text for leg in legs]
            assert texts(legs[1]) == texts(await it.whole.post(COMPLETIONS, asked))
            [leg] = (await it.decode.get(f"/requests/{room}")).json()["legs"]
            links = [link for grant in leg["grants"] for link in grant["links"]]
            assert links
            assert all(it.prefill.shells[dp].instance in str(link) for link in links), links
        await it.at_rest()


CONTRADICTIONS: dict[str, tuple[str, str, dict[str, int]]] = {
    "prefill, its own name": ("follow_bootstrap_room", "prefill", {"routed_dp_rank": 0}),
    "prefill, the older name": ("follow_bootstrap_room", "prefill", {"data_parallel_rank": 0}),
    "prefill, the pair's name": ("follow_bootstrap_room", "prefill", {"disagg_prefill_dp_rank": 0}),
    "decode, the pair's name": ("follow_bootstrap_room", "decode", {"disagg_prefill_dp_rank": 0}),
    "decode, a rank that prefill lacks": ("total_requests", "decode", {"disagg_prefill_dp_rank": 2}),
    "prefill, a rank that it lacks": ("total_requests", "prefill", {"disagg_prefill_dp_rank": 2}),
    "prefill, two names": ("total_requests", "prefill", {"disagg_prefill_dp_rank": 0, "routed_dp_rank": 1}),
    "decode, two names": ("total_requests", "decode", {"data_parallel_rank": 0, "routed_dp_rank": 1}),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
async def test_a_rank_that_cannot_be_is_a_400_that_names_it_and_nothing_is_computed(case: str) -> None:
    method, side, named = CONTRADICTIONS[case]
    async with fleet(prefill={"dp": 2, "load_balance_method": method}, decode={"dp": 2}) as it:
        answer = await getattr(it, side).post(COMPLETIONS, {**completion("x")[1], **pairing(it, 7), **named})
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert "rank" in message
        assert all(str(rank) in message for rank in named.values()), message
        await it.at_rest()
        assert all(engine.added == [] for one in it.members for engine in one.engines)


async def test_a_rank_that_contradicts_the_room_is_a_400_on_both_sides_naming_both() -> None:
    async with fleet(prefill={"dp": 2}, decode={"dp": 4}) as it:
        body = {**completion("x")[1], **pairing(it, 7)}
        legs = await asyncio.gather(
            it.prefill.post(COMPLETIONS, {**body, "routed_dp_rank": 0}),
            it.decode.post(COMPLETIONS, {**body, "disagg_prefill_dp_rank": 0}),
        )
        for leg in legs:
            assert leg.status_code == 400, leg.text
            assert "7" in leg.json()["error"]["message"]
            assert "rank" in leg.json()["error"]["message"]
        await it.at_rest()
        assert all(engine.added == [] for one in it.members for engine in one.engines)


async def test_legs_that_name_two_ranks_of_one_prefill_are_told_at_once_that_they_contradict() -> None:
    async with fleet(prefill={"dp": 2, "load_balance_method": "total_requests"}, decode={}) as it:
        body = {**completion("x")[1], **pairing(it, 7)}
        waiting = asyncio.ensure_future(it.prefill.post(COMPLETIONS, {**body, "routed_dp_rank": 1}))
        answer = await it.decode.post(COMPLETIONS, {**body, "disagg_prefill_dp_rank": 0})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "rank_contradiction"
        assert "room 7 was taken by data parallel rank 1" in answer.json()["error"]["message"]
        waiting.cancel()  # as a router ends the leg of an attempt that has failed
        await asyncio.gather(waiting, return_exceptions=True)
        await it.at_rest()
        assert all(engine.added == [] for one in it.members for engine in one.engines)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_rank_that_is_not_there_is_a_400(side: str) -> None:
    async with fleet(prefill={"dp": 2}, decode={"dp": 2}) as it:
        body = {**completion("x")[1], **pairing(it, 7), "routed_dp_rank": 9}
        answer = await getattr(it, side).post(COMPLETIONS, body)
        assert answer.status_code == 400
        assert "rank 9" in answer.json()["error"]["message"]
        await it.at_rest()


async def test_a_room_that_one_group_has_is_refused_at_every_other() -> None:
    async with fleet(decode={"dp": 4}) as it:
        it.decode.engines[0].allow = 1
        body = {**completion("p" * 40, ignore_eos=True)[1], **pairing(it, 5)}
        first = asyncio.gather(it.prefill.post(COMPLETIONS, body), it.decode.post(COMPLETIONS, body))
        await until(lambda: it.decode.engines[0].holds())
        for rank in (None, 1, 3):
            again = await it.decode.post(COMPLETIONS, {**body, "routed_dp_rank": rank})
            assert (again.status_code, again.json()["error"]["code"]) == (409, "duplicate_room")
        it.decode.let_go()
        assert [leg.status_code for leg in await first] == [200, 200]
        await it.at_rest()


async def test_a_batch_over_several_groups_is_taken_whole_or_not_at_all() -> None:
    async with fleet(decode={"dp": 2, "max_queue": 1, "max_running": 1}, router={"retries": 0}) as it:
        it.decode.let_go()
        rooms = list(range(20, 30))
        body = {**completion(["x"] * 10)[1], **pairing(it, rooms), "rid": [f"r{i}" for i in rooms]}
        answer = await it.decode.post(COMPLETIONS, body)
        assert answer.status_code == 429, answer.text
        await until(lambda: not it.decode.group.jobs)
        assert all(engine.added == [] for engine in it.decode.engines)


# --- cancels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_client_that_leaves_in_any_phase_frees_every_page_on_every_rank(transport: str, policy: str) -> None:
    both = {"transport": (transport,), "decode_allocation_policy": policy, "dp": 2}
    async with fleet(whole=True, both=both, prefill={"tp": 2}, decode={"tp": 4}) as it:
        for side, steps in (("prefill", 0), ("prefill", 1), ("prefill", 3), ("decode", 0), ("decode", 2)):
            held = getattr(it, side)
            for engine in held.engines:
                engine.allow = steps
            talks = [Talk(it.url, completion(f"{side} {steps} {i} " * 4, ignore_eos=True)[1]) for i in range(4)]
            await until(lambda held=held: any(engine.holds() and engine.allow == 0 for engine in held.engines))
            for talk in talks:
                await talk.drop()
            held.let_go()
            await it.at_rest()
        await answers_right(it)


async def test_kv_that_nobody_fetches_is_held_for_a_term_and_then_given_back() -> None:
    both = {"decode_allocation_policy": "prefill_complete"}
    settings = {"both": both, "prefill": {"hold_term_s": 1.0}, "router": {"retries": 0}}
    async with fleet(whole=True, model=spec(row_bytes=8 * 1024), **settings) as it:  # 128 tokens
        it.decode.engine.allow = 0
        first = Talk(it.url, completion("a" * 100, max_tokens=20)[1])
        await until(lambda: it.decode.engine.holds())
        late = await it.post(*completion("b" * 100, max_tokens=20))
        assert late.status_code >= 500, late.text
        assert late.json()["error"]["code"] == "hold_expired", late.text
        it.decode.let_go()
        assert (await first.answer()).status_code == 200
        await it.at_rest()
        await answers_right(it, PROMPTS[:3])
