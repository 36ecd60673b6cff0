"""Workers that come late, come back with other values, and leave while others are served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pdplane.core.ids import Rank, Shape
from pdplane.registry.client import RegistryClient
from pdplane.registry.server import RegistryConfig, RegistryServer
from pdplane.router import RouterConfig, RouterServer
from pdplane.wire.registry import registration_of
from pdplane.worker.config import WorkerConfig
from pdplane.worker.engine import ModelSpec
from pdplane.worker.server import TURN_S, serve

from .fake_engine import RuleEngine, spec
from .fleets import (
    BODY,
    COMPLETIONS,
    HOST,
    QUICK,
    Fleet,
    Member,
    Talk,
    client,
    completion,
    events,
    fleet,
    free_port,
    member,
    pairing,
    serves,
    texts,
    until,
)
from .http_fakes import ByteTokenizer


@contextlib.asynccontextmanager
async def router_before(decode: Member, prefill_url: str) -> AsyncIterator[RouterServer]:
    config = RouterConfig(
        host=HOST,
        port=0,
        prefill=(prefill_url,),
        decode=(decode.url,),
        health_interval_s=0.05,
        stop_grace_s=0.0,
        retries=0,
    )
    server = RouterServer(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


# --- H04: another page size, and back -----------------------------------------------------------------------------

OTHER: dict[str, tuple[ModelSpec, list[str]]] = {
    "page size": (spec(page_size=8), ["page_size", "4", "8"]),
    "KV dtype": (msgspec.structs.replace(spec(), kv_dtype="float8"), ["dtype", "digest", "float8"]),
}


@pytest.mark.parametrize("differs", OTHER)
async def test_a_prefill_that_comes_back_with_other_values_is_refused_and_serves_again_with_the_old_ones(
    differs: str,
) -> None:
    other, named = OTHER[differs]
    ports = {"port": free_port(), "bootstrap_port": free_port(), "control_port": free_port()}
    url = f"http://{HOST}:{ports['port']}"
    async with (
        member("decode", **QUICK) as decode,
        member("aggregated") as whole,
        router_before(decode, f"{url}@{ports['bootstrap_port']}") as server,
    ):
        pairing = server.router.pairing  # type: ignore[union-attr]
        for model in (None, other, None):
            async with member("prefill", model, **ports, **QUICK) as prefill:
                front = Fleet([prefill], [decode], whole, server)
                if model is None:
                    await until(lambda: pairing.ready)
                    await serves(front)
                else:
                    await until(lambda: "differs" in pairing.missing())
                    await refuses(front, named)
            await until(lambda: not pairing.ready)


async def refuses(it: Fleet, named: list[str]) -> None:
    """At the router, and on both sides, naming both values, before anything is computed."""
    added = [len(one.engine.added) for one in (it.prefill, it.decode)]
    straight = {**BODY, **pairing(it, 4)}
    decode, prefill = Talk(it.decode.url, straight), Talk(it.prefill.url, straight)
    answers = [await it.post(COMPLETIONS, BODY), await decode.answer()]
    await prefill.drop()
    for one, other in ((it.prefill, it.decode), (it.decode, it.prefill)):
        told = [each for each in one.shell.refused_sessions() if each["peer"] == other.shell.instance]
        assert [each["code"] for each in told] == ["incompatible"]
        assert all(word in told[0]["message"] for word in named), told
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert all(word in answer.text for word in named), answer.text
    assert [len(one.engine.added) for one in (it.prefill, it.decode)] == added


# --- H05: router and decode first, prefill late and in parts ------------------------------------------------------


async def test_a_prefill_that_comes_late_is_waited_for_and_then_serves() -> None:
    ports = {"port": free_port(), "bootstrap_port": free_port()}
    url = f"http://{HOST}:{ports['port']}"
    async with member("decode") as decode, router_before(decode, f"{url}@{ports['bootstrap_port']}") as server:
        early = Fleet([], [decode], None, server)
        assert "prefill" in (await early.get("/ready"))["missing"]
        assert (await early.post(COMPLETIONS, BODY)).status_code == 503
        async with member("prefill", dp=2, **ports) as prefill, member("aggregated") as whole:
            late = Fleet([prefill], [decode], whole, server)
            await until(lambda: late.router.pairing.ready)
            await serves(late)


async def test_a_prefill_of_which_a_rank_is_missing_is_503_and_names_it_until_it_is_there() -> None:
    registry = RegistryServer(RegistryConfig(host=HOST, port=0))
    await registry.start()
    url = f"http://{HOST}:{registry.port}"
    try:
        async with member("decode") as decode, RegistryClient(url) as first:
            await first.register(
                registration_of(
                    Rank(dp=0), Shape(dp=2), HOST, 1, page_size=4, kv_cache_dtype="digest", pd_instance="first"
                )
            )
            named = {"bootstrap_host": HOST, "bootstrap_port": registry.port}
            answer = await decode.post(COMPLETIONS, {**BODY, **named, "bootstrap_room": 3})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "prefill_not_ready")
            assert "1 of 2" in answer.text
            assert "dp1" in answer.text
            await first.deregister("first")
            async with member("prefill", dp=2, registry=url) as prefill:
                await until(lambda: registry.table.ready)
                body = {**BODY, **named, "bootstrap_room": 5}
                legs = await asyncio.gather(prefill.post(COMPLETIONS, body), decode.post(COMPLETIONS, body))
                assert [leg.status_code for leg in legs] == [200, 200], [leg.text for leg in legs]
    finally:
        await registry.stop()


# --- H17: a worker that leaves with streams running ---------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(role: str, **settings: Any) -> AsyncIterator[tuple[RuleEngine, str, list[str], asyncio.Task[None]]]:
    """A worker as its process runs it: (engine, url, what it says, the run)."""
    engine, said, port = RuleEngine(spec()), list[str](), free_port()
    given = {"pool_mb": 1, "page_size": 4, "bootstrap_port": free_port(), **settings}
    config = WorkerConfig(role=role, port=port, **given)
    run = asyncio.create_task(serve(config, lambda _: (engine, ByteTokenizer()), said.append))
    await until(lambda: bool(said) or run.done())
    try:
        yield engine, f"http://{HOST}:{port}", said, run
    finally:
        engine.allow = None
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


STREAM = {**BODY, "prompt": "stream", "max_tokens": 8, "ignore_eos": True, "stream": True}


async def test_a_drained_worker_is_unready_at_once_finishes_its_streams_and_ends() -> None:
    before = sys.getswitchinterval()
    async with served("aggregated") as (engine, url, said, run):
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
        engine.allow = 2
        talks = [Talk(url, STREAM) for _ in range(4)]
        await until(lambda: len(engine.added) == 4 and engine.allow == 0)
        async with client(url) as http:
            asked = (await http.post("/drain", json={"reason": "scale down"})).json()
            assert asked == {"draining": True, "live": 4}
            health = await http.get("/health")
            assert (health.status_code, health.json()["draining"], health.json()["left"]) == (503, "scale down", 4)
            refused = await http.post(COMPLETIONS, json=BODY)
            assert (refused.status_code, refused.json()["error"]["retryable"]) == (503, True)
            assert "scale down" in refused.text
            assert not run.done()
        engine.allow = None
        for talk in talks:
            assert len(events(await talk.answer())) > 1
        await run
        assert "4 requests may finish" in " ".join(said)
        assert said[-1] == "aggregated: nothing is left"
        assert sys.getswitchinterval() == before


async def test_a_grace_shorter_than_the_streams_ends_them_with_an_explicit_error_event() -> None:
    config = {"shutdown_s": 0.05}
    async with served("aggregated", **config) as (engine, url, said, run):
        engine.allow = 2
        talk = Talk(url, STREAM)
        await until(lambda: engine.allow == 0)
        os.kill(os.getpid(), signal.SIGTERM)
        answer = await talk.answer()
        last = [line for line in answer.text.split("\n\n") if line][-1]
        assert "worker_stopping" in last
        await run
        assert any("1 requests cut" in line for line in said)


async def test_an_operators_drain_has_the_same_bound() -> None:
    async with served("aggregated", shutdown_s=0.05) as (engine, url, said, run):
        engine.allow = 2
        talk = Talk(url, STREAM)
        await until(lambda: engine.allow == 0)
        async with client(url) as http:
            assert (await http.post("/drain", json={"reason": "new kernel"})).json()["live"] == 1
        assert "worker_stopping" in (await talk.answer()).text
        await run
        assert any("draining (new kernel), 1 requests may finish within 0.05 s" in line for line in said)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_cuts_at_once_with_an_explicit_error_event(second: signal.Signals) -> None:
    async with served("aggregated", shutdown_s=3600.0) as (engine, url, said, run):
        engine.allow = 2
        talk = Talk(url, STREAM)
        await until(lambda: engine.allow == 0)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: any("a second signal cuts them" in line for line in said))
        assert not talk.answered
        os.kill(os.getpid(), second)
        assert "worker_stopping" in (await talk.answer()).text
        await run
        assert any("1 requests cut" in line for line in said)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_new_work_goes_elsewhere_while_a_worker_drains_and_nobody_sees_a_5xx(side: str) -> None:
    async with fleet(2, 2, whole=True, both={"dp": 2}) as it:
        leaving = getattr(it, side)
        streams = [Talk(it.url, {**STREAM, "prompt": f"stream {i}"}) for i in range(8)]
        await until(lambda: any(engine.added for engine in leaving.engines))
        leaving.group.drain("scale down")
        new = [Talk(it.url, {**BODY, "prompt": f"new {i}"}) for i in range(8)]
        assert {(await talk.answer()).status_code for talk in (*streams, *new)} == {200}
        assert leaving.group.health()[1]["draining"] == "scale down"
        pair, whole = await it.both(*completion("after all"))
        assert texts(pair) == texts(whole)
        await it.at_rest()


async def test_a_decode_that_must_go_ends_its_streams_with_an_explicit_error_event_and_the_other_serves() -> None:
    async with fleet(1, 2, whole=True) as it:
        leaving = it.decode
        leaving.engine.allow = it.decodes[1].engine.allow = 2
        streams = [Talk(it.url, {**STREAM, "prompt": f"stream {i}"}) for i in range(4)]
        await until(lambda: sum(len(one.engine.added) for one in it.decodes) == 4)
        await until(lambda: all(job.completion_tokens for one in it.decodes for job in one.shell.jobs.values()))
        cut = len(leaving.group.jobs)
        leaving.group.drain("scale down")
        leaving.group.cut("the worker stopped before the request had ended")
        for one in it.decodes:
            one.let_go()
        ends = [(await talk.answer()).text.rstrip().split("\n\n") for talk in streams]
        assert sum("worker_stopping" in end[-1] for end in ends) == cut > 0
        assert all(end[-1] == "data: [DONE]" for end in ends if "worker_stopping" not in end[-1])
        pair, whole = await it.both(*completion("after all"))
        assert texts(pair) == texts(whole)
        await it.at_rest()


async def test_streams_whose_prefill_has_gone_finish_as_if_it_were_there() -> None:
    async with fleet(2, 1, whole=True) as it:
        it.decode.engine.allow = 2
        bodies = [{**STREAM, "prompt": f"stream {i}"} for i in range(4)]
        streams = [Talk(it.url, body) for body in bodies]
        await until(lambda: len(it.decode.engine.added) == 4 and it.decode.engine.allow == 0)
        leaving = it.prefill
        leaving.group.drain("scale down")
        await until(lambda: not leaving.group.jobs)
        await leaving.exit()
        it.decode.let_go()
        for body, talk in zip(bodies, streams, strict=True):
            assert texts(await talk.answer()) == texts(await it.whole.post(COMPLETIONS, body))
        pair, whole = await it.both(*completion("after all"))
        assert texts(pair) == texts(whole)
