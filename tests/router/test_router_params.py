"""The legs of the params dialect: prefill's, then decode's, and what prefill holds between the two."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from .params_fakes import (
    NULLS,
    ParamsWorker,
    handed_over,
    holding,
    in_order,
    nothing_held,
    params_fleet,
    prefill_of,
)
from .router_fakes import CHAT, Asked, ok, record_of, refuse, sse, until

PROMPT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def refused(status: int, code: str, **more: Any) -> Any:
    return lambda asked: asked.fail(status, code=code, **more)


async def test_prefill_is_asked_for_one_token_and_to_hold() -> None:
    body = {
        "model": "m", "messages": [], "stream": True, "max_tokens": 9, "max_completion_tokens": 8, "min_tokens": 2,
        "min_completion_tokens": 1, "stream_options": {"include_usage": True}, "temperature": 0.5,
    }  # fmt: skip
    async with params_fleet(decode=sse) as it:
        answer = await it.post(body)
        assert answer.status == 200
        leg = it.prefill.seen[0]
        assert leg.body == {
            "model": "m", "messages": [], "stream": False, "max_tokens": 1, "max_completion_tokens": 1,
            "temperature": 0.5, "kv_transfer_params": NULLS, "rid": leg.headers["x-request-id"],
        }  # fmt: skip


async def test_a_limit_that_the_client_did_not_name_by_its_newer_name_is_not_added() -> None:
    async with params_fleet(decode=ok) as it:
        await it.post(PROMPT)
        assert "max_completion_tokens" not in it.prefill.seen[0].body
        assert it.prefill.seen[0].body["max_tokens"] == 1


async def test_decode_gets_the_clients_body_byte_for_byte_and_prefills_answer_verbatim() -> None:
    raw = b'{ "model":"m","stream": true, "messages":[{"role":"user","content":"\xc3\xa9 \\u00e9"}],"max_tokens":7 }'
    params = b'{"do_remote_prefill" : true,"remote_block_ids":[[1,2 ]],"remote_request_id":"r","odd":1.50,"pd_grant":4}'

    def prefill(asked: Asked) -> None:
        asked.reply(200, b'{"id":"x","kv_transfer_params":' + params + b',"usage":{}}')

    async with params_fleet(prefill=prefill, decode=sse) as it:
        await it.post(raw)
        leg = it.decode.seen[0]
        rid = leg.headers["x-request-id"].encode()
        assert leg.raw == raw[:-1] + b',"kv_transfer_params":' + params + b',"rid":"' + rid + b'"}'


async def test_each_leg_has_an_id_of_its_own_without_commas_or_addresses() -> None:
    async with params_fleet(decode=ok) as it:
        answer = await it.post(PROMPT, headers="x-request-id: a,b\r\n")
        one, other = it.prefill.seen[0].headers["x-request-id"], it.decode.seen[0].headers["x-request-id"]
        request = answer.headers["x-request-id"]
        assert (one, other) == (f"{request}.0.0", f"{request}.0.1")
        assert "," not in one + other
        assert "127.0.0.1" not in one + other
        attempt = (await record_of(it, answer))["attempts"][0]
        assert attempt["rids"] == [one, other]
        assert (attempt["handoff"]["prefill_rid"], attempt["handoff"]["decode_rid"]) == (one, other)


async def test_decodes_answer_is_the_clients() -> None:
    async with params_fleet(decode=sse) as it:
        answer = await it.post(PROMPT)
        assert answer.body == b'data: {"a":1}\n\ndata: [DONE]\n\n'
        assert answer.headers["x-pd-mode"] == "pd"
        await it.idle()
        assert prefill_of(it).releases.empty()


async def test_decode_is_asked_only_once_prefill_has_answered() -> None:
    async with params_fleet(prefill=lambda asked: None, decode=ok) as it, it.client() as client:
        client.post(json.dumps(PROMPT).encode())
        await until(lambda: bool(it.prefill.seen))
        assert it.router.pairing.prefills[0].load == 1
        assert it.router.pairing.decodes[0].load == 0
        holding()(it.prefill.seen[0])
        assert (await client.read()).status == 200
        assert len(it.decode.seen) == 1
        await it.idle()


async def test_params_of_a_client_are_dropped_and_counted() -> None:
    async with params_fleet(decode=ok) as it:
        await it.post(PROMPT | {"kv_transfer_params": {"remote_host": "evil"}, "bootstrap_room": 5})
        assert it.prefill.seen[0].body["kv_transfer_params"] == NULLS
        assert it.decode.seen[0].body["kv_transfer_params"]["remote_host"] == "127.0.0.1"
        assert b"evil" not in it.decode.seen[0].raw
        assert it.router.metrics.stripped["kv_transfer_params"] == 1


async def test_the_record_tells_the_hold_its_lease_and_times_that_add_up() -> None:
    async with params_fleet(prefill=holding(lease_s=12.5, pd_grant=77), decode=ok) as it:
        told = await record_of(it, await it.post(PROMPT))
        attempt = told["attempts"][0]
        handoff = attempt["handoff"]
        assert (told["backend"], told["dialect"], told["mode"]) == ("pdplane", "params", "pd")
        assert (handoff["hold"], handoff["lease_s"], handoff["release"]) == (77, 12.5, "")
        assert 0 < handoff["lease_left_s"] <= 12.5
        order = [
            attempt["opened_s"], handoff["answered_s"], handoff["decode_opened_s"], attempt["first_byte_s"],
            attempt["decode_ended_s"],
        ]  # fmt: skip
        assert order == sorted(order)
        assert None not in order


async def test_prefills_4xx_is_the_answer_and_decode_is_never_asked() -> None:
    async with params_fleet(prefill=refuse(400, code="prompt_too_long"), decode=ok) as it:
        answer = await it.post(PROMPT)
        assert (answer.status, answer.error["code"]) == (400, "prompt_too_long")
        assert not it.decode.seen
        await it.idle()


NOTHING = [None, {}, {"remote_block_ids": []}, {"remote_block_ids": [[]]}, {"remote_block_ids": None}]


@pytest.mark.parametrize("params", NOTHING)
async def test_strictly_an_answer_without_a_handoff_is_an_error_that_says_so(params: Any) -> None:
    async with params_fleet(prefill=nothing_held(params), decode=ok) as it:
        answer = await it.post(PROMPT)
        assert (answer.status, answer.error["code"], answer.error["retryable"]) == (502, "no_handoff", True)
        assert not it.decode.seen
        assert prefill_of(it).releases.empty()
        await it.idle()


@pytest.mark.parametrize("params", NOTHING)
async def test_by_fallback_decode_computes_what_was_not_handed_over(params: Any) -> None:
    async with params_fleet(prefill=nothing_held(params), decode=ok, mode="fallback") as it:
        answer = await it.post(PROMPT)
        assert answer.status == 200
        assert answer.headers["x-pd-mode"] == "decode-only"
        assert "kv_transfer_params" not in it.decode.seen[0].body
        assert "pdplane_router_decode_only_total 1" in (await it.get("/metrics")).body.decode()
        await it.idle()


async def test_by_fallback_decode_serves_while_no_prefill_is_ready() -> None:
    async with params_fleet(decode=ok, mode="fallback") as it:
        it.prefill.health = 503
        await until(lambda: not it.router.pairing.prefills[0].ready)
        answer = await it.post(PROMPT)
        assert (answer.status, answer.headers["x-pd-mode"]) == (200, "decode-only")
        assert not it.prefill.seen
        assert "kv_transfer_params" not in it.decode.seen[0].body


async def test_an_answer_that_is_no_json_is_prefills_fault() -> None:
    async with params_fleet(prefill=lambda asked: asked.reply(200, b"<html>"), decode=ok) as it:
        answer = await it.post(PROMPT)
        assert (answer.status, answer.error["code"], answer.error["side"]) == (502, "upstream_garbled", "prefill")
        assert it.router.pairing.prefills[0].failures == 1


async def test_a_lease_under_the_margin_is_released_and_another_taken() -> None:
    short = in_order(holding(lease_s=0.5), holding(lease_s=30.0))
    async with params_fleet(prefill=short, decode=ok, lease_margin_s=1.0) as it:
        answer = await it.post(PROMPT)
        assert answer.status == 200
        request = answer.headers["x-request-id"]
        assert await prefill_of(it).released() == [f"{request}.0.0"]
        assert [leg.headers["x-request-id"] for leg in it.prefill.seen] == [f"{request}.0.0", f"{request}.0.2"]
        assert it.decode.seen[0].body["kv_transfer_params"]["remote_request_id"] == f"{request}.0.2"
        assert it.router.metrics.retries["lease_too_short"] == 1
        await it.idle()


async def test_a_prefill_whose_leases_are_all_too_short_is_named() -> None:
    async with params_fleet(prefill=holding(lease_s=0.5), decode=ok, lease_margin_s=1.0) as it:
        answer = await it.post(PROMPT)
        assert (answer.status, answer.error["code"]) == (503, "lease_too_short")
        assert "--lease-margin-s" in answer.error["message"]
        assert not it.decode.seen
        assert len([await prefill_of(it).released() for _ in range(2)]) == 2


LOST = [(409, "spent"), (409, "expired"), (404, "unknown_hold"), (409, "wrong_instance")]


@pytest.mark.parametrize(("status", "code"), LOST)
async def test_a_lost_hold_is_no_answer_but_a_reason_to_begin_again(status: int, code: str) -> None:
    async with params_fleet(decode=in_order(refused(status, code), ok)) as it:
        answer = await it.post(PROMPT)
        assert answer.status == 200
        one, other = (leg.body["kv_transfer_params"] for leg in it.decode.seen)
        assert one["remote_request_id"] != other["remote_request_id"]
        assert one["pd_grant"] != other["pd_grant"]
        assert await prefill_of(it).released() == [one["remote_request_id"]]
        await it.idle()
        assert prefill_of(it).releases.empty()


@pytest.mark.parametrize(("status", "code"), LOST)
async def test_a_hold_lost_again_and_again_is_a_typed_502(status: int, code: str) -> None:
    async with params_fleet(decode=refused(status, code)) as it:
        answer = await it.post(PROMPT)
        assert (answer.status, answer.error["code"], answer.error["retryable"]) == (502, code, True)
        assert len(it.prefill.seen) == 2


@pytest.mark.parametrize("code", ["prompt_mismatch", "invalid_params"])
async def test_a_wrong_handoff_is_not_tried_again(code: str) -> None:
    async with params_fleet(decode=refused(400, code)) as it:
        answer = await it.post(PROMPT)
        assert (answer.status, answer.error["code"], answer.error["retryable"]) == (502, code, False)
        assert len(it.prefill.seen) == 1
        assert await prefill_of(it).released() == [it.prefill.seen[0].headers["x-request-id"]]


async def test_decodes_word_on_the_clients_request_passes_verbatim_and_the_hold_is_released() -> None:
    async with params_fleet(decode=refuse(400, code="bad_stop", param="stop")) as it:
        answer = await it.post(PROMPT)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "bad_stop", "stop")
        assert await prefill_of(it).released() == [it.prefill.seen[0].headers["x-request-id"]]
        await until(lambda: bool(it.router.guard.releases["released"]))
        told = await record_of(it, answer)
        assert told["attempts"][0]["handoff"]["released"] is True


async def test_an_unreachable_decode_costs_the_hold_and_another_decode_gets_another_one() -> None:
    async with params_fleet(1, 2, decode=ok, policy="round-robin", health_interval_s=600.0) as it:
        await it.decodes[0].stop()
        answers = [await it.post(PROMPT) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]
        released = await prefill_of(it).released()
        given = [leg.body["kv_transfer_params"]["remote_request_id"] for leg in it.decodes[1].seen]
        assert released[0] not in given
        assert len(set(given)) == 2
        await it.idle()


async def test_a_connection_cut_before_the_first_byte_ends_decode_and_releases() -> None:
    async with params_fleet(1, 2, decode=in_order(Asked.reset, ok)) as it:
        assert (await it.post(PROMPT)).status == 200
        holds = [leg.headers["x-request-id"] for leg in it.prefill.seen]
        by_hold = {fake.seen[0].body["kv_transfer_params"]["remote_request_id"]: fake for fake in it.decodes}
        assert sorted(by_hold) == holds
        cut = by_hold[holds[0]]
        assert (await cut.aborted())["rid"] == cut.seen[0].headers["x-request-id"]
        assert await prefill_of(it).released() == [holds[0]]
        await it.idle()
        assert prefill_of(it).releases.empty()


async def test_a_client_that_leaves_between_the_hops_leaves_no_hold() -> None:
    async with params_fleet(decode=None) as it, it.client() as client:
        client.post(json.dumps(PROMPT).encode())
        leg = await it.decode.next()
        client.leave()
        assert await prefill_of(it).released() == [it.prefill.seen[0].headers["x-request-id"]]
        await leg.left.wait()
        assert (await it.decode.aborted())["rid"] == leg.headers["x-request-id"]
        await it.idle()
        assert prefill_of(it).releases.empty()


async def test_a_client_that_leaves_while_prefill_computes_ends_it_and_what_it_may_hold_by_then() -> None:
    async with params_fleet(prefill=lambda asked: None, decode=ok) as it, it.client() as client:
        client.post(json.dumps(PROMPT).encode())
        await until(lambda: bool(it.prefill.seen))
        leg = it.prefill.seen[0]
        client.leave()
        await leg.left.wait()
        rid = leg.headers["x-request-id"]
        assert (await it.prefill.aborted())["rid"] == rid
        assert await prefill_of(it).released() == [rid]
        assert not it.decode.seen
        await it.idle()


async def test_a_client_that_leaves_while_decode_streams_costs_no_release() -> None:
    async with params_fleet(decode=None) as it, it.client() as client:
        client.post(json.dumps(PROMPT).encode())
        leg = await it.decode.next()
        leg.start()
        leg.chunk(b"data: {}\n\n")
        await client.head()
        client.leave()
        await leg.left.wait()
        assert (await it.decode.aborted())["rid"] == leg.headers["x-request-id"]
        await it.idle()
        assert prefill_of(it).releases.empty()


async def test_a_deadline_between_the_hops_releases() -> None:
    async with params_fleet(decode=None) as it:
        answer = await it.post(PROMPT, headers="x-request-timeout: 0.2\r\n")
        assert (answer.status, answer.error["code"]) == (504, "deadline")
        assert await prefill_of(it).released() == [it.prefill.seen[0].headers["x-request-id"]]
        await it.idle()


async def test_an_abort_call_between_the_hops_releases() -> None:
    async with params_fleet(decode=None) as it, it.client() as client:
        client.post(json.dumps(PROMPT).encode(), headers="x-request-id: mine\r\n")
        await it.decode.next()
        assert (await it.post({"rid": "mine"}, "/abort_request")).json == {"aborted": 1}
        assert (await client.read()).status == 499
        assert await prefill_of(it).released() == [it.prefill.seen[0].headers["x-request-id"]]


async def test_a_router_that_stops_releases_before_it_is_gone() -> None:
    async with params_fleet(decode=None) as it, it.client() as client:
        client.post(json.dumps(PROMPT).encode())
        await it.decode.next()
        await it.server.stop()
        assert prefill_of(it).releases.get_nowait() == [it.prefill.seen[0].headers["x-request-id"]]
        assert (await client.read()).status == 503


async def test_a_release_is_tried_twice_and_then_counted() -> None:
    async with params_fleet(decode=refuse(400)) as it:
        prefill_of(it).release_status = 500
        answer = await it.post(PROMPT)
        await until(lambda: it.router.guard.releases["failed"] == 1)
        assert prefill_of(it).releases.qsize() == 2
        handoff = (await record_of(it, answer))["attempts"][0]["handoff"]
        assert (handoff["released"], handoff["release"]) == (False, "failed")


async def test_a_hold_that_prefill_no_longer_had_is_told_apart() -> None:
    async with params_fleet(decode=refuse(400)) as it:
        prefill_of(it).known = False
        await it.post(PROMPT)
        await until(lambda: it.router.guard.releases["unknown"] == 1)
        assert 'pdplane_router_releases_total{outcome="unknown"} 1' in (await it.get("/metrics")).body.decode()


async def test_a_release_carries_the_clients_authorization() -> None:
    async with params_fleet(decode=refuse(400), api_key="k") as it:
        heard: list[str] = []
        answer = ParamsWorker._answer

        async def listening(self: ParamsWorker, asked: Asked, reader: Any) -> None:
            if asked.path == "/v1/kv/release":
                heard.append(asked.headers.get("authorization", ""))
            await answer(self, asked, reader)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ParamsWorker, "_answer", listening)
            await it.post(PROMPT, headers="authorization: Bearer k\r\n")
            await until(lambda: heard == ["Bearer k"])


async def test_generate_is_refused_before_workers_of_this_dialect() -> None:
    async with params_fleet(decode=ok) as it:
        answer = await it.post({"text": "hi"}, "/generate")
        assert (answer.status, answer.error["code"]) == (400, "not_served")
        assert not it.prefill.seen
        await it.idle()


async def test_a_prefill_of_several_ranks_is_told_which_one_computes() -> None:
    async with params_fleet(decode=ok) as it:
        await it.sized(2, dialect="params")
        for _ in range(4):
            await it.post(PROMPT)
        assert sorted(leg.body["routed_dp_rank"] for leg in it.prefill.seen) == [0, 0, 1, 1]
        assert all("routed_dp_rank" not in leg.body for leg in it.decode.seen)
        await it.idle()


async def test_the_largest_handoff_passes() -> None:
    blocks = [list(range(100_000))]

    def prefill(asked: Asked) -> None:
        asked.reply(200, {"kv_transfer_params": handed_over(asked, remote_block_ids=blocks)})

    async with params_fleet(prefill=prefill, decode=ok) as it:
        assert (await it.post(PROMPT, CHAT)).status == 200
        assert it.decode.seen[0].body["kv_transfer_params"]["remote_block_ids"] == blocks


async def test_a_prefill_that_falls_silent_is_left_and_another_one_holds() -> None:
    async with params_fleet(2, 1, decode=ok) as it:
        it.prefills[0].behaviour = it.prefills[1].behaviour = in_order(lambda asked: None, holding())
        waiting = asyncio.ensure_future(it.post(PROMPT))
        await until(lambda: any(fake.seen for fake in it.prefills))
        (at,) = [at for at, fake in enumerate(it.prefills) if fake.seen]
        it.router.pairing.prefills[at].silent = True
        it.router.sweep()
        answer = await waiting
        assert answer.status == 200
        assert (await record_of(it, answer))["attempts"][0]["cause"]["code"] == "worker_silent"
        await it.idle()
