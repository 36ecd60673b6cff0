"""The pairing fields on a worker: scalars and lists, and what of them is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pdplane.core.errors import Cause
from pdplane.worker.http import build_app

from .http_fakes import FakeService, says

PATH = "/v1/completions"
PAIR = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 7}


def leg(role: str = "decode") -> FakeService:
    service = FakeService(role)
    service.script = says("a")
    return service


async def post(service: FakeService, body: dict[str, Any], path: str = PATH, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(service))
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        return await client.post(path, json=body, headers=named)


async def test_a_leg_carries_room_and_address() -> None:
    service = leg()
    assert (await post(service, {"prompt": "x", "rid": "r.0.1"} | PAIR)).status_code == 200
    [generation] = service.batch
    assert (generation.room, generation.bootstrap_host, generation.bootstrap_port) == (7, "10.0.0.1", 9000)
    assert (generation.rid, generation.request_id) == ("r.0.1", "r")


async def test_lists_go_to_samples_prompt_by_prompt() -> None:
    service = leg()
    body = {
        "prompt": ["x", "yy"],
        "n": 2,
        "seed": 5,
        "rid": ["r.0.0", "r.1.0", "r.2.0", "r.3.0"],
        "bootstrap_host": ["a", "b", "c", "d"],
        "bootstrap_port": [1, None, 3, 4],
        "bootstrap_room": [11, 12, 13, 14],
    }
    answer = await post(service, body, x_request_id="label")
    assert answer.json()["id"] == answer.headers["x-request-id"] == "r"
    seen = [(g.rid, g.room, g.bootstrap_host, g.bootstrap_port, len(g.prompt)) for g in service.batch]
    assert seen == [
        ("r.0.0", 11, "a", 1, 1),
        ("r.1.0", 12, "b", 8998, 1),
        ("r.2.0", 13, "c", 3, 2),
        ("r.3.0", 14, "d", 4, 2),
    ]
    assert {g.request_id for g in service.batch} == {"r"}
    assert [g.sampling.seed for g in service.batch] == [5, 6, 5, 6]


async def test_one_rid_for_several_samples_names_the_request() -> None:
    service = leg()
    await post(service, {"prompt": "x", "n": 2, "rid": "r"} | PAIR | {"bootstrap_room": [1, 2]})
    assert [(g.request_id, g.rid) for g in service.batch] == [("r", "r.0.0"), ("r", "r.1.0")]


@pytest.mark.parametrize(
    ("rid", "label", "request_id"),
    [
        ("r.0.1", "label", "r"),
        ("free", "label", "label"),
        ("free", "", "free"),
        ("r.0", "", "r.0"),
        (None, "label", "label"),
    ],
)
async def test_a_request_goes_by_its_routers_id_then_by_the_clients_label(
    rid: str | None, label: str, request_id: str
) -> None:
    service = leg("aggregated")
    await post(service, {"prompt": "x", "rid": rid}, x_request_id=label)
    assert service.batch[0].request_id == request_id


async def test_rids_of_several_requests_name_none_of_them() -> None:
    service = leg("aggregated")
    await post(service, {"prompt": "x", "n": 2, "rid": ["a.0.0", "b.0.0"]}, x_request_id="label")
    assert {generation.request_id for generation in service.batch} == {"label"}


async def test_missing_rids_are_minted_and_never_twice() -> None:
    service = leg()
    rids = set()
    for _ in range(3):
        await post(service, {"prompt": "x", "n": 2} | PAIR | {"bootstrap_room": [1, 2]}, x_request_id="again")
        rids |= {generation.rid for generation in service.batch}
    assert len(rids) == 6


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_without_a_room_is_refused(path: str, role: str) -> None:
    body: dict[str, Any] = {"prompt": "x", "text": "x", "messages": [{"role": "user", "content": "x"}]}
    response = await post(leg(role), body, path)
    assert response.status_code == 400
    assert "without bootstrap room" in response.json()["error"]["message"]


@pytest.mark.parametrize("room", [0, -1, 2**63, "7", 1.5, True, [7, 8], [0], [], {}])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_bad_room_is_refused_and_nothing_submitted(room: object, role: str) -> None:
    service = leg(role)
    response = await post(service, {"prompt": "x"} | PAIR | {"bootstrap_room": room})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "bootstrap_room"
    assert service.batch == []


async def test_the_largest_room_passes() -> None:
    service = leg()
    assert (await post(service, {"prompt": "x"} | PAIR | {"bootstrap_room": 2**63 - 1})).status_code == 200


async def test_a_scalar_room_is_not_counted_up_for_several_samples() -> None:
    response = await post(leg(), {"prompt": "x", "n": 2} | PAIR)
    assert response.status_code == 400
    assert "list of 2 rooms" in response.json()["error"]["message"]


async def test_a_room_given_twice_in_one_request_is_refused() -> None:
    response = await post(leg(), {"prompt": "x", "n": 2} | PAIR | {"bootstrap_room": [7, 7]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "bootstrap_room")


@pytest.mark.parametrize("port", [0, 65536, "9000", True, [1, 2]])
async def test_a_bad_port_is_refused(port: object) -> None:
    response = await post(leg(), {"prompt": "x"} | PAIR | {"bootstrap_port": port})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "bootstrap_port")


@pytest.mark.parametrize("host", [None, "", 7, ["a", "b"]])
async def test_decode_needs_to_know_whom_to_ask(host: object) -> None:
    response = await post(leg("decode"), {"prompt": "x"} | PAIR | {"bootstrap_host": host})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "bootstrap_host")


async def test_prefill_does_not_need_its_own_address() -> None:
    assert (await post(leg("prefill"), {"prompt": "x", "bootstrap_room": 7})).status_code == 200


async def test_an_aggregated_worker_does_not_look_at_pairing() -> None:
    service = leg("aggregated")
    assert (await post(service, {"prompt": "x", "bootstrap_room": 0, "bootstrap_port": "x"})).status_code == 200
    assert service.batch[0].room is None


async def test_a_duplicate_room_is_the_services_refusal() -> None:
    service = leg()
    service.refusal = Cause("duplicate_room", "room 7 is live", 409, side="decode")
    response = await post(service, {"prompt": "x"} | PAIR)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "duplicate_room")
