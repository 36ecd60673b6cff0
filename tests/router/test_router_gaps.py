"""A request that ends anywhere between first leg and answer: what prefill holds is let go once, or was taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import pytest

from pdplane.router import in_turn

from .params_fakes import ParamsWorker, holding, in_order, params_fleet, prefill_of, vllm_fleet
from .router_fakes import Asked, Client, FakeWorker, Fleet, ok, record_of, refuse, until

PROMPT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def silent(_: Asked) -> None:
    """It has the request, and computes."""


def only_a_head(asked: Asked) -> None:
    asked.start()


def a_first_byte(asked: Asked) -> None:
    asked.start()
    asked.chunk(b"data: {}\n\n")


class Dials:
    """Connections to `fake` wait to be let through; `tried` once one was to be made."""

    def __init__(self, fake: FakeWorker) -> None:
        self.tried = asyncio.Event()
        self.let_through = asyncio.Event()
        self._port = fake.port
        self._loop = asyncio.get_running_loop()
        self._connect = self._loop.create_connection
        self._loop.create_connection = self._wait  # type: ignore[method-assign,assignment]

    async def _wait(self, factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
        if port == self._port:
            self.tried.set()
            await self.let_through.wait()
        return await self._connect(factory, host, port, **more)

    def give_back(self) -> None:
        self._loop.create_connection = self._connect  # type: ignore[method-assign]


async def leaves(it: Fleet, client: Client) -> None:
    client.leave()


async def is_aborted(it: Fleet, client: Client) -> None:
    for exchange in list(it.router.active):
        assert it.router.abort(exchange, b"") == 1


async def is_too_late(it: Fleet, client: Client) -> None:
    for exchange in list(it.router.active.values()):
        exchange.expired()


async def meets_a_stopping_router(it: Fleet, client: Client) -> None:
    await it.server.stop()


ENDS = (leaves, is_aborted, is_too_late, meets_a_stopping_router)
GAPS = {
    "prefill is dialled": (silent, silent, "prefill", 0),
    "prefill computes": (silent, silent, "", 1),
    "decode is dialled": (holding(), silent, "decode", 1),
    "decode has the request": (holding(), silent, "", 1),
    "decode has sent a head": (holding(), only_a_head, "", 1),
    "decode streams": (holding(), a_first_byte, "", 0),
}
End = Callable[[Fleet, Client], Awaitable[None]]


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("end", ENDS)
async def test_a_request_that_ends_in_any_gap_leaves_no_hold_and_releases_none_twice(gap: str, end: End) -> None:
    prefill, decode, dialled, releases = GAPS[gap]
    async with params_fleet(prefill=prefill, decode=decode, health_interval_s=600.0) as it, it.client() as client:
        router = it.router
        dials = Dials(getattr(it, dialled)) if dialled else None
        try:
            client.post(json.dumps(PROMPT | {"stream": True}).encode())
            if dials is not None:
                await asyncio.wait_for(dials.tried.wait(), 10)
            elif gap == "decode streams":
                assert await client.read_raw(b"{}\n\n")
            else:
                await until(lambda: bool((it.decode if prefill is not silent else it.prefill).seen))
            await end(it, client)
            await until(lambda: not router.active)
        finally:
            if dials is not None:
                dials.give_back()
        await router.guard.settle()
        released = prefill_of(it).releases
        assert released.qsize() == releases
        if releases:
            assert released.get_nowait() == [it.prefill.seen[0].headers["x-request-id"]]
        assert not any(worker.load for worker in router.pairing.workers)


@pytest.mark.parametrize("failing", [refuse(500), refuse(503), Asked.reset, refuse(409, code="spent")])
async def test_no_hold_is_given_to_a_second_decode_whatever_made_the_first_one_fail(failing: Any) -> None:
    async with params_fleet(1, 3, decode=in_order(failing, failing, ok), retries=2) as it:
        assert (await it.post(PROMPT)).status == 200
        await it.router.guard.settle()
        given = [leg.body["kv_transfer_params"] for fake in it.decodes for leg in fake.seen]
        assert len({params["pd_grant"] for params in given}) == 3
        taken = max(given, key=lambda params: params["pd_grant"])["remote_request_id"]
        released = [prefill_of(it).releases.get_nowait() for _ in range(2)]
        assert [taken] not in released
        assert released[0] != released[1]
        assert prefill_of(it).releases.empty()
        await it.idle()


async def test_a_lease_that_runs_out_while_decode_is_dialled_is_not_spent_on_a_vain_leg() -> None:
    async with params_fleet(decode=ok, health_interval_s=600.0) as it, it.client() as client:
        dials = Dials(it.decode)
        with pytest.MonkeyPatch.context() as patch:
            client.post(json.dumps(PROMPT).encode())
            await asyncio.wait_for(dials.tried.wait(), 10)
            patch.setattr(in_turn, "monotonic", lambda: monotonic() + 29.5)
            dials.let_through.set()
            answer = await client.read()
            dials.give_back()
        assert answer.status == 200
        first, second = (leg.headers["x-request-id"] for leg in it.prefill.seen)
        assert await prefill_of(it).released() == [first]
        (served,) = it.decode.seen
        assert served.body["kv_transfer_params"]["remote_request_id"] == second
        causes = [attempt["cause"] for attempt in (await record_of(it, answer))["attempts"]]
        assert (causes[0]["code"], causes[1]) == ("lease_too_short", None)
        assert it.router.metrics.retries == {"lease_too_short": 1}
        await it.idle()


async def test_a_release_that_hangs_delays_nobody() -> None:
    class Deaf(ParamsWorker):
        async def _answer(self, asked: Asked, reader: asyncio.StreamReader) -> None:
            if asked.path == "/v1/kv/release":
                self.releases.put_nowait(asked.body["request_ids"])
                await self._until_answered(asked, reader)
            else:
                await super()._answer(asked, reader)

    async with params_fleet(prefill=holding(), decode=in_order(refuse(400), ok)) as it:
        it.prefill.__class__ = Deaf
        assert (await it.post(PROMPT)).status == 400
        await prefill_of(it).released()
        assert (await it.post(PROMPT)).status == 200
        await it.idle()


@pytest.mark.parametrize(("gap", "counted"), [("decode is dialled", 1), ("decode has the request", 1), ("over", 0)])
async def test_what_a_native_prefill_holds_is_left_to_its_lease_and_counted_once(gap: str, counted: int) -> None:
    decode = ok if gap == "over" else silent
    async with vllm_fleet(prefill=holding(), decode=decode, health_interval_s=600.0) as it, it.client() as client:
        dials = Dials(it.decode) if gap == "decode is dialled" else None
        client.post(json.dumps(PROMPT).encode())
        if gap == "over":
            assert (await client.read()).status == 200
        else:
            await until(lambda: bool(it.decode.seen) if dials is None else dials.tried.is_set())
            client.leave()
            await until(lambda: not it.router.active)
        if dials is not None:
            dials.give_back()
        assert it.router.guard.releases["native"] == counted
        await it.router.guard.settle()
        assert it.decode.aborts.qsize() == (1 if gap == "decode has the request" else 0)
        await it.idle()
