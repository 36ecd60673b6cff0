"""Workers that drain: nothing new reaches them, what runs ends well, and nobody is banned for it."""

from __future__ import annotations

from typing import Any

import pytest

from .router_fakes import STAMP, Asked, Fleet, fleet, ok, until


def draining(asked: Asked) -> None:
    asked.reply(503, {"error": {"message": "an operator drains it; use another worker", "code": "draining"}})


async def shown(it: Fleet, url: str) -> dict[str, Any]:
    return {w["url"]: w for w in (await it.get("/workers")).json["workers"]}[url]


@pytest.mark.parametrize("status", [503, 200])
@pytest.mark.parametrize("said", [True, "new kernel"])
async def test_a_worker_whose_health_says_draining_gets_no_new_pair_and_says_why(status: int, said: Any) -> None:
    async with fleet(1, 2, prefill=ok, decode=ok) as it:
        it.decodes[0].health, it.decodes[0].facts = status, {"draining": said}
        await until(lambda: not it.router.pairing.decodes[0].ready)
        for _ in range(8):
            assert (await it.post({})).status == 200
        assert not it.decodes[0].seen
        entry = await shown(it, it.decodes[0].url)
        reason = "it takes nothing new" if said is True else said
        assert (entry["draining"], entry["reason"], entry["ready"]) == (reason, f"draining: {reason}", False)
        text = (await it.get("/metrics")).body.decode()
        assert f'pdplane_router_worker_draining{{worker="{it.decodes[0].url}",role="decode"}} 1' in text
        it.decodes[0].health, it.decodes[0].facts = 200, {}
        await until(lambda: it.router.pairing.decodes[0].ready)
        assert (await shown(it, it.decodes[0].url))["draining"] == ""


async def test_a_server_info_that_says_draining_is_heard_too() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok) as it:
        it.decodes[0].info = {"draining": "new kernel"}
        await until(lambda: it.router.pairing.decodes[0].reason == "draining: new kernel")


async def test_what_runs_on_a_draining_worker_finishes() -> None:
    async with fleet(1, 2, prefill=ok) as it, it.client() as client:
        client.post(b'{"stream": true}')
        await until(lambda: any(not one.asked.empty() for one in it.decodes))
        left = next(one for one in it.decodes if not one.asked.empty())
        decode = await left.next()
        decode.start()
        decode.chunk(b"data: 1\n\n")
        await client.head()
        left.health, left.facts = 503, {"draining": "new kernel"}
        worker = next(w for w in it.router.pairing.decodes if w.url == left.url)
        await until(lambda: not worker.ready)
        it.router.sweep()
        decode.chunk(b"data: 2\n\n")
        decode.finish()
        assert await client.chunks() == b"data: 1\n\ndata: 2\n\n"
        assert left.aborts.empty()
        await it.idle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_leg_refused_by_a_draining_worker_is_tried_elsewhere_without_a_ban(side: str) -> None:
    async with fleet(2, 2, prefill=ok, decode=ok, health_interval_s=60.0, ban_after=1) as it:
        fakes = it.prefills if side == "prefill" else it.decodes
        fakes[0].behaviour = draining
        fakes[0].health, fakes[0].facts = 503, {"draining": "an operator drains it"}
        for _ in range(10):
            assert (await it.post({})).status == 200
        workers = it.router.pairing.prefills if side == "prefill" else it.router.pairing.decodes
        await until(lambda: not workers[0].ready)
        assert len(fakes[0].seen) == 1  # out at its first word, not at the next look
        assert (workers[0].failures, workers[0].ban.why, workers[0].busy_until) == (0, "", 0.0)
        assert it.router.metrics.retries == {"draining": 1}
        await it.idle()


async def test_a_decode_that_says_its_prefill_drains_takes_the_prefill_out() -> None:
    async with fleet(2, 1, prefill=None, health_interval_s=60.0) as it, it.client() as client:
        client.post(b"{}")
        first = await it.decode.next()
        await until(lambda: any(one.seen for one in it.prefills))
        [culprit] = [one for one in it.prefills if one.seen]
        culprit.health, culprit.facts = 503, {"draining": "prefill drains"}
        error = {"message": "prefill drains", "code": "draining", "side": "prefill", "retryable": True}
        first.reply(503, {"error": error})
        second = await it.decode.next()
        assert second.room != first.room
        assert [worker.url for worker in it.router.pairing.prefills if worker.draining] == [culprit.url]
        assert it.router.pairing.decodes[0].ready
        second.reply()
        assert (await client.read()).status == 200


async def test_a_worker_that_leaves_by_its_own_word_is_logged_once_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet(1, 2, prefill=ok, decode=ok, health_interval_s=60.0) as it:
        it.decodes[0].behaviour = draining
        it.decodes[0].health, it.decodes[0].facts = 503, {"draining": "an operator drains it"}
        caplog.clear()
        for _ in range(8):
            assert (await it.post({})).status == 200
        await until(lambda: it.decodes[0].url in caplog.text)
        [line] = [record.getMessage() for record in caplog.records if it.decodes[0].url in record.getMessage()]
        assert line == f"decode {it.decodes[0].url} is out of service: draining: an operator drains it"


async def test_where_all_drain_a_client_is_told_so() -> None:
    async with fleet(prefill=ok, decode=draining, health_interval_s=60.0) as it:
        it.decode.health, it.decode.facts = 503, {"draining": "an operator drains it"}
        answer = await it.post({})
        assert (answer.status, answer.error["code"]) == (503, "draining")
        answer = await it.post({})
        assert (answer.status, answer.error["code"]) == (503, "no_ready_pair")
        assert "draining: an operator drains it" in answer.error["message"]


async def test_a_draining_word_that_does_not_hold_is_forgotten_at_the_next_look() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok, health_interval_s=60.0) as it:
        it.router.drains(it.router.pairing.decodes[0], "so it was said")
        assert not it.router.pairing.decodes[0].ready
        await until(lambda: it.router.pairing.decodes[0].ready)
        assert it.router.pairing.decodes[0].draining == ""
        for _ in range(4):
            assert (await it.post({})).status == 200
        assert it.decodes[0].seen  # in pairs again, though it is the same instance as before


async def test_a_client_is_told_at_once_that_the_only_decode_drains_and_which_it_is() -> None:
    async with fleet(2, 1, prefill=ok, decode=ok) as it:
        it.decode.health, it.decode.facts = 503, {"draining": "new kernel"}
        await until(lambda: not it.router.pairing.ready)
        before = it.router.metrics.attempts
        answer = await it.post({})
        assert (answer.status, answer.error["code"], answer.error["retryable"]) == (503, "no_ready_pair", True)
        assert answer.error["message"] == f"no decode is ready: {it.decode.url} draining: new kernel"
        assert it.router.metrics.attempts == before
        assert it.prefill.seen == it.decode.seen == []


async def test_a_decode_that_drains_is_named_beside_one_that_does_not_fit() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok) as it:
        it.decodes[0].health, it.decodes[0].facts = 503, {"draining": "new kernel"}
        for fake, shape in ((it.prefill, {}), (it.decodes[1], {"cp": 2})):
            fake.info = {"stamp": STAMP, "shape": shape}
        await until(lambda: not it.router.pairing.ready)
        message = (await it.post({})).error["message"]
        assert f"{it.decodes[0].url} draining: new kernel" in message
        assert f"{it.decodes[1].url}: decode has dp 1, cp 2" in message
