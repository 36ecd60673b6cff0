"""Rooms straight at the engines, without a router: what names a hand-off is checked where it arrives."""

from __future__ import annotations

from typing import Any

import pytest

from .fleets import CHAT, COMPLETIONS, GENERATE, Fleet, Talk, client, completion, essence, fleet, pairing, texts, until

BODY = completion()[1]


def legs(it: Fleet, body: dict[str, Any]) -> tuple[Talk, Talk]:
    return Talk(it.prefill.url, body), Talk(it.decode.url, body)


async def served(it: Fleet, room: int) -> None:
    prefill, decode = legs(it, {**BODY, **pairing(it, room)})
    assert (await prefill.answer()).status_code == 200
    assert texts(await decode.answer()) == texts(await it.whole.post(COMPLETIONS, BODY))


async def test_a_pair_serves_both_legs_without_a_router_whichever_comes_first() -> None:
    async with fleet(whole=True) as it:
        for room, first in ((1, "prefill"), (2, "decode")):
            body = {**BODY, **pairing(it, room)}
            one, other = (it.prefill, it.decode) if first == "prefill" else (it.decode, it.prefill)
            leading = Talk(one.url, body)
            await until(lambda one=one: one.group.figures()["rooms"] == 1)
            following = Talk(other.url, body)
            answers = {one.shell.role: await leading.answer(), other.shell.role: await following.answer()}
            assert essence(answers["decode"]) == essence(await it.whole.post(COMPLETIONS, BODY))
            assert answers["prefill"].json()["usage"]["completion_tokens"] == 1
        await it.at_rest()


async def test_a_room_in_use_is_a_409_on_both_legs_and_the_first_request_is_unharmed() -> None:
    async with fleet(whole=True) as it:
        it.prefill.engine.allow = 0
        first = legs(it, {**BODY, **pairing(it, 7)})
        await until(lambda: it.prefill.engine.holds())
        second = legs(it, {**BODY, "prompt": "another one", **pairing(it, 7)})
        for leg in second:
            answer = await leg.answer()
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "duplicate_room")
        it.prefill.engine.allow = None
        assert (await first[0].answer()).status_code == 200
        assert texts(await first[1].answer()) == texts(await it.whole.post(COMPLETIONS, BODY))
        await it.at_rest()


async def test_a_room_that_was_used_is_a_409_at_once() -> None:
    async with fleet(whole=True) as it:
        await served(it, 7)
        for one in (it.prefill, it.decode):
            answer = await one.post(COMPLETIONS, {**BODY, **pairing(it, 7)})
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "duplicate_room")
        await served(it, 8)
        await it.at_rest()


async def test_a_rid_in_use_is_a_409_and_the_first_request_is_unharmed() -> None:
    async with fleet(whole=True) as it:
        it.prefill.engine.allow = 0
        first = legs(it, {**BODY, **pairing(it, 7, rid="mine")})
        await until(lambda: it.prefill.engine.holds())
        for one in (it.decode, it.prefill):
            answer = await one.post(COMPLETIONS, {**BODY, **pairing(it, 8, rid="mine")})
            assert answer.status_code == 409
            assert "'mine'" in answer.json()["error"]["message"]
        it.prefill.engine.allow = None
        assert texts(await first[1].answer()) == texts(await it.whole.post(COMPLETIONS, BODY))
        assert (await first[0].answer()).status_code == 200
        await it.at_rest()


BAD_ROOMS: list[Any] = [0, -1, 2**63, 2**200, "7", "room", 1.5, True, [], [1, 2], [0], [-1], [2**63], ["7"], {}]
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    GENERATE: {"text": "x"},
}


@pytest.mark.parametrize("path", ASKED)
async def test_a_bad_room_is_a_400_on_both_legs(path: str) -> None:
    body = ASKED[path]
    async with fleet(whole=True) as it:
        for room in BAD_ROOMS:
            for one in (it.prefill, it.decode):
                answer = await one.post(path, {**body, **pairing(it, room)})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bootstrap_room"), (room, answer)
        await it.at_rest()
        await served(it, 9)


async def test_a_leg_of_the_other_dialect_is_told_so() -> None:
    async with fleet() as it:
        for one in (it.prefill, it.decode):
            answer = await one.post(COMPLETIONS, {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_dialect")
            assert "--dialect params" in answer.json()["error"]["message"]


async def test_the_same_room_twice_in_one_batch_is_a_400() -> None:
    async with fleet() as it:
        batch = {"prompt": ["a", "b"], "temperature": 0, **pairing(it, [5, 5])}
        for one in (it.prefill, it.decode):
            answer = await one.post(COMPLETIONS, batch)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bootstrap_room")
        await it.at_rest()


async def test_one_duplicate_in_a_batch_refuses_the_whole_batch_and_tells_the_other_side() -> None:
    async with fleet(whole=True) as it:
        await served(it, 7)
        batch = {"prompt": ["a", "b", "c"], "temperature": 0, **pairing(it, [6, 7, 8])}
        decode = Talk(it.decode.url, batch)
        assert (await decode.answer()).status_code == 409
        assert (await it.prefill.post(COMPLETIONS, batch)).status_code == 409
        await it.at_rest()


async def test_legs_with_different_prompts_in_one_room_never_give_text() -> None:
    async with fleet() as it:
        prefill = Talk(it.prefill.url, {**BODY, **pairing(it, 3)})
        decode = Talk(it.decode.url, {**BODY, "prompt": "Once upon a time", **pairing(it, 3)})
        for leg in (prefill, decode):
            answer = await leg.answer()
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "prompt_mismatch")
            assert "16 tokens" in answer.json()["error"]["message"]
        await it.at_rest()


async def test_a_leg_whose_other_leg_never_comes_ends_by_its_own_deadline() -> None:
    async with fleet() as it:
        for one in (it.prefill, it.decode):
            answer = await one.post(
                COMPLETIONS, {**BODY, **pairing(it, 4 + it.members.index(one))}, headers={"x-request-timeout": "0.2"}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
        await it.at_rest()


# --- records ------------------------------------------------------------------------------------------------------


async def test_every_process_tells_what_happened_to_a_request_by_the_answers_id() -> None:
    async with fleet() as it:
        for body in (BODY, {**BODY, "prompt": ["a", "b"]}):
            answer = await it.post(COMPLETIONS, body)
            request = answer.json()["id"]
            assert answer.headers["x-request-id"] == request
            told = await it.get(f"/requests/{request}")
            assert (told["request_id"], told["verdict"], told["status"]) == (request, "ok", 200)
            [attempt] = told["attempts"]
            for one, states in ((it.prefill, ["Armed", "Sent"]), (it.decode, ["Granted", "Success"])):
                record = (await one.get(f"/requests/{request}")).json()
                assert [leg["rid"] for leg in record["legs"]] == attempt["rids"]
                assert [leg["room"] for leg in record["legs"]] == attempt["rooms"]
                for leg in record["legs"]:
                    assert record["role"] == one.shell.role
                    assert [entry["state"] for entry in leg["entries"] if entry["state"] in states] == states
                    assert leg["held_pages"] == {}
                for key in (attempt["rids"][0], str(attempt["rooms"][0])):
                    assert len((await one.get(f"/requests/{key}")).json()["legs"]) == 1


async def test_a_record_says_who_holds_what_now_and_why_it_ended() -> None:
    async with fleet() as it:
        it.decode.engine.allow = 2
        talk = Talk(it.url, {**BODY, "ignore_eos": True, "prompt": "x" * 20, "rid": "my label"})
        await until(lambda: it.decode.engine.allow == 0)
        told = await it.get("/requests/my label")
        assert told["verdict"] == "running"
        request = told["request_id"]
        [leg] = (await it.decode.get(f"/requests/{request}")).json()["legs"]
        assert sum(leg["held_pages"].values()) >= 5
        await talk.drop()
        await it.at_rest()
        [leg] = (await it.decode.get(f"/requests/{request}")).json()["legs"]
        assert (leg["held_pages"], leg["finished"]) == ({}, "client_left")
        assert (await it.get(f"/requests/{request}"))["verdict"] == "client_left"


async def test_an_unknown_request_is_a_404_that_says_what_to_give() -> None:
    async with fleet() as it:
        for one in it.members:
            answer = await one.get("/requests/nobody")
            assert answer.status_code == 404
            assert "request id" in answer.json()["error"]["message"]


async def test_a_key_of_very_many_digits_is_a_404_everywhere() -> None:
    async with fleet() as it:
        async with client(it.url) as http:
            assert (await http.get(f"/requests/{'9' * 5000}")).status_code == 404
        for one in it.members:
            assert (await one.get(f"/requests/{'9' * 5000}")).status_code == 404
