"""Readiness, workers, models, metrics: what the router says of itself."""

from __future__ import annotations

import asyncio

from .router_fakes import STAMP, FakeWorker, fleet, ok, until


async def test_without_a_whole_pair_requests_get_a_503_that_names_what_is_missing() -> None:
    async with fleet(prefill=ok, decode=ok, ready=False) as it:
        await it.prefill.stop()
        await until(lambda: it.router.pairing.decodes[0].ready)
        await until(lambda: it.router.pairing.prefills[0].reason == "connection refused")
        ready = await it.get("/ready")
        assert ready.status == 503
        assert ready.json["missing"] == f"no prefill is ready: {it.prefill.url} connection refused"
        answer = await it.post({})
        assert (answer.status, answer.error["code"]) == (503, "no_ready_pair")
        assert answer.error["message"] == ready.json["missing"]
        assert (await it.get("/health")).status == 200
        await it.prefill.start()
        await until(lambda: it.router.pairing.ready)
        assert (await it.post({})).status == 200
        assert (await it.get("/ready")).json == {"ready": True, "missing": ""}
        await it.idle()


async def test_a_router_without_workers_says_which_flags_to_give() -> None:
    async with fleet(0, 0, ready=False) as it:
        assert "--prefill" in (await it.post({})).error["message"]


async def test_a_mismatched_pair_is_refused_naming_both_values_and_heals_without_restarts() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        it.decode.info = {"stamp": STAMP, "instance": "d1"}
        it.prefill.info = {"stamp": STAMP | {"page_size": 32}, "instance": "p1"}
        await until(lambda: not it.router.pairing.ready and it.router.pairing.decodes[0].stamp is not None)
        await until(lambda: it.router.pairing.prefills[0].stamp is not None)
        answer = await it.post({})
        assert answer.status == 503
        assert "prefill has 32, decode has 16" in answer.error["message"]
        for worker in (await it.get("/workers")).json["workers"]:
            assert not worker["ready"]
            assert "incompatible" in worker["reason"]
        it.prefill.info = {"stamp": STAMP, "instance": "p2"}
        await until(lambda: it.router.pairing.ready)
        assert (await it.post({})).status == 200
        assert not it.decode.aborts.qsize()


async def test_a_prefill_pairs_only_with_decodes_of_its_layout() -> None:
    async with fleet(2, 2, prefill=ok, decode=ok) as it:
        for i in (0, 1):
            it.prefills[i].info = it.decodes[i].info = {"stamp": STAMP | {"page_size": 16 << i}}
        workers = it.router.pairing.workers
        await until(lambda: all(worker.stamp for worker in workers))
        it.router.pairing.refresh()
        for _ in range(12):
            assert (await it.post({})).status == 200
        for i in (0, 1):
            assert {a.room for a in it.prefills[i].seen} == {a.room for a in it.decodes[i].seen}
            assert it.prefills[i].seen


async def test_an_unhealthy_worker_is_out_with_its_reason_and_comes_back() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok) as it:
        it.decodes[0].health = 503
        await until(lambda: not it.router.pairing.decodes[0].ready)
        described = {w["url"]: w for w in (await it.get("/workers")).json["workers"]}
        assert "/health answers 503" in described[it.decodes[0].url]["reason"]
        for _ in range(4):
            assert (await it.post({})).status == 200
        assert not it.decodes[0].seen
        it.decodes[0].health = 200
        await until(lambda: it.router.pairing.decodes[0].ready)
        for _ in range(4):
            await it.post({})
        assert it.decodes[0].seen


async def test_a_worker_listed_under_the_wrong_role_is_out() -> None:
    async with fleet(ready=False) as it:
        it.prefill.role = "decode"
        await until(lambda: "is a decode worker" in it.router.pairing.prefills[0].reason)


async def test_a_restarted_worker_is_met_on_new_connections() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        it.decode.info = {"instance": "one"}
        await until(lambda: it.router.pairing.decodes[0].instance == "one")
        await it.post({})
        assert it.router.pairing.decodes[0].idle
        it.decode.info = {"instance": "two"}
        await until(lambda: not it.router.pairing.decodes[0].idle)
        assert (await it.post({})).status == 200
        assert it.router.metrics.retries == {}


async def test_models_come_from_the_workers() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        (model,) = (await it.get("/v1/models")).json["data"]
        assert (model["id"], model["object"]) == ("m", "model")


async def test_metrics_and_server_info_are_served() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        await it.post({})
        await it.idle()
        text = (await it.get("/metrics")).body.decode()
        assert 'pdplane_router_requests_total{verdict="ok"} 1' in text
        assert f'pdplane_router_worker_load{{worker="{it.decode.url}",role="decode"}} 0' in text
        assert "pdplane_router_in_flight 0\n" in text
        assert 'pdplane_router_first_byte_seconds_bucket{le="+Inf"} 1' in text
        info = (await it.get("/server_info")).json
        assert info["role"] == "router"
        assert "/workers" in info["routes"]


async def test_head_is_get_without_its_body() -> None:
    async with fleet() as it, it.client() as client:
        client.send(b"HEAD /ready HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.head())[0] == 200
        assert (await client.read()).json["status"] == "alive"


async def test_fallback_mode_serves_from_an_aggregated_worker_while_no_pair_is_ready() -> None:
    alone = FakeWorker("aggregated", ok)
    await alone.start()
    async with fleet(1, 1, prefill=ok, decode=ok, worker=(alone.url,), mode="fallback") as it:
        assert (await it.post({})).headers["x-pd-mode"] == "pd"
        await it.prefill.stop()
        await until(lambda: not it.router.pairing.prefills[0].ready)
        assert (await it.post({})).headers["x-pd-mode"] == "aggregated"
        await it.idle()
    await alone.stop()


async def test_strict_mode_never_serves_from_an_aggregated_worker() -> None:
    alone = FakeWorker("aggregated", ok)
    await alone.start()
    async with fleet(1, 1, prefill=ok, decode=ok, worker=(alone.url,)) as it:
        await it.prefill.stop()
        await until(lambda: not it.router.pairing.prefills[0].ready)
        assert (await it.post({})).status == 503
        (entry,) = [w for w in (await it.get("/workers")).json["workers"] if w["role"] == "aggregated"]
        assert "strict" in entry["reason"]
    await alone.stop()


async def test_a_garbled_server_info_puts_the_worker_out_and_says_why() -> None:
    async with fleet(ready=False) as it:
        it.decode.info = {"stamp": {"model": 5}}
        await until(lambda: "/server_info cannot be read" in it.router.pairing.decodes[0].reason)
        await asyncio.sleep(0)
