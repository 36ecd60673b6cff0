"""The operator's verbs: who may say them, and what they do."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pdplane.worker.http import HttpSettings, build_app

from .http_fakes import FakeService

LOOPBACK = ("127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1")
ELSEWHERE = ("10.0.0.9", "::ffff:10.0.0.9", "fe80::1%eth0", "", "testclient")
RELEASE = {"instance": "d1", "grant": 7}


async def say(
    service: FakeService,
    path: str,
    body: Any = None,
    *,
    peer: str = "127.0.0.1",
    key: str = "",
    token: str = "",
    origin: str = "",
) -> httpx.Response:
    app = build_app(service, HttpSettings(admin_key=key))
    headers = {name: value for name, value in (("authorization", token), ("origin", origin)) if value}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, client=(peer, 1234)), base_url="http://worker", headers=headers
    ) as client:
        return await (client.post(path, json=body) if body is not None else client.post(path))


async def test_drain_says_how_many_are_live_and_keeps_the_reason() -> None:
    service = FakeService("decode")
    answer = await say(service, "/drain", {"reason": "new kernel"})
    assert (answer.status_code, answer.json()) == (200, {"draining": True, "live": 1})
    assert service.drained == "new kernel"


@pytest.mark.parametrize("body", [None, {}, {"reason": None}, {"reason": "  "}])
async def test_drain_needs_no_reason(body: Any) -> None:
    service = FakeService("decode")
    assert (await say(service, "/drain", body)).status_code == 200
    assert service.drained == "an operator drains this decode worker"


async def test_release_says_how_many_pages_and_nothing_the_second_time() -> None:
    service = FakeService("prefill")
    assert (await say(service, "/release", RELEASE)).json() == {"released": 3}
    again = await say(service, "/release", RELEASE)
    assert (again.status_code, again.json()) == (200, {"released": 0})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "instance"),
        ({"instance": "d1"}, "grant"),
        ({"grant": 7}, "instance"),
        ({"instance": "", "grant": 7}, "instance"),
        ({"instance": "x" * 513, "grant": 7}, "instance"),
        ({"instance": 5, "grant": 7}, "instance"),
        ({"instance": "d1", "grant": "7"}, "grant"),
        ({"instance": "d1", "grant": True}, "grant"),
        ({"instance": "d1", "grant": 0}, "grant"),
        ({"instance": "d1", "grant": 2**63}, "grant"),
    ],
)
async def test_a_release_that_names_no_grant_is_refused(body: dict[str, Any], param: str) -> None:
    service = FakeService()
    answer = await say(service, "/release", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert service.quarantined


@pytest.mark.parametrize("path", ["/drain", "/release"])
@pytest.mark.parametrize("body", [[], "x", {"reason": 5, "instance": 5}])
async def test_a_body_of_another_shape_is_refused(path: str, body: Any) -> None:
    service = FakeService()
    assert (await say(service, path, body)).status_code == 400
    assert not service.drained


@pytest.mark.parametrize("path", ["/drain", "/release"])
@pytest.mark.parametrize("peer", LOOPBACK)
async def test_loopback_needs_no_key(path: str, peer: str) -> None:
    for key in ("", "sesame"):
        assert (await say(FakeService(), path, RELEASE, peer=peer, key=key)).status_code == 200


@pytest.mark.parametrize("path", ["/drain", "/release"])
@pytest.mark.parametrize("peer", ELSEWHERE)
async def test_from_elsewhere_nothing_goes_without_a_key_that_is_set(path: str, peer: str) -> None:
    service = FakeService()
    answer = await say(service, path, RELEASE, peer=peer, token="Bearer sesame")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_loopback")
    assert "--admin-key" in answer.json()["error"]["message"]
    assert not service.drained
    assert service.quarantined


@pytest.mark.parametrize("path", ["/drain", "/release"])
async def test_a_web_page_on_loopback_is_no_operator(path: str) -> None:
    service = FakeService()
    answer = await say(service, path, RELEASE, origin="http://evil.example")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_loopback")
    assert "http://evil.example" in answer.json()["error"]["message"]
    assert not service.drained
    assert service.quarantined


@pytest.mark.parametrize("token", ["", "sesame", "Bearer Sesame", "Bearer sesame2", "Basic sesame"])
async def test_from_elsewhere_a_wrong_key_does_nothing(token: str) -> None:
    service = FakeService()
    answer = await say(service, "/drain", peer="10.0.0.9", key="sesame", token=token)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_admin_key")
    assert not service.drained


@pytest.mark.parametrize("path", ["/drain", "/release"])
async def test_from_elsewhere_the_key_opens(path: str) -> None:
    answer = await say(FakeService(), path, RELEASE, peer="10.0.0.9", key="sesame", token="Bearer sesame")
    assert answer.status_code == 200


async def test_the_verbs_are_posts() -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(build_app(FakeService())), base_url="http://worker"
    ) as client:
        assert (await client.get("/drain")).status_code == 405
