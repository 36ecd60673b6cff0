"""Native vLLM behind the router: what it is asked, how it is looked at, and what its errors become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .params_fakes import NULLS, VllmWorker, handed_over, in_order, vllm_error, vllm_fleet
from .router_fakes import CHAT, Asked, Fleet, ok, sse, until

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
IDS = [5, 6, 7]


def prefill(asked: Asked) -> None:
    """As NixlConnector answers: without a word of leases."""
    told = {"kv_transfer_params": handed_over(asked, lease_s=None)}
    del told["kv_transfer_params"]["pd_grant"]
    if asked.path == COMPLETIONS:
        told |= {"choices": [{"index": 0, "text": "x", "prompt_token_ids": IDS if asked_ids(asked) else None}]}
    else:
        told |= {"choices": [], "prompt_token_ids": IDS if asked_ids(asked) else None}
    asked.reply(200, told)


def asked_ids(asked: Asked) -> bool:
    return bool(asked.body.get("return_token_ids"))


def broken(asked: Asked) -> None:
    asked.reply(500, vllm_error())


def native(it: Fleet) -> list[VllmWorker]:
    fakes = [*it.prefills, *it.decodes]
    assert all(isinstance(fake, VllmWorker) for fake in fakes)
    return fakes  # type: ignore[return-value]


async def test_leg_one_asks_for_ids_and_carries_nothing_of_ours() -> None:
    async with vllm_fleet(prefill=prefill, decode=ok) as it:
        await it.post(PROMPT | {"stream": True, "max_tokens": 5})
        leg = it.prefill.seen[0]
        assert leg.body == PROMPT | {
            "stream": False, "max_tokens": 1, "return_token_ids": True, "kv_transfer_params": NULLS,
        }  # fmt: skip
        assert leg.headers["x-request-id"].endswith(".0.0")


async def test_a_chat_goes_on_with_the_ids_inside_the_params() -> None:
    async with vllm_fleet(prefill=prefill, decode=sse) as it:
        raw = json.dumps(PROMPT | {"stream": True}).encode()
        await it.post(raw)
        leg = it.decode.seen[0]
        assert leg.raw.startswith(raw[:-1] + b',"kv_transfer_params":{')
        params = leg.body["kv_transfer_params"]
        assert params.pop("prompt_token_ids") == IDS
        assert params["remote_request_id"] == it.prefill.seen[0].headers["x-request-id"]
        assert set(leg.body) == {*PROMPT, "stream", "kv_transfer_params"}


async def test_a_completion_goes_on_with_the_ids_as_its_prompt() -> None:
    async with vllm_fleet(prefill=prefill, decode=ok) as it:
        await it.post({"prompt": "hi", "max_tokens": 4}, COMPLETIONS)
        leg = it.decode.seen[0]
        assert (leg.body["prompt"], leg.body["max_tokens"]) == (IDS, 4)
        assert "prompt_token_ids" not in leg.body["kv_transfer_params"]


PICTURE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}


@pytest.mark.parametrize(
    ("body", "path", "reused"),
    [
        (PICTURE, CHAT, False), (PARTS, CHAT, True), (PROMPT | {"echo": True}, CHAT, False),
        ({"prompt": "a", "echo": True}, COMPLETIONS, False), ({"prompt_embeds": "x"}, COMPLETIONS, False),
        ({"prompt": "a", "echo": False}, COMPLETIONS, True),
    ],
)  # fmt: skip
async def test_ids_are_not_reused_where_the_text_itself_is_needed(body: Any, path: str, reused: bool) -> None:
    async with vllm_fleet(prefill=prefill, decode=ok) as it:
        assert (await it.post(body, path)).status == 200
        assert asked_ids(it.prefill.seen[0]) is reused
        given = it.decode.seen[0].body
        assert (given.get("prompt") == IDS or "prompt_token_ids" in given["kv_transfer_params"]) is reused


async def test_an_engine_that_tells_no_ids_is_sent_the_text_again() -> None:
    def silent(asked: Asked) -> None:
        asked.reply(200, {"choices": [], "kv_transfer_params": handed_over(asked)})

    async with vllm_fleet(prefill=silent, decode=ok) as it:
        await it.post({"prompt": "hi"}, COMPLETIONS)
        assert it.decode.seen[0].body["prompt"] == "hi"


async def test_readiness_model_and_limit_come_from_health_and_models() -> None:
    async with vllm_fleet(prefill=prefill, decode=ok) as it:
        models = (await it.get("/v1/models")).json["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [("m", 1024)]
        told = (await it.get("/workers")).json
        assert (told["backend"], told["dialect"]) == ("vllm", "params")
        assert {worker["dialect"] for worker in told["workers"]} == {"params"}
        answer = await it.post({"prompt": [1] * 1024}, COMPLETIONS)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert not it.prefill.seen


async def test_an_engine_whose_health_is_bad_is_out_and_comes_back_as_another() -> None:
    async with vllm_fleet(prefill=prefill, decode=ok) as it:
        it.decode.health = 503
        worker = it.router.pairing.decodes[0]
        await until(lambda: not worker.ready)
        assert (await it.post(PROMPT)).status == 503
        worker.no_abort_call = True
        it.decode.health = 200
        await until(lambda: worker.ready)
        assert not worker.no_abort_call
        assert (await it.post(PROMPT)).status == 200


async def test_decodes_bare_500_is_tried_again_from_leg_one_on_the_same_pair() -> None:
    async with vllm_fleet(prefill=prefill, decode=in_order(broken, ok)) as it:
        answer = await it.post(PROMPT)
        assert answer.status == 200
        holds = [leg.body["kv_transfer_params"]["remote_request_id"] for leg in it.decode.seen]
        assert len(set(holds)) == 2
        attempts = (await it.get("/requests/" + answer.headers["x-request-id"])).json["attempts"]
        assert attempts[0]["cause"]["code"] == "kv_load_failed"
        assert (attempts[0]["handoff"]["released"], attempts[0]["handoff"]["release"]) == (False, "native")
        assert 'releases_total{outcome="native"} 1' in (await it.get("/metrics")).body.decode()
        await it.idle()


async def test_a_500_that_stays_is_typed_and_says_what_is_known() -> None:
    async with vllm_fleet(prefill=prefill, decode=broken) as it:
        answer = await it.post(PROMPT)
        assert (answer.status, answer.error["code"], answer.error["retryable"]) == (502, "kv_load_failed", True)
        assert it.decode.url in answer.error["message"]
        assert "before its first byte" in answer.error["message"]


async def test_prefills_500_is_typed_and_names_the_leg() -> None:
    async with vllm_fleet(prefill=broken, decode=ok) as it:
        answer = await it.post(PROMPT)
        assert (answer.status, answer.error["code"], answer.error["side"]) == (502, "prefill_failed", "prefill")
        assert not it.decode.seen


async def test_a_4xx_passes_verbatim() -> None:
    body = b'{"error":{"message":"max_tokens is too large","type":"BadRequestError","param":"max_tokens","code":400}}'
    async with vllm_fleet(prefill=prefill, decode=lambda asked: asked.reply(400, body)) as it:
        answer = await it.post(PROMPT)
        assert (answer.status, answer.body) == (400, body)


def fails_in_stream(asked: Asked) -> None:
    """The head is 200 before the load fails."""
    asked.start()
    asked.chunk(b"data: " + vllm_error() + b"\n\n")
    asked.chunk(b"data: [DONE]\n\n")
    asked.finish()


async def test_a_stream_that_begins_with_an_error_was_refused_and_is_tried_again() -> None:
    async with vllm_fleet(prefill=prefill, decode=in_order(fails_in_stream, sse)) as it:
        answer = await it.post(PROMPT | {"stream": True})
        assert answer.status == 200
        assert answer.body == b'data: {"a":1}\n\ndata: [DONE]\n\n'
        assert len(it.prefill.seen) == 2
        await it.idle()


async def test_a_first_event_in_pieces_is_waited_for() -> None:
    async with vllm_fleet(prefill=prefill, decode=lambda asked: None, retries=0) as it, it.client() as client:
        client.post(json.dumps(PROMPT | {"stream": True}).encode())
        await until(lambda: bool(it.decode.seen))
        leg = it.decode.seen[0]
        leg.start()
        leg.chunk(b'data: {"err')
        worker = it.router.pairing.decodes[0]
        await until(lambda: worker.load == 1)
        leg.chunk(b'or":{"message":"Internal server error","code":500}}\n\n')
        answer = await client.read()
        assert (answer.status, answer.error["code"]) == (502, "kv_load_failed")


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'


async def test_a_chat_that_names_a_role_and_then_fails_was_refused_too() -> None:
    def fails(asked: Asked) -> None:
        asked.start()
        asked.chunk(ROLE)
        asked.chunk(b"data: " + vllm_error() + b"\n\n")
        asked.chunk(b"data: [DONE]\n\n")
        asked.finish()

    async with vllm_fleet(prefill=prefill, decode=in_order(fails, sse)) as it:
        answer = await it.post(PROMPT | {"stream": True})
        assert answer.body == b'data: {"a":1}\n\ndata: [DONE]\n\n'
        assert len(it.prefill.seen) == 2
        await it.idle()


async def test_a_role_goes_out_with_the_first_word() -> None:
    async with vllm_fleet(prefill=prefill, decode=lambda asked: None) as it, it.client() as client:
        client.post(json.dumps(PROMPT | {"stream": True}).encode())
        await until(lambda: bool(it.decode.seen))
        leg = it.decode.seen[0]
        leg.start()
        leg.chunk(ROLE)
        leg.chunk(WORD)
        await client.head()
        assert (await client.chunk(), await client.chunk()) == (ROLE, WORD)
        leg.finish()
        assert await client.chunks() == b""


async def test_an_answer_of_a_role_alone_is_whole_when_it_ends() -> None:
    def mute(asked: Asked) -> None:
        asked.start()
        asked.chunk(ROLE)
        asked.finish()

    async with vllm_fleet(prefill=prefill, decode=mute) as it:
        assert (await it.post(PROMPT | {"stream": True})).body == ROLE


@pytest.mark.parametrize("pieces", [1, 2])
async def test_an_error_later_in_a_stream_is_typed_in_the_place_of_the_bare_one(pieces: int) -> None:
    word, end = b'data: {"choices":[{"index":0}]}\n\n', b"data: [DONE]\n\n"

    def breaks_off(asked: Asked) -> None:
        asked.start()
        parts = [word, b"data: " + vllm_error() + b"\n\n", end]
        framed = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]
        asked.send(framed[0] if pieces == 2 else b"".join(framed))
        if pieces == 2:
            asked.rest = b"".join(framed[1:])  # type: ignore[attr-defined]
        else:
            asked.end()

    async with vllm_fleet(prefill=prefill, decode=breaks_off) as it, it.client() as client:
        client.post(json.dumps(PROMPT | {"stream": True}).encode())
        assert (await client.head())[0] == 200
        if pieces == 2:
            assert await client.chunk() == word
            it.decode.seen[0].send(it.decode.seen[0].rest)  # type: ignore[attr-defined]
            it.decode.seen[0].end()
        told = (await client.chunks()).removeprefix(word)
        error = json.loads(told.strip().removeprefix(b"data: "))["error"]
        assert (error["code"], error["retryable"], error["side"]) == ("decode_broke_off", False, "decode")
        assert "after its first byte" in error["message"]
        await it.idle()


async def test_a_stream_that_begins_well_is_passed_on_from_its_first_event() -> None:
    async with vllm_fleet(prefill=prefill, decode=lambda asked: None) as it, it.client() as client:
        client.post(json.dumps(PROMPT | {"stream": True}).encode())
        await until(lambda: bool(it.decode.seen))
        leg = it.decode.seen[0]
        leg.start()
        leg.chunk(b'data: {"choices":[]}\n\n')
        assert (await client.head())[0] == 200
        assert await client.chunk() == b'data: {"choices":[]}\n\n'
        leg.finish()
        assert await client.chunks() == b""


@pytest.mark.parametrize(("path", "form"), [(CHAT, "chatcmpl-{}"), (COMPLETIONS, "cmpl-{}-0")])
async def test_a_closed_leg_is_aborted_by_its_external_id(path: str, form: str) -> None:
    async with vllm_fleet(prefill=prefill, decode=lambda asked: None) as it, it.client() as client:
        client.post(json.dumps(PROMPT | {"prompt": "x"}).encode(), path)
        await until(lambda: bool(it.decode.seen))
        client.leave()
        await it.decode.seen[0].left.wait()
        rid = it.decode.seen[0].headers["x-request-id"]
        assert await it.decode.aborted() == {"request_ids": [form.format(rid)]}
        await it.idle()


@pytest.mark.parametrize("form", ["chatcmpl-{}", "cmpl-{}-0"])
async def test_a_request_is_found_by_the_id_that_the_engine_makes_of_a_legs(form: str) -> None:
    async with vllm_fleet(prefill=prefill, decode=ok) as it:
        answer = await it.post({"prompt": "x"}, COMPLETIONS)
        rid = it.decode.seen[0].headers["x-request-id"]
        assert (await it.get(f"/requests/{form.format(rid)}")).json["request_id"] == answer.headers["x-request-id"]


async def test_an_engine_without_the_abort_call_is_asked_once() -> None:
    async with vllm_fleet(prefill=prefill, decode=lambda asked: None) as it:
        native(it)[1].has_abort = False
        for times in (1, 2):
            async with it.client() as client:
                client.post(json.dumps(PROMPT).encode())
                await until(lambda times=times: len(it.decode.seen) == times)  # type: ignore[misc]
                leg = it.decode.seen[-1]
                client.leave()
                await leg.left.wait()
                await until(lambda: it.router.pairing.decodes[0].no_abort_call)
        await it.idle()
        assert it.decode.aborts.qsize() == 1
        assert it.router.guard.failed == 0


async def test_the_lease_of_an_engine_that_tells_none_is_a_setting() -> None:
    async with vllm_fleet(prefill=prefill, decode=ok, vllm_lease_s=6.0) as it:
        answer = await it.post(PROMPT)
        handoff = (await it.get("/requests/" + answer.headers["x-request-id"])).json["attempts"][0]["handoff"]
        assert handoff["lease_s"] == 6.0
        assert handoff["hold"] is None


async def test_null_params_of_vllm_are_an_error_or_a_mark() -> None:
    def null(asked: Asked) -> None:
        asked.reply(200, {"choices": [], "kv_transfer_params": None})

    async with vllm_fleet(prefill=null, decode=ok) as it:
        assert (await it.post(PROMPT)).error["code"] == "no_handoff"
    async with vllm_fleet(prefill=null, decode=ok, mode="fallback") as it:
        answer = await it.post(PROMPT)
        assert answer.headers["x-pd-mode"] == "decode-only"
        assert it.decode.seen[0].body == PROMPT


async def test_every_name_of_a_model_is_listed() -> None:
    async with vllm_fleet(prefill=prefill, decode=ok) as it:
        native(it)[1].aliases = ("adapter",)
        await until(lambda: it.router.pairing.decodes[0].aliases == ("adapter",))
        models = (await it.get("/v1/models")).json["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [("m", 1024), ("adapter", 1024)]
        assert (await it.post(PROMPT)).status == 200


async def test_engines_of_two_models_never_pair_and_both_are_named() -> None:
    async with vllm_fleet(prefill=prefill, decode=ok) as it:
        native(it)[1].model = "other"
        await until(lambda: not it.router.pairing.ready)
        answer = await it.post(PROMPT)
        assert (answer.status, answer.error["code"]) == (503, "no_ready_pair")
        assert "'m'" in answer.error["message"]
        assert "'other'" in answer.error["message"]
        native(it)[0].aliases = ("other",)
        await until(lambda: it.router.pairing.ready)


async def test_a_look_carries_the_routers_key_which_guards_the_engines_too() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmWorker, "key", "k")
        async with vllm_fleet(prefill=prefill, decode=ok, api_key="k") as it:
            assert (await it.post(PROMPT, headers="authorization: Bearer k\r\n")).status == 200
            assert it.decode.seen[0].headers["authorization"] == "Bearer k"
        async with vllm_fleet(prefill=prefill, decode=ok, api_key="other", ready=False) as it:
            await until(lambda: "--api-key" in it.router.pairing.decodes[0].reason)


async def test_an_engine_alone_serves_by_one_leg_while_no_pair_is_ready() -> None:
    alone = VllmWorker("aggregated", ok)
    await alone.start()
    async with vllm_fleet(prefill=prefill, decode=ok, worker=(alone.url,), mode="fallback") as it:
        await it.prefill.stop()
        await it.decode.stop()
        await until(lambda: not any(worker.ready for worker in it.router.pairing.workers[:2]))
        asked = {"prompt": ["a", "b"], "n": 2}
        answer = await it.post(asked, COMPLETIONS)
        assert (answer.status, answer.headers["x-pd-mode"]) == (200, "aggregated")
        assert alone.seen[0].body == asked
    await alone.stop()


async def test_a_sample_that_is_refused_is_typed_for_the_whole() -> None:
    async with vllm_fleet(prefill=prefill, decode=broken) as it:
        answer = await it.post({"prompt": ["a", "b"]}, COMPLETIONS)
        assert (answer.status, answer.error["code"], answer.error["retryable"]) == (502, "kv_load_failed", True)
        await it.idle()


async def test_a_worker_of_ours_is_no_vllm() -> None:
    async with vllm_fleet(prefill=prefill, decode=ok) as it:
        native(it)[1].owned_by = "pdplane"
        worker = it.router.pairing.decodes[0]
        await until(lambda: worker.reason == "this is a pdplane worker and no vLLM; leave --backend out")


async def test_an_engine_that_is_no_vllm_is_out_with_the_reason() -> None:
    async with vllm_fleet(prefill=prefill, decode=ok) as it:
        native(it)[1].model = ""
        worker = it.router.pairing.decodes[0]
        await until(lambda: worker.reason == "/v1/models names no model")
