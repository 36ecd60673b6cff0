"""Workers that come back with other values: met at once, refused with both, taken again when the old ones return."""

from __future__ import annotations

from typing import Any

import pytest

from .router_fakes import STAMP, Asked, Fleet, fleet, ok, until


async def said(it: Fleet, fake: Any, **info: Any) -> None:
    """`fake` tells this from now on, and the router has heard it."""
    fake.info = info
    [worker] = [w for w in it.router.pairing.workers if w.url == fake.url]
    await until(lambda: worker.instance == info.get("instance", worker.instance) and worker.last_heard > 0)


async def workers(it: Fleet) -> dict[str, dict[str, Any]]:
    return {entry["role"]: entry for entry in (await it.get("/workers")).json["workers"]}


@pytest.mark.parametrize(
    ("other", "ours", "theirs"),
    [
        ({"page_size": 32}, "32", "16"),
        ({"kv_dtype": "bf16"}, "bf16", "f16"),
        ({"policy": "prefill_complete"}, "prefill_complete", "early"),
        ({"tokenizer": "t2"}, "t2", "'t'"),
        ({"groups": [{"name": "kv", "row_bytes": 128, "layers": [0, 1], "dtype": "f16"}]}, "128 B", "64 B"),
        ({"protocol_min": 4, "protocol_max": 5}, "4 to 5", "1 to 2"),
    ],
)
async def test_a_prefill_that_returns_with_another_value_is_out_until_the_old_one_is_back(
    other: dict[str, Any], ours: str, theirs: str
) -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await said(it, it.decode, stamp=STAMP, instance="d1")
        await said(it, it.prefill, stamp=STAMP, instance="p1")
        await until(lambda: it.router.pairing.ready)
        assert (await it.post({})).status == 200
        await said(it, it.prefill, stamp=STAMP | other, instance="p2")
        await until(lambda: not it.router.pairing.ready)
        before = len(it.prefill.seen), len(it.decode.seen)
        answer = await it.post({})
        assert (answer.status, answer.error["code"]) == (503, "no_ready_pair")
        assert ours in answer.error["message"]
        assert theirs in answer.error["message"]
        assert (len(it.prefill.seen), len(it.decode.seen)) == before
        for role, peer in (("prefill", it.decode), ("decode", it.prefill)):
            entry = (await workers(it))[role]
            assert not entry["ready"]
            assert entry["reason"].startswith("incompatible: ")
            [clash] = entry["incompatible"]
            assert clash["with"] == peer.url
            assert ours in clash["why"]
            assert theirs in clash["why"]
        await said(it, it.prefill, stamp=STAMP, instance="p3")
        await until(lambda: it.router.pairing.ready)
        assert (await it.post({})).status == 200
        assert it.decode.info["instance"] == it.router.pairing.decodes[0].instance == "d1"
        assert (await workers(it))["decode"]["incompatible"] == []


async def test_a_worker_that_fits_one_peer_serves_with_it_and_shows_the_other() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok) as it:
        await said(it, it.prefill, stamp=STAMP, instance="p")
        await said(it, it.decodes[0], stamp=STAMP, instance="d0")
        await said(it, it.decodes[1], stamp=STAMP | {"page_size": 32}, instance="d1")
        await until(lambda: len(it.router.pairing.prefills[0].partners) == 1)
        entry = (await workers(it))["prefill"]
        assert entry["ready"]
        assert [clash["with"] for clash in entry["incompatible"]] == [it.decodes[1].url]
        for _ in range(4):
            assert (await it.post({})).status == 200
        assert not it.decodes[1].seen


async def test_parts_of_pages_need_a_protocol_that_knows_them() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await said(it, it.decode, stamp=STAMP | {"protocol_max": 1}, instance="old")
        await said(it, it.prefill, stamp=STAMP, instance="p", shape={"tp": 2})
        await until(lambda: not it.router.pairing.ready)
        assert "protocol 1" in (await it.post({})).error["message"]
        await said(it, it.prefill, stamp=STAMP, instance="p2", shape={"tp": 1})
        await until(lambda: it.router.pairing.ready)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("axis", ["cp", "pp"])
async def test_ranks_that_no_session_would_serve_are_no_pair_at_the_router_either(side: str, axis: str) -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        for fake in (it.prefill, it.decode):
            shape = {axis: 2} if fake.role == side else {}
            await said(it, fake, stamp=STAMP, instance=f"{fake.role} 2", shape=shape)
        await until(lambda: not it.router.pairing.ready)
        answer = await it.post({})
        assert (answer.status, answer.error["code"]) == (503, "no_ready_pair")
        assert f"{side} has dp 1" in answer.error["message"]
        assert "one pipeline parallel rank" in answer.error["message"]
        assert it.prefill.seen == it.decode.seen == []


async def test_native_engines_of_any_shape_are_let_pair() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await said(it, it.prefill, instance="p2", pp_size=2)
        assert it.router.pairing.prefills[0].shape.pp == 2
        assert (await it.post({})).status == 200


async def test_a_process_that_goes_is_looked_at_when_its_idle_connections_close() -> None:
    async with fleet(prefill=ok, decode=ok, health_interval_s=60.0) as it:
        await said(it, it.decode)
        assert (await it.post({})).status == 200
        await it.idle()
        worker = it.router.pairing.prefills[0]
        assert worker.idle
        it.prefill.info = {"instance": "another"}
        it.prefill.drop_connections()
        await until(lambda: worker.instance == "another")  # the next look by the clock is a minute away


async def test_a_request_that_dies_over_a_worker_has_it_looked_at() -> None:
    async with fleet(prefill=ok, decode=lambda asked: asked.reset(), health_interval_s=60.0) as it:
        it.decode.info = {"instance": "another"}
        await it.post({})
        await until(lambda: it.router.pairing.decodes[0].instance == "another")


async def test_a_worker_that_finds_the_pair_incompatible_has_both_looked_at_and_is_not_busy() -> None:
    def unfit(asked: Asked) -> None:
        asked.reply(503, {"error": {"message": "page_size differs", "code": "incompatible", "side": "decode"}})

    async with fleet(prefill=None, decode=unfit, health_interval_s=60.0) as it:
        it.prefill.info, it.decode.info = {"instance": "p2"}, {"instance": "d2"}
        answer = await it.post({})
        assert (answer.status, answer.error["message"]) == (503, "page_size differs")
        await until(lambda: [w.instance for w in it.router.pairing.workers] == ["p2", "d2"])
        assert all((w.avoid, w.failures) == ("", 0) for w in it.router.pairing.workers)
        await it.idle()


# --- limits and overload --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefill", "decode", "side"), [(8, 4, "decode"), (4, 8, "prefill")])
async def test_a_prompt_over_one_sides_limit_is_refused_before_any_leg_and_at_the_limit_it_is_served(
    prefill: int, decode: int, side: str
) -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        it.prefill.info = {"limits": {"max_prompt_tokens": prefill}}
        it.decode.info = {"limits": {"max_prompt_tokens": decode}}
        await until(lambda: all(w.limits.max_prompt_tokens for w in it.router.pairing.workers))
        for tokens in (3, 4):
            assert (await it.post({"prompt": [1] * tokens}, "/v1/completions")).status == 200
        answer = await it.post({"prompt": [1] * 5}, "/v1/completions")
        assert (answer.status, answer.error["code"], answer.error["side"]) == (400, "prompt_too_long", side)
        assert "5 tokens" in answer.error["message"]
        assert "hold 4" in answer.error["message"]
        assert len(it.prefill.seen) == len(it.decode.seen) == 2
        assert it.router.metrics.attempts == 2
        await it.idle()


async def test_workers_without_a_transport_in_common_are_no_pair() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await said(it, it.prefill, stamp=STAMP, instance="p1", transports=["shm", "tcp"])
        await said(it, it.decode, stamp=STAMP, instance="d1", transports=["shm_push"])
        await until(lambda: not it.router.pairing.ready)
        answer = await it.post({})
        assert answer.status == 503
        message = answer.error["message"]
        assert "no transport in common: prefill has shm, tcp, decode offers shm_push; give both" in message
        await said(it, it.decode, stamp=STAMP, instance="d2", transports=["shm_push", "tcp"])
        await until(lambda: it.router.pairing.ready)
        assert (await it.post({})).status == 200


async def test_a_prompt_goes_to_the_pair_that_can_hold_it() -> None:
    async with fleet(2, 2, prefill=ok, decode=ok) as it:
        for i, limit in enumerate((4, 8)):
            for one in (it.prefills[i], it.decodes[i]):
                one.info = {"limits": {"max_prompt_tokens": limit}}
        await until(lambda: all(w.limits.max_prompt_tokens for w in it.router.pairing.workers))
        for _ in range(6):
            assert (await it.post({"prompt": [1] * 6}, "/v1/completions")).status == 200
        assert not it.prefills[0].seen
        assert not it.decodes[0].seen
        assert (await it.post({"prompt": [1] * 9}, "/v1/completions")).status == 400
        await it.idle()


async def test_a_retry_never_goes_to_a_pair_that_cannot_hold_the_prompt() -> None:
    async with fleet(1, 2, prefill=None, decode=ok) as it:
        it.decodes[0].info, it.decodes[1].info = ({"limits": {"max_prompt_tokens": limit}} for limit in (4, 8))
        it.decodes[1].behaviour = lambda asked: asked.fail(503, "busy")
        await until(lambda: all(w.limits.max_prompt_tokens for w in it.router.pairing.decodes))
        answer = await it.post({"prompt": [1] * 6}, "/v1/completions")
        assert (answer.status, answer.error["code"]) == (503, "busy")  # and not the 400 of who was not asked
        assert it.decodes[0].seen == []
        assert it.router.metrics.attempts == 1
        assert not it.router.metrics.retries
        await it.idle()


async def test_decodes_429_ends_prefills_leg_and_reaches_the_client_with_its_retry_after() -> None:
    async with fleet(prefill=None, decode=lambda asked: asked.fail(429, "overloaded", "retry-after: 3\r\n")) as it:
        answer = await it.post({})
        assert (answer.status, answer.headers["retry-after"], answer.error["code"]) == (429, "3", "overloaded")
        prefill = await it.prefill.next()
        await it.prefill.aborted()
        await prefill.left.wait()
        assert all((w.failures, w.ban.why) == (0, "") for w in it.router.pairing.workers)
        await it.idle()


async def test_one_busy_prefill_of_two_costs_no_client_anything() -> None:
    async with fleet(2, 1, prefill=ok, decode=None) as it:
        it.prefills[0].behaviour = lambda asked: asked.fail(429, "overloaded", "retry-after: 1\r\n")
        it.decode.behaviour = ok
        for _ in range(20):
            assert (await it.post({})).status == 200
        rooms = [asked.room for one in it.prefills for asked in one.seen]
        assert len(rooms) == len(set(rooms)) == it.router.metrics.attempts
        assert (it.router.pairing.prefills[0].failures, it.router.pairing.prefills[0].ban.why) == (0, "")
        await it.idle()
