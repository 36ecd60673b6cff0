"""Abort, models, health, info, metrics and records."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pdplane.core.errors import Cause, Refused
from pdplane.worker.http import HttpSettings, build_app

from .http_fakes import FakeService, fails, says


async def ask(service: FakeService, method: str, path: str, body: Any = None) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(service, HttpSettings(probe_timeout_s=0.01)))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        return await client.request(method, path, json=body)


async def test_an_abort_is_exact_and_an_unknown_rid_is_a_visible_nothing() -> None:
    service = FakeService()
    assert (await ask(service, "POST", "/abort_request", {"rid": "live", "room": 5})).json() == {"aborted": 1}
    assert (await ask(service, "POST", "/abort_request", {"rid": "liv"})).json() == {"aborted": 0}
    assert service.abort_calls == [("live", 5), ("liv", None)]


async def test_an_abort_of_all_must_be_said() -> None:
    service = FakeService()
    assert (await ask(service, "POST", "/abort_request", {"rid": "", "abort_all": True})).json() == {"aborted": 1}
    for body in ({}, {"rid": ""}, {"rid": "", "abort_all": False}):
        assert (await ask(service, "POST", "/abort_request", body)).status_code == 400


@pytest.mark.parametrize("body", [{"rid": 7}, {"rid": "live", "room": 0}, {"rid": "live", "room": "7"}])
async def test_a_bad_abort_is_refused(body: dict[str, Any]) -> None:
    service = FakeService()
    assert (await ask(service, "POST", "/abort_request", body)).status_code == 400
    assert service.abort_calls == []


async def test_the_model_is_listed_with_its_context() -> None:
    listed = (await ask(FakeService(), "GET", "/v1/models")).json()
    assert listed["data"][0]["id"] == "tiny"
    assert listed["data"][0]["max_model_len"] == 512
    assert (await ask(FakeService(), "GET", "/v1/models/tiny")).json() == listed["data"][0]
    assert (await ask(FakeService(), "GET", "/v1/models/other")).status_code == 404


async def test_health_tells_the_facts_either_way() -> None:
    service = FakeService()
    assert (await ask(service, "GET", "/health")).json()["progressing"] is True
    service.healthy = False
    for path in ("/health", "/health_generate"):
        ill = await ask(service, "GET", path)
        assert (ill.status_code, ill.json()["ready"]) == (503, False)


async def test_health_generate_runs_a_token_through_an_aggregated_worker() -> None:
    service = FakeService()
    service.script = says("a")
    response = await ask(service, "GET", "/health_generate")
    assert (response.status_code, response.json()["generated"]) == (200, True)
    assert service.batch[0].sampling.max_tokens == 1


async def test_health_generate_is_503_where_no_token_comes() -> None:
    service = FakeService()
    response = await ask(service, "GET", "/health_generate")
    assert response.status_code == 503
    assert [rid for rid, _ in service.closed] == [service.batch[0].rid]
    service.script = fails(Cause("engine", "broken", 500))
    assert (await ask(service, "GET", "/health_generate")).json()["cause"]["code"] == "engine"


async def test_a_leg_without_a_probe_does_not_pretend_to_have_generated() -> None:
    response = await ask(FakeService("decode"), "GET", "/health_generate")
    assert (response.status_code, response.json()["generated"]) == (200, False)


async def test_a_leg_with_a_probe_is_probed() -> None:
    class Probed(FakeService):
        async def probe(self) -> None:
            raise Refused(Cause("engine", "broken", 500))

    assert (await ask(Probed("decode"), "GET", "/health_generate")).status_code == 503


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_has_limits_and_what_routers_read(path: str) -> None:
    info = (await ask(FakeService("decode"), "GET", path)).json()
    assert info["disaggregation_mode"] == "decode"
    assert info["served_model_name"] == "tiny"
    assert info["limits"] == {"context_len": 512, "max_prompt_tokens": 256}
    assert info["stamp"] == "abc"


async def test_the_model_info_says_of_the_worker_what_the_server_info_says() -> None:
    service = FakeService("prefill")
    service.shape = {"dp": 2, "tp": 4, "cp": 1, "pp": 1}
    service.load_balance_method = "total_requests"
    for path in ("/server_info", "/model_info"):
        info = (await ask(service, "GET", path)).json()
        assert (info["dp_size"], info["tp_size"], info["load_balance_method"]) == (2, 4, "total_requests")


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_names_the_model(path: str) -> None:
    info = (await ask(FakeService(), "GET", path)).json()
    assert (info["model_path"], info["is_generation"], info["disaggregation_mode"]) == ("tiny", True, "null")


async def test_metrics_are_prometheus_text() -> None:
    response = await ask(FakeService(), "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "pdplane_pages 3" in response.text


async def test_a_record_is_found_by_its_key() -> None:
    assert (await ask(FakeService(), "GET", "/requests/live")).json()["request"] == "live"
    missing = await ask(FakeService(), "GET", "/requests/gone")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_failure_of_the_worker_itself_is_a_500_with_a_body() -> None:
    class Broken(FakeService):
        def record(self, key: str) -> dict[str, Any] | None:
            raise RuntimeError("inner detail")

    transport = httpx.ASGITransport(build_app(Broken()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        response = await client.get("/requests/x")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "inner detail" not in response.text
