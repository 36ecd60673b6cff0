"""The router before real workers: a prefill that comes back with other values, ranks that return to zero."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from pdplane.router import RouterConfig, RouterServer
from tests.worker.fake_engine import spec
from tests.worker.fleets import COMPLETIONS, HOST, Fleet, Member, Talk, fleet, member, pairing, until
from tests.worker.test_fleet_answers import completion

BODY = completion()[1]
QUICK = {"beat_s": 0.05, "silent_s": 1.0, "grace_s": 0.2}


@contextlib.asynccontextmanager
async def router(prefill: str, decode: str) -> AsyncIterator[RouterServer]:
    config = RouterConfig(
        host=HOST, port=0, prefill=(prefill,), decode=(decode,), health_interval_s=0.05, stop_grace_s=0.0
    )
    server = RouterServer(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def prefill_at(ports: dict[str, int], page_size: int, policy: str) -> AsyncIterator[Member]:
    """A prefill on these ports; {}: free ones."""
    given = {"bootstrap_port": ports["bootstrap"], "control_port": ports["control"]} if ports else {}
    async with member(
        "prefill",
        model=spec(page_size=page_size),
        port=ports.get("http", 0),
        decode_allocation_policy=policy,
        **given,
        **QUICK,
    ) as made:
        yield made


@pytest.mark.parametrize(
    ("page_size", "policy", "values"),
    [(8, "early", ("page_size", "8", "4")), (4, "prefill_complete", ("policy", "'prefill_complete'", "'early'"))],
)
async def test_a_prefill_back_with_another_value_is_refused_by_all_until_the_old_one_returns(
    page_size: int, policy: str, values: tuple[str, ...]
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        decode = await stack.enter_async_context(member("decode", **QUICK))
        async with prefill_at({}, 4, "early") as first:
            ports = first.ports
            server = await stack.enter_async_context(router(first.router_url, decode.url))
            it = Fleet([first], [decode], None, server)
            await until(lambda: it.router.pairing.ready)
            right = (await it.post(COMPLETIONS, BODY)).json()["choices"][0]["text"]
            await it.at_rest()
        life = decode.group.process
        async with prefill_at(ports, page_size, policy) as second:
            it = Fleet([second], [decode], None, server)
            await until(lambda: it.router.pairing.prefills[0].instance == second.group.process)
            await until(lambda: not it.router.pairing.ready)
            answer = await it.post(COMPLETIONS, BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_ready_pair")
            assert all(value in answer.json()["error"]["message"] for value in values)
            for entry in (await it.get("/workers"))["workers"]:
                assert all(value in entry["reason"] for value in values)
            leg = await decode.post(COMPLETIONS, BODY | pairing(it, 77))  # past the router, decode says so itself
            assert leg.status_code == 503
            assert all(value in leg.json()["error"]["message"] for value in values)
            await until(lambda: decode.idle)
        async with prefill_at(ports, 4, "early") as third:
            it = Fleet([third], [decode], None, server)
            await until(lambda: it.router.pairing.ready)
            answer = await it.post(COMPLETIONS, BODY)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == right
            assert decode.group.process == life
            await it.at_rest()


async def test_counts_by_rank_return_to_zero_whatever_clients_do() -> None:
    async with fleet(prefill={"dp": 2}, decode={"dp": 2}) as it:
        talks = [Talk(it.url, BODY | {"prompt": f"number {i}", "n": 1 + i % 2}) for i in range(12)]
        for talk in talks[::3]:
            await talk.drop()
        for i, talk in enumerate(talks):
            if i % 3:
                assert (await talk.answer()).status_code == 200
        await it.at_rest()
        [entry] = [one for one in (await it.get("/workers"))["workers"] if one["role"] == "prefill"]
        assert entry["rank_load"] == [0, 0]
        assert entry["shape"] == {"dp": 2, "tp": 1, "cp": 1, "pp": 1}


async def test_a_drained_prefill_gets_nothing_new_and_its_requests_end_well() -> None:
    async with fleet(2, 1) as it:
        before = [Talk(it.url, BODY | {"prompt": f"before {i}"}) for i in range(6)]
        await until(lambda: len(it.router.active) == 6)
        left = it.prefills[0]
        assert (await left.post("/drain", {"reason": "new kernel"})).json()["draining"] is True
        after = [Talk(it.url, BODY | {"prompt": f"after {i}"}) for i in range(6)]
        for talk in before + after:
            assert (await talk.answer()).status_code == 200
        await until(lambda: it.router.pairing.prefills[0].draining == "new kernel")
        assert all(worker.ban.failures == 0 for worker in it.router.pairing.workers)
        await it.at_rest()
