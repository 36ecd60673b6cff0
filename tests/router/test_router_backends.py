"""One command line for any fleet: who the workers are, how they are looked at, and who may pair."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdplane.cli.main import parser
from pdplane.core.errors import Cause
from pdplane.core.ids import Rid, Room
from pdplane.router import RouterConfig, RouterServer
from pdplane.router.backends import EndedLeg
from pdplane.router.backends.named import BACKENDS
from pdplane.router.body import read_body, samples_of
from pdplane.router.legs.judged import error_of
from pdplane.router.legs.params import Handoff, for_decode, mint_rids, read_handoff, takes_ids
from pdplane.router.merge import MergedBody, MergedStream, SampleFailed
from pdplane.settings import BadSetting

from .params_fakes import ParamsWorker, holding, params_fleet
from .router_fakes import STAMP, Asked, Behaviour, FakeWorker, Fleet, fleet, ok, record_of, refuse, until

CAUSE = Cause("aborted", "why", 499)


class SglangWorker(FakeWorker):
    """Of a release that has the older name of its facts alone."""

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        if asked.path == "/server_info":
            asked.reply(404, {"detail": "Not Found"})
        elif asked.path == "/get_server_info":
            mode = {"disaggregation_mode": self.role, "served_model_name": "m", "dp_size": 2}
            asked.reply(200, mode | {"disaggregation_bootstrap_port": 9001})
        else:
            await super()._answer(asked, reader)


class Factless(FakeWorker):
    """No worker of ours, nor SGLang."""

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        if asked.path in ("/server_info", "/get_server_info"):
            asked.reply(404, {"detail": "Not Found"})
        else:
            await super()._answer(asked, reader)


@contextlib.asynccontextmanager
async def mixed(left: FakeWorker, right: FakeWorker, **settings: Any) -> AsyncIterator[Fleet]:
    for worker in (left, right):
        await worker.start()
    config = RouterConfig(port=0, prefill=(left.url,), decode=(right.url,), health_interval_s=0.05, **settings)
    server = RouterServer(config)
    await server.start()
    it = Fleet([left], [right], server)
    try:
        await until(lambda: all(worker.ready for worker in it.router.pairing.workers))
        yield it
    finally:
        await server.stop()
        for worker in (left, right):
            await worker.stop()


async def test_native_sglang_is_served_by_rooms_and_its_older_facts() -> None:
    async with fleet(prefill=ok, decode=ok, kind=SglangWorker, backend="sglang") as it:
        answer = await it.post({"text": "hi"}, "/generate")
        assert answer.status == 200
        assert it.prefill.seen[0].body == it.decode.seen[0].body
        assert it.decode.seen[0].body["bootstrap_port"] == 9001
        told = (await it.get("/workers")).json
        assert (told["backend"], told["dialect"]) == ("sglang", "rooms")
        assert told["workers"][0]["shape"]["dp"] == 2


@pytest.mark.parametrize("stamp", [None, STAMP])
async def test_workers_of_two_dialects_never_pair_and_both_are_named(stamp: Any) -> None:
    facts = {"stamp": stamp}
    left, right = FakeWorker("prefill", ok, facts), ParamsWorker("decode", ok, facts)
    async with mixed(left, right) as it:
        answer = await it.post({})
        assert (answer.status, answer.error["code"]) == (503, "no_ready_pair")
        for value in ("'rooms'", "'params'", left.url, right.url, "--dialect"):
            assert value in answer.error["message"]
        assert (await it.get("/server_info")).json["dialect"] == "params,rooms"


async def test_a_dialect_that_nobody_here_speaks_puts_a_worker_out() -> None:
    async with fleet(prefill=ok, decode=ok) as it:
        it.decode.info = {"dialect": "smoke"}
        await until(lambda: "'smoke'" in it.router.pairing.decodes[0].reason)


async def test_a_worker_back_with_another_dialect_is_met_as_what_it_is() -> None:
    async with fleet(prefill=ok, decode=ok, kind=ParamsWorker) as it:
        for fake in (it.prefill, it.decode):
            fake.info = {"dialect": "rooms"}
        await until(lambda: {worker.dialect for worker in it.router.pairing.workers} == {"rooms"})
        assert (await it.post({})).status == 200
        for fake in (it.prefill, it.decode):
            fake.info = {"dialect": "params"}
        it.prefill.behaviour = holding()
        await until(lambda: {worker.dialect for worker in it.router.pairing.workers} == {"params"})
        assert (await it.post({})).status == 200
        assert it.decode.seen[-1].body["kv_transfer_params"]["remote_block_ids"]


def by_turns() -> Any:
    """Makes workers of the rooms dialect and of the params dialect, one after the other."""
    kinds = itertools.cycle((FakeWorker, ParamsWorker))

    def make(role: str, behaviour: Behaviour | None) -> FakeWorker:
        return next(kinds)(role, behaviour)

    return make


@contextlib.asynccontextmanager
async def both_dialects(decode: Behaviour = ok) -> AsyncIterator[Fleet]:
    """A pair of each, rooms first."""
    async with fleet(2, 2, prefill=ok, decode=decode, kind=by_turns(), policy="round-robin") as it:
        it.prefills[1].behaviour = holding()
        yield it


async def test_a_fleet_of_both_dialects_pairs_each_with_its_own() -> None:
    async with both_dialects() as it:
        answers = [await it.post({}) for _ in range(4)]
        assert {answer.status for answer in answers} == {200}
        dialects = [(await record_of(it, answer))["dialect"] for answer in answers]
        assert sorted(dialects) == ["params", "params", "rooms", "rooms"]
        rooms, params = it.decodes
        assert all("bootstrap_room" in leg.body for leg in rooms.seen)
        assert all(leg.body["kv_transfer_params"]["remote_block_ids"] for leg in params.seen)


async def test_generate_goes_to_the_pair_of_rooms_however_the_turns_fall() -> None:
    async with both_dialects() as it:
        for _ in range(4):
            assert (await it.post({"text": "hi"}, "/generate")).status == 200
        assert (len(it.prefills[0].seen), len(it.prefills[1].seen)) == (4, 0)


async def test_several_samples_are_one_leg_or_a_leg_each_by_the_pair_that_is_chosen() -> None:
    async with both_dialects(lambda asked: asked.reply(200, {"choices": [{"index": 0}]})) as it:
        for _ in range(2):
            assert (await it.post({"prompt": "a", "n": 2}, "/v1/completions")).status == 200
        rooms, params = it.decodes
        assert {leg.body.get("n", 1) for leg in params.seen} == {1}
        carried = [(leg.body.get("n", 1), leg.body["bootstrap_room"]) for leg in rooms.seen]
        assert [n for n, room in carried if n != (len(room) if isinstance(room, list) else 1)] == []
        assert len(params.seen) + sum(n for n, _ in carried) == 4


async def test_a_retry_may_go_to_the_other_dialect_and_the_record_tells_both() -> None:
    async with both_dialects() as it:
        it.decodes[1].behaviour = refuse(500)
        answers = [await it.post({}) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]
        assert {answer.headers["x-pd-mode"] for answer in answers} == {"pd"}
        (tried,) = [told for answer in answers if len((told := await record_of(it, answer))["attempts"]) == 2]
        assert [attempt["dialect"] for attempt in tried["attempts"]] == ["params", "rooms"]
        assert tried["dialect"] == "rooms"
        await until(lambda: it.router.guard.releases["released"] == 1)


@pytest.mark.parametrize("backend", ["pdplane", "sglang"])
async def test_a_worker_without_facts_is_out_and_the_reason_names_the_setting(backend: str) -> None:
    async with fleet(kind=Factless, backend=backend, ready=False) as it:
        await until(lambda: "/server_info" in it.router.pairing.decodes[0].reason)
        assert "--backend" in it.router.pairing.decodes[0].reason
        assert (await it.post({})).status == 503


async def test_metrics_name_what_is_served_and_how_long_prefills_leg_took() -> None:
    async with params_fleet(decode=ok) as it:
        await it.post({})
        text = (await it.get("/metrics")).body.decode()
        assert 'pdplane_router_info{backend="pdplane",dialect="params",mode="strict"' in text
        assert "pdplane_router_prefill_leg_seconds_count 1\n" in text
        assert 'pdplane_router_handoffs_total{kind="answered"} 1' in text


@pytest.mark.parametrize("n", ["2", 2.0, 0, 129, [1]])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_number_of_choices_that_is_not_understood_never_reaches_one_leg(n: Any, path: str) -> None:
    async with params_fleet(decode=ok) as it:
        answer = await it.post({"prompt": "a", "n": n}, path)
        assert (answer.status, answer.error["param"]) == (400, "n")
        assert not it.prefill.seen


async def test_no_number_of_choices_is_one() -> None:
    async with params_fleet(decode=ok) as it:
        assert (await it.post({"prompt": "a", "n": None}, "/v1/completions")).status == 200


async def test_the_router_says_what_it_serves_on_every_page() -> None:
    async with params_fleet(decode=ok) as it:
        for page in ("/health", "/workers", "/server_info"):
            told = (await it.get(page)).json
            assert (told["backend"], told["dialect"]) == ("pdplane", "params"), page
        assert (await it.get("/server_info")).json["lease_margin_s"] == 1.0


def test_the_command_line_shows_every_setting_of_the_backends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["router", "--help"])
    shown = capsys.readouterr().out
    for flag in ("--backend {pdplane,sglang,vllm}", "--mode {strict,fallback}", "--vllm-lease-s", "--lease-margin-s"):
        assert flag in shown


@pytest.mark.parametrize(("name", "value"), [("vllm_lease_s", 0), ("lease_margin_s", -1)])
def test_a_lease_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(BadSetting, match=name):
        RouterConfig(**{name: value})


def test_a_margin_that_leaves_nothing_of_a_lease_is_refused() -> None:
    with pytest.raises(BadSetting, match=r"lease_margin_s 7 .* vllm_lease_s 6"):
        RouterConfig(backend="vllm", vllm_lease_s=6.0, lease_margin_s=7.0)
    assert RouterConfig(vllm_lease_s=6.0, lease_margin_s=7.0).lease_margin_s == 7.0  # our own say their lease


def test_each_backend_ends_a_leg_in_its_own_words() -> None:
    room = EndedLeg("/generate", (Rid("r.0.0"),), (Room(7),))
    for name in ("pdplane", "sglang"):
        (call,) = BACKENDS[name]().stop_calls(room, CAUSE)
        assert call.path == "/abort_request"
        assert b'"rid":"r.0.0","room":7' in call.body
    held = EndedLeg("/v1/completions", (Rid("r.0.0"),), (), may_hold=True)
    paths = [call.path for call in BACKENDS["pdplane"]().stop_calls(held, CAUSE)]
    assert paths == ["/abort_request", "/v1/kv/release"]
    (call,) = BACKENDS["vllm"]().stop_calls(held, CAUSE)
    assert (call.path, call.body) == ("/inference/v1/abort_requests", b'{"request_ids":["cmpl-r.0.0-0"]}')


# --- parts of the params legs ---------------------------------------------------------------------------------------


def test_ids_of_legs_never_come_twice_over_attempts() -> None:
    rids = [rid for attempt in range(3) for rid in mint_rids("q", 1, attempt)]
    assert rids == [f"q.1.{leg}" for leg in range(6)]


@pytest.mark.parametrize("answer", [b"[]", b"nonsense", b'{"kv_transfer_params":[]}', b"\xff"])
def test_what_is_no_handoff_is_an_error(answer: bytes) -> None:
    with pytest.raises((ValueError, UnicodeDecodeError)):
        read_handoff(answer, 1.0)


def test_a_handoff_is_kept_as_it_came() -> None:
    raw = b'{ "remote_block_ids":[[ 1]], "pd_lease_s": 2.50 ,"remote_request_id":"x","more":{"a":[1.0]}}'
    read = read_handoff(b'{"kv_transfer_params":' + raw + b',"choices":[]}', 30.0)
    assert read == Handoff(raw, "x", None, 2.5)


@pytest.mark.parametrize("params", [b'{ "a":1 }', b'{"a":{"b":2}}'])
def test_ids_go_last_into_the_params(params: bytes) -> None:
    body = read_body(b'{"messages":[]}')
    sent = for_decode(body, {}, Handoff(params, "r", None, 1.0, b"[1,2]"), chat=True)
    assert sent.endswith(b'"prompt_token_ids":[1,2]}}')
    assert read_body(sent).stripped == ("kv_transfer_params",)


@pytest.mark.parametrize("raw", [b'{"messages":5}', b'{"messages":[5]}', b'{"messages":null}', b"{}"])
def test_odd_messages_are_for_the_worker_to_judge(raw: bytes) -> None:
    assert takes_ids(read_body(raw), chat=True) in (True, False)


def test_an_event_is_an_error_only_if_it_says_so_itself() -> None:
    assert error_of(b'data: {"choices":[{"delta":{"content":"\\"error\\""}}]}') is None
    assert error_of(b'data: {"error":null,"choices":[]}') is None
    assert error_of(b": ping") is None
    assert error_of(b'data: "error"') is None
    assert error_of(b'data: {"error":{"code":503}}').status == 503  # type: ignore[union-attr]
    assert error_of(b'data: {"error":{"code":"x"}}').status == 500  # type: ignore[union-attr]


def test_samples_of_a_body_keep_every_other_field_as_it_came() -> None:
    body = read_body(b'{"prompt":["a",  "b"],"n":2,"seed":9223372036854775807,"temperature":0.50}')
    bodies, n = samples_of(body, chat=False)
    assert n == 2
    assert [one.plain() for one in bodies][:2] == [
        b'{"prompt":"a","seed":9223372036854775807,"temperature":0.50}',
        b'{"prompt":"a","seed":0,"temperature":0.50}',
    ]
    assert [one.prompt_name for one in bodies] == ["prompt[0]", "prompt[0]", "prompt[1]", "prompt[1]"]


def test_a_merged_stream_takes_events_in_any_pieces() -> None:
    merged = MergedStream(2, 1, "id")
    event = b'data: {"id":"x","choices":[{"index":0,"text":"a"}]}\n\n'
    got = b"".join(merged.feed(1, event[i : i + 1]) for i in range(len(event)))
    assert got == b'data: {"id":"id","choices":[{"index":1,"text":"a"}]}\n\n'
    assert b'"error":null' in merged.feed(0, b'data: {"error":null,"choices":[{"index":0}]}\n\n')
    assert merged.feed(0, b": ping\n\n") == b": ping\n\n"
    assert merged.feed(0, b"data: [DONE]\n\n") == b""
    assert merged.closing() == b"data: [DONE]\n\n"


def test_a_stream_of_what_is_no_chunk_fails() -> None:
    with pytest.raises(SampleFailed, match="no chunk"):
        MergedStream(1, 1, "id").feed(0, b"data: what\n\n")


def test_merged_bodies_without_usage_have_none() -> None:
    merged = MergedBody(2, 2, "id")
    for sample in range(2):
        merged.feed(sample, b'{"id":"x","choices":[{"index":0}]}')
    assert merged.closing() == b'{"id":"id","choices":[{"index":0},{"index":1}]}'
