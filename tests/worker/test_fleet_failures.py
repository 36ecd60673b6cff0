"""What breaks, breaks one thing: engines that fail, workers that stop or come back, unfit pairs, bad bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import msgspec
import pytest

from pdplane.core.errors import Cause, aborted
from pdplane.core.frames import Abort, Beat
from pdplane.core.ids import Instance, Rank, Room
from pdplane.router import RouterConfig, RouterServer
from pdplane.wire.control import encode

from .fake_engine import spec
from .fleets import (
    BODY,
    COMPLETIONS,
    HOST,
    QUICK,
    Fleet,
    Talk,
    fleet,
    member,
    pairing,
    serves,
    texts,
    until,
)

# --- engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_step_that_fails_is_a_500_with_its_words_and_the_next_request_is_right(side: str) -> None:
    async with fleet(whole=True) as it:
        getattr(it, side).engine.fail = [RuntimeError("no more bits")]
        answer = await it.post(COMPLETIONS, BODY)
        assert (answer.status_code, answer.json()["error"]["side"]) == (500, side)
        assert "no more bits" in answer.json()["error"]["message"]
        await serves(it)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_request_that_its_engine_breaks_does_not_touch_its_neighbours(side: str) -> None:
    async with fleet(whole=True) as it:
        it.decode.engine.allow = it.prefill.engine.allow = 0
        neighbour = Talk(it.url, BODY)
        await until(lambda: len(it.prefill.engine.added) == 1)
        getattr(it, side).engine.break_rid = it.prefill.engine.added[0].rsplit("-", 1)[0] + "-2"
        broken = Talk(it.url, {**BODY, "prompt": "broken"})
        await until(lambda: len(it.prefill.engine.added) == 2)
        it.decode.engine.allow = it.prefill.engine.allow = None
        answer = await broken.answer()
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
        assert texts(await neighbour.answer()) == texts(await it.whole.post(COMPLETIONS, BODY))
        await it.at_rest()


async def test_an_engine_that_breaks_mid_stream_says_so_in_the_last_event() -> None:
    async with fleet() as it:
        it.decode.engine.allow = 3
        talk = Talk(it.url, {**BODY, "stream": True, "ignore_eos": True})
        await until(lambda: it.decode.engine.allow == 0)
        it.decode.engine.fail = [RuntimeError("no more bits")]
        it.decode.engine.allow = None
        answer = await talk.answer()
        assert answer.status_code == 200
        assert "no more bits" in answer.text.rstrip().rsplit("data: ", 1)[1]
        await it.at_rest()


async def test_an_engine_that_goes_on_failing_takes_its_worker_out_of_service() -> None:
    async with fleet(1, 2, whole=True) as it:
        it.decode.engine.fail = [RuntimeError("no more bits")] * 1000
        await until_failed(it)
        await until(lambda: not it.router.pairing.decodes[0].ready)
        for _ in range(4):
            await serves(it)
        assert (await it.decode.get("/health")).status_code == 503
        assert "no more bits" in (await it.decode.get("/health")).text


async def until_failed(it: Fleet) -> None:
    """Requests, until the first decode has had three steps fail in a row."""
    while not it.decode.group.health()[1]["engine_error"]:
        await it.post(COMPLETIONS, BODY)


# --- full and stopping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_full_queue_is_a_429_with_retry_after(side: str) -> None:
    async with fleet(**{side: {"max_queue": 1, "max_running": 1}}, router={"retries": 0}) as it:
        it.prefill.engine.allow = it.decode.engine.allow = 0
        if side == "decode":
            it.prefill.engine.allow = None
        talks: list[Talk] = []
        while not any(talk.answered for talk in talks):
            talks.append(Talk(it.url, {**BODY, "prompt": "x" * 300}))
            await asyncio.sleep(0.01)
        refused = [await talk.answer() for talk in talks if talk.answered]
        assert {answer.status_code for answer in refused} == {429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        it.prefill.engine.allow = it.decode.engine.allow = None
        for talk in talks:
            await talk.answer()
        await it.at_rest()


async def test_no_page_within_the_queues_limit_is_a_429_before_prefill_spends_time() -> None:
    async with fleet(decode={"pool_mb": 1}, router={"retries": 0}) as it:
        it.decode.engine.allow = 0
        talks = [Talk(it.url, {**BODY, "prompt": "x" * 500, "max_tokens": 4}) for _ in range(2)]
        await until(lambda: len(it.prefill.engine.added) == 2)
        it.decode.limit(queue_limit_s=0.2)
        assert (await it.post(COMPLETIONS, {**BODY, "prompt": "y" * 500})).status_code == 429
        assert len(it.prefill.engine.added) == 2
        it.decode.engine.allow = None
        for talk in talks:
            assert (await talk.answer()).status_code == 200
        await it.at_rest()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_worker_that_drains_finishes_what_it_has_and_takes_no_more(side: str) -> None:
    async with fleet(2, 2, whole=True) as it:
        it.decode.engine.allow = it.decodes[1].engine.allow = 2
        running = Talk(it.url, {**BODY, "ignore_eos": True})
        await until(lambda: any(one.engine.holds(computed=17) for one in it.decodes))
        leaving = next(one for one in getattr(it, side + "s") if one.engine.added)
        leaving.group.drain("it is stopping")
        await until(lambda: sum(worker.ready for worker in it.router.pairing.workers) == 3)
        it.decode.engine.allow = it.decodes[1].engine.allow = None
        assert (await running.answer()).status_code == 200
        before = len(leaving.engine.added)
        for _ in range(4):
            await serves(it)
        assert len(leaving.engine.added) == before
        answer = await leaving.post(COMPLETIONS, {**BODY, **pairing(it, 99)})
        assert (answer.status_code, answer.json()["error"]["retryable"]) == (503, True)
        assert "it is stopping" in answer.json()["error"]["message"]


# --- pairs that do not fit ----------------------------------------------------------------------------------------


UNFIT: dict[str, tuple[Any, list[str]]] = {
    "page size": (spec(page_size=8), ["page_size", "4", "8"]),
    "weights": (spec(weights="w1"), ["weights", "'w0'", "'w1'"]),
}


@pytest.mark.parametrize("differs", UNFIT)
async def test_a_pair_that_does_not_fit_is_refused_naming_both_values(differs: str) -> None:
    model, named = UNFIT[differs]
    async with fleet(decode={"model": model}, ready=False) as it:
        await until(lambda: all(worker.ready for worker in it.router.pairing.workers))
        missing = (await it.get("/ready"))["missing"]
        assert all(word in missing for word in named)
        answer = await it.post(COMPLETIONS, BODY)
        assert answer.status_code == 503
        assert all(word in answer.json()["error"]["message"] for word in named)
        answer = await it.decode.post(COMPLETIONS, {**BODY, **pairing(it, 4)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "incompatible")
        assert all(word in answer.json()["error"]["message"] for word in named)
        await it.at_rest()


OTHER_WEIGHTS = {"model": msgspec.structs.replace(spec(), weights="w1")}


async def test_a_pair_that_does_not_fit_addressed_past_the_router_is_named_on_both_sides() -> None:
    async with fleet(decode=OTHER_WEIGHTS, ready=False) as it:
        straight = {**BODY, **pairing(it, 4)}
        prefill, decode = Talk(it.prefill.url, straight), Talk(it.decode.url, straight)
        assert (await decode.answer()).status_code == 503
        await prefill.drop()
        for one, other in ((it.prefill, it.decode), (it.decode, it.prefill)):
            [told] = (await one.get("/server_info")).json()["refused_sessions"]
            assert (told["peer"], told["code"]) == (other.shell.instance, "incompatible")
            assert told["message"].startswith("weights differs: prefill has 'w0', decode has 'w1'; load the same")
            assert told["ago_s"] >= 0
        await it.at_rest()


async def test_a_session_that_comes_up_is_refused_no_more() -> None:
    async with fleet(whole=True, both=QUICK) as it:
        cause = Cause("incompatible", "weights differ; load the same", 503)
        for one, other in ((it.prefill, it.decode), (it.decode, it.prefill)):
            assert one.shell.refusals.note(other.shell.instance, cause, 0.0)
            assert not one.shell.refusals.note(other.shell.instance, cause, 0.0)
            one.shell.refusals.note(Instance("another"), cause, 0.0)
        await serves(it)
        for one in (it.prefill, it.decode):
            await until(lambda one=one: [each["peer"] for each in one.shell.refused_sessions()] == ["another"])


async def test_a_decode_with_another_secret_is_refused_and_serves_nobody() -> None:
    async with fleet(prefill={"secret": "one"}, decode={"secret": "two"}, router={"retries": 0}) as it:
        answer = await it.post(COMPLETIONS, BODY)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (503, "unauthorized", "server_error")
        assert "start both with the same --secret" in error["message"]
        for one, other in ((it.prefill, it.decode), (it.decode, it.prefill)):
            [told] = (await one.get("/server_info")).json()["refused_sessions"]
            assert (told["peer"], told["code"]) == (other.shell.instance, "unauthorized")
        await it.at_rest()


async def test_a_router_told_the_wrong_role_says_so() -> None:
    async with fleet() as it:
        config = RouterConfig(host=HOST, port=0, prefill=(it.decode.url,), decode=(it.prefill.url,))
        server = RouterServer(config)
        await server.start()
        try:
            router = server.router
            assert router is not None
            await until(lambda: "listed as" in router.pairing.missing())
        finally:
            await server.stop()


async def test_without_a_registry_decode_names_its_address_and_the_remedy() -> None:
    with contextlib.closing(socket.socket()) as nobody:
        nobody.bind((HOST, 0))
        port = nobody.getsockname()[1]
        async with fleet() as it:
            answer = await it.decode.post(COMPLETIONS, {**BODY, **pairing(it, 4), "bootstrap_port": port})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unreachable")
            assert f"{HOST}:{port}" in answer.json()["error"]["message"]
            await it.at_rest()


async def test_what_answers_as_no_registry_is_said_to_be_none() -> None:
    async with fleet() as it:
        wrong = {**pairing(it, 4), "bootstrap_port": it.decode.ports["http"]}
        answer = await it.decode.post(COMPLETIONS, {**BODY, **wrong})
        assert answer.status_code in (502, 503)
        assert str(it.decode.ports["http"]) in answer.json()["error"]["message"]
        await it.at_rest()


async def test_a_prefill_that_decode_is_not_allowed_to_ask_is_a_400() -> None:
    async with fleet(decode={"prefill_allow": ("10.0.0.1",)}, router={"retries": 0}) as it:
        answer = await it.post(COMPLETIONS, BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "prefill_not_allowed")
        assert "10.0.0.1" in answer.json()["error"]["message"]
        await it.at_rest()


# --- workers that go and come back --------------------------------------------------------------------------------


async def test_a_prefill_that_comes_back_on_its_ports_is_another_instance_and_serves() -> None:
    async with fleet(0, 1, whole=True, decode=QUICK, ready=False) as it, contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(member("prefill", **QUICK))
        server = RouterServer(
            RouterConfig(
                host=HOST,
                port=0,
                prefill=(first.router_url,),
                decode=(it.decode.url,),
                health_interval_s=0.05,
                stop_grace_s=0.0,
            )
        )
        await server.start()
        stack.push_async_callback(server.stop)
        front = Fleet([first], it.decodes, it.whole, server)
        await until(lambda: front.router.pairing.ready)
        await serves(front)
        ports, instance = first.ports, first.shell.instance
        first.engine.allow = 0
        caught = Talk(front.url, {**BODY, "prompt": "caught by the restart"})
        await until(lambda: first.engine.holds())
        await first.leave()
        answer = await caught.answer()
        assert answer.status_code in (502, 503), answer.text
        async with member(
            "prefill",
            port=ports["http"],
            bootstrap_port=ports["bootstrap"],
            control_port=ports["control"],
            **QUICK,
        ) as second:
            again = Fleet([second], it.decodes, it.whole, server)
            await until(lambda: again.router.pairing.ready)
            assert second.shell.instance != instance
            await serves(again)
            assert it.decode.group.figures()["control_sessions"] == 1


async def test_a_decode_that_goes_while_prefill_computes_leaves_prefill_clean() -> None:
    async with fleet(1, 1, prefill=QUICK, router={"retries": 0}) as it:
        it.prefill.engine.allow = 1
        talk = Talk(it.url, {**BODY, "prompt": "x" * 100})
        await until(lambda: it.prefill.engine.holds(computed=8))
        await it.decode.leave()
        assert (await talk.answer()).status_code in (502, 503)
        await until(lambda: it.prefill.idle)
        assert it.prefill.shell.audit() == []


# --- bad bytes ----------------------------------------------------------------------------------------------------


GARBAGE: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "zeros": b"\0" * 64,
    "noise": bytes(range(256)),
    "a length that is too large": b"\xff\xff\xff\xff\x01",
    "a half frame": encode(Beat(src=Instance("x")))[:-3],
    "the wrong version": b"\x03\x00\x00\x00\x63\x80\x80",
    "no msgpack": b"\x03\x00\x00\x00\x01\xc1\xc1",
}


async def say(port: int, data: bytes) -> None:
    """Says it, half closes, and waits until the other side has closed."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    with contextlib.suppress(OSError):
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 20)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_on_the_control_port_is_counted_and_ends_that_connection_alone(garbage: str) -> None:
    async with fleet(whole=True) as it:
        await serves(it)
        it.decode.engine.allow = 2
        running = Talk(it.url, {**BODY, "ignore_eos": True})
        await until(lambda: it.decode.engine.allow == 0)
        await say(it.prefill.ports["control"], GARBAGE[garbage])
        await until(lambda: it.prefill.shell.counts["bad_control_frame", ""] == 1)
        assert it.prefill.group.figures()["control_sessions"] == 1
        assert "pdplane_bad_control_frame_total" in it.prefill.group.metrics_text()
        it.decode.engine.allow = None
        assert (await running.answer()).status_code == 200
        await serves(it)


async def test_a_frame_before_any_hello_is_turned_away() -> None:
    async with fleet(whole=True) as it:
        stray = Abort(
            room=Room(1), src=Instance("x"), dst=it.prefill.shell.instance, rank=Rank(), cause=aborted("decode")
        )
        await say(it.prefill.ports["control"], encode(stray))
        assert it.prefill.group.figures()["control_sessions"] == 0
        await serves(it)


@pytest.mark.parametrize("garbage", ["http", "zeros", "noise", "a half bind"])
async def test_garbage_on_the_data_port_is_counted_and_ends_that_connection_alone(garbage: str) -> None:
    data = {**GARBAGE, "a half bind": b"pdkv\x01\x01\x04\x00"}[garbage]
    async with fleet(whole=True) as it:
        await serves(it)
        await say(it.decode.ports["data"], data)
        await until(lambda: it.decode.group.figures()["bad_data_frames"] == 1)
        await serves(it)
