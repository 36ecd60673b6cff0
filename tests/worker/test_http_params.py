"""A worker's edge in the params dialect: which legs are let in, what they bind, and what is answered of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from pdplane.core.effects import AnswerHeld
from pdplane.core.errors import Cause
from pdplane.core.events import Handle
from pdplane.core.frames import Row
from pdplane.core.ids import HoldNo, Instance, PageId, Rid, Shape
from pdplane.wire.params import KVTransferParams, answered, handles_in
from pdplane.worker.http import build_app
from pdplane.worker.prompt import prompt_id

from .http_fakes import FakeService, says

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ASK = {"do_remote_decode": True}
BODY = {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}], "text": "hello"}


class Prefill(FakeService):
    """Holds two hand-offs."""

    def __init__(self) -> None:
        super().__init__("prefill", "params")
        self.script = says("h", held=params())
        self.held = ["a", "b"]
        self.causes: list[Cause] = []

    def release_holds(self, rids: Sequence[str], cause: Cause) -> tuple[list[str], list[str]]:
        self.causes.append(cause)
        released = [rid for rid in rids if rid in self.held]
        self.held = [rid for rid in self.held if rid not in released]
        return released, [rid for rid in rids if rid not in released]


class Decode(FakeService):
    """Writes down which hand-offs it was told that nobody will read."""

    def __init__(self) -> None:
        super().__init__("decode", "params")
        self.script = says("h", "i")
        self.let_go: list[tuple[HoldNo, str]] = []

    def named_in(self, body: bytes) -> list[Handle]:
        return handles_in(body)

    def leg_refused(self, leg: Handle, cause: Cause) -> None:
        self.let_go.append((leg.hold, cause.code))


def params(prompt: str = "hello") -> KVTransferParams:
    id = prompt_id(list(prompt.encode()))
    row = Row(first_token=5, prompt_tokens=id.tokens, prompt_digest=id.digest)
    pages = tuple(PageId(page) for page in range(-(-id.tokens // 4)))
    held = AnswerHeld(rid=Rid("r.0.0"), row=row, hold=HoldNo(7), pages=pages, lease_s=30.0)
    return answered(held, instance=Instance("p1"), host="h", ports=[9], shape=Shape(), dp=0, page_size=4)


def told(**fields: object) -> dict[str, Any]:
    return {**msgspec.to_builtins(params()), **fields}


async def post(service: FakeService, body: dict[str, Any], path: str = COMPLETIONS) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        return await client.post(path, json=body)


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


# --- prefill ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prefill_answers_one_token_and_where_its_kv_is_held(path: str) -> None:
    answer = await post(Prefill(), {**BODY, "kv_transfer_params": ASK}, path)
    assert answer.status_code == 200
    assert answer.json()["kv_transfer_params"] == told()
    assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_a_leg_that_names_a_room_needs_none_here() -> None:
    service = Prefill()
    await post(service, {**BODY, "kv_transfer_params": ASK, "bootstrap_room": -3})
    assert service.batch[0].room is None


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"kv_transfer_params": None}, "kv_transfer_params.do_remote_decode", '"do_remote_decode": true'),
        ({"kv_transfer_params": ASK, "stream": True}, "stream", "stream must be false"),
        ({"kv_transfer_params": ASK, "n": 2}, "n", "2 samples in one leg.*as a router does"),
        ({"kv_transfer_params": ASK, "prompt": ["a", "b"]}, "n", "2 samples in one leg"),
        ({"kv_transfer_params": told()}, "kv_transfer_params.do_remote_prefill", "reads nobody's KV"),
    ],
    ids=["no params", "a stream", "n", "prompts", "decode's params"],
)
async def test_prefill_refuses_what_is_no_leg_of_a_pair(fields: dict[str, Any], param: str, named: str) -> None:
    service = Prefill()
    refused = error(await post(service, {**BODY, **fields}), 400)
    assert refused["param"] == param
    assert refused["retryable"] is False
    assert re.search(named, refused["message"])
    assert service.batch == []


@pytest.mark.parametrize("service", [Prefill, Decode])
async def test_generate_is_of_the_other_dialect(service: type[FakeService]) -> None:
    refused = error(await post(service(), {**BODY, "kv_transfer_params": ASK}, GENERATE), 400)
    assert refused["code"] == "wrong_dialect"
    assert "/v1/completions" in refused["message"]


# --- decode -------------------------------------------------------------------------------------------------------


async def test_decode_is_bound_to_what_the_params_name() -> None:
    service = Decode()
    answer = await post(service, {**BODY, "kv_transfer_params": told()})
    assert answer.status_code == 200
    assert "kv_transfer_params" not in answer.json()
    [generation] = service.batch
    assert generation.hand_off is not None
    assert generation.hand_off.handle.hold == 7
    assert service.let_go == []


@pytest.mark.parametrize("named", [{}, {"kv_transfer_params": None}])
async def test_without_params_decode_computes_the_prompt_of_however_many_samples(named: dict[str, Any]) -> None:
    service = Decode()
    assert (await post(service, {**BODY, **named, "n": 3})).status_code == 200
    assert [generation.hand_off for generation in service.batch] == [None] * 3


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"n": 2}, "one_sample_per_leg"),
        ({"temperature": 9}, "invalid_value"),
        ({"model": "another"}, "model_not_found"),
        ({"prompt": "x" * 5000}, "context_length_exceeded"),
        ({"prompt": 7}, "invalid_type"),
    ],
)
async def test_a_refused_leg_lets_go_of_what_it_would_have_read(fields: dict[str, Any], code: str) -> None:
    service = Decode()
    answer = await post(service, {**BODY, "kv_transfer_params": told(), **fields})
    assert answer.status_code in (400, 404)
    assert service.let_go == [(7, code)]


async def test_a_refusal_of_the_role_lets_go_too() -> None:
    service = Decode()
    service.refusal = Cause("overloaded", "full", 429, retryable=True)
    assert (await post(service, {**BODY, "kv_transfer_params": told()})).status_code == 429
    assert service.let_go == [(7, "overloaded")]


@pytest.mark.parametrize("named", [None, {}, told(pd_grant=0), told(remote_block_ids=[[*range(100_000)]])], ids=str)
async def test_params_that_cannot_be_read_are_let_go_by_nobody(named: object) -> None:
    service = Decode()
    answer = await post(service, {**BODY, "kv_transfer_params": named, "temperature": 9})
    assert answer.status_code == 400
    assert service.let_go == []


async def test_health_generate_runs_a_token_through_a_decode_that_can_make_one_alone() -> None:
    service = Decode()
    transport = httpx.ASGITransport(build_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        response = await client.get("/health_generate")
    assert (response.status_code, response.json()["generated"]) == (200, True)
    assert [(one.hand_off, one.sampling.max_tokens) for one in service.batch] == [(None, 1)]


async def test_bad_params_are_a_400_with_field_and_remedy() -> None:
    refused = error(await post(Decode(), {**BODY, "kv_transfer_params": told(transfer_mode="push")}), 400)
    assert (refused["code"], refused["param"]) == ("invalid_params", "kv_transfer_params.transfer_mode")


# --- the same tokens on both legs ---------------------------------------------------------------------------------


async def test_a_chats_tokens_from_the_other_leg_are_the_prompt() -> None:
    service = Decode()
    reused = told(prompt_token_ids=[104, 101])
    assert (await post(service, {**BODY, "kv_transfer_params": reused}, CHAT)).status_code == 200
    assert service.batch[0].prompt == [104, 101]


@pytest.mark.parametrize("ids", [[257], [-1], [], "he"])
async def test_tokens_that_no_vocabulary_has_are_refused(ids: object) -> None:
    refused = error(await post(Decode(), {**BODY, "kv_transfer_params": {"prompt_token_ids": ids}}, CHAT), 400)
    assert refused["param"] == "kv_transfer_params.prompt_token_ids"


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
async def test_token_ids_are_told_where_they_are_asked_for(role: str) -> None:
    service = Prefill() if role == "prefill" else Decode() if role == "decode" else FakeService()
    service.script = says("hi")
    named = {"kv_transfer_params": ASK} if role == "prefill" else {}
    text = (await post(service, {**BODY, **named, "return_token_ids": True})).json()
    assert text["choices"][0]["prompt_token_ids"] == list(b"hello")
    assert text["choices"][0]["token_ids"] == list(b"hi")
    chat = (await post(service, {**BODY, **named, "return_token_ids": True}, CHAT)).json()
    assert chat["prompt_token_ids"] == list(b"user: hello\nassistant: ")
    assert chat["choices"][0]["token_ids"] == list(b"hi")
    without = (await post(service, {**BODY, **named}, CHAT)).json()
    assert "prompt_token_ids" not in without
    assert "token_ids" not in without["choices"][0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_tells_the_prompts_ids_once_and_each_token_with_its_text(path: str) -> None:
    service = Decode()
    answer = await post(service, {**BODY, "stream": True, "return_token_ids": True}, path)
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == list(b"hi")
    prompts = [one["prompt_token_ids"] for one in [*events, *choices] if "prompt_token_ids" in one]
    assert prompts == [list(b"user: hello\nassistant: " if path == CHAT else b"hello")]


# --- release ------------------------------------------------------------------------------------------------------

RELEASE = "/v1/kv/release"


async def test_what_is_held_is_released_by_exact_name_and_once() -> None:
    service = Prefill()
    first = await post(service, {"request_ids": ["a", "c", "a"]}, RELEASE)
    assert (first.status_code, first.json()) == (200, {"released": ["a"], "unknown": ["c"]})
    again = await post(service, {"request_ids": ["a"], "cause": {"code": "client_left"}}, RELEASE)
    assert again.json() == {"released": [], "unknown": ["a"]}
    assert service.held == ["b"]
    assert [cause.code for cause in service.causes] == ["released", "client_left"]


@pytest.mark.parametrize(
    "body", [{}, {"request_ids": []}, {"request_ids": [""]}, {"request_ids": "a"}, {"request_ids": [1]}]
)
async def test_a_release_without_a_name_is_refused(body: dict[str, Any]) -> None:
    service = Prefill()
    assert error(await post(service, body, RELEASE), 400)["param"].startswith("request_ids")
    assert service.held == ["a", "b"]


async def test_a_worker_that_holds_nothing_says_so() -> None:
    refused = error(await post(Decode(), {"request_ids": ["a"]}, RELEASE), 400)
    assert "a decode worker of dialect params" in refused["message"]
