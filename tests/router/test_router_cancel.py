"""A client that leaves, an abort call, a router that stops: both legs are closed and told, counters are at zero."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from pdplane.router import RouterConfig

from .router_fakes import Asked, FakeWorker, fleet, ok, until


async def ended(worker: FakeWorker, asked: Asked, code: str) -> None:
    """The leg's connection was closed, and it was told by an abort call, with the cause."""
    await asyncio.wait_for(asked.left.wait(), 10)
    told = await worker.aborted()
    assert told.pop("cause")["code"] == code
    assert told == {"rid": asked.rid, "room": asked.room, "abort_all": False}


async def test_a_client_that_leaves_before_the_head_ends_both_legs() -> None:
    async with fleet() as it, it.client() as client:
        client.post(b"{}")
        prefill, decode = await it.prefill.next(), await it.decode.next()
        client.leave()
        await ended(it.prefill, prefill, "client_left")
        await ended(it.decode, decode, "client_left")
        await it.idle()
        assert it.router.metrics.verdicts == {"client_left": 1}


async def test_a_client_that_leaves_mid_stream_ends_what_is_open() -> None:
    async with fleet(prefill=ok) as it, it.client() as client:
        client.post(b'{"stream": true}')
        decode = await it.decode.next()
        decode.start()
        decode.chunk(b"data: 1\n\n")
        await client.head()
        client.leave()
        await ended(it.decode, decode, "client_left")
        await it.idle()
        assert it.prefill.aborts.empty()  # its leg had ended well


async def test_a_batch_is_aborted_sample_by_sample() -> None:
    async with fleet() as it, it.client() as client:
        client.post(b'{"n": 3}')
        decode = await it.decode.next()
        await it.prefill.next()
        client.leave()
        told = [await it.decode.aborted() for _ in range(3)]
        assert [call["rid"] for call in told] == decode.rid
        assert [call["room"] for call in told] == decode.room
        await it.idle()


async def test_a_client_that_leaves_while_its_workers_are_being_dialled_leaves_nothing() -> None:
    async with fleet() as it, it.client() as client:
        client.post(b"{}")
        await until(lambda: bool(it.router.active))
        client.leave()
        await it.idle()


async def test_abort_by_id_and_by_label_is_exact() -> None:
    async with fleet(prefill=ok) as it, it.client() as one, it.client() as two:
        one.post(b'{"rid": "a"}')
        first = await it.decode.next()
        two.post(b'{"rid": "ab"}')
        second = await it.decode.next()
        for body, status in (
            ({"rid": ""}, 400),
            ({}, 400),
            ({"rid": "b"}, 200),
            ({"rid": "abc"}, 200),
            ({"rid": 5}, 400),
        ):
            answer = await it.post(body, "/abort_request")
            assert answer.status == status
            assert answer.json.get("aborted", 0) == 0
        assert (await it.post({"rid": "a"}, "/abort_request")).json == {"aborted": 1}
        stopped = await one.read()
        assert (stopped.status, stopped.error["code"]) == (499, "aborted")
        await ended(it.decode, first, "aborted")
        own_id = second.rid.split(".")[0]
        assert (await it.post({"rid": own_id[:-1]}, "/abort_request")).json == {"aborted": 0}
        assert (await it.post({"rid": own_id}, "/abort_request")).json == {"aborted": 1}
        assert (await two.read()).status == 499
        await it.idle()


async def test_abort_all_is_said_explicitly_and_stays_within_the_callers_key() -> None:
    async with fleet(prefill=ok) as it, it.client() as mine, it.client() as theirs:
        mine.post(b"{}", headers="authorization: Bearer a\r\nx-request-id: same\r\n")
        await it.decode.next()
        theirs.post(b"{}", headers="authorization: Bearer b\r\nx-request-id: same\r\n")
        other = await it.decode.next()
        key = "authorization: Bearer a\r\n"
        assert (await it.post({"rid": other.rid.split(".")[0]}, "/abort_request", key)).json == {"aborted": 0}
        assert (await it.post({"rid": "same"}, "/abort_request", key)).json == {"aborted": 1}
        assert (await it.post({"rid": "", "abort_all": True}, "/abort_request", key)).json == {"aborted": 0}
        other.reply()
        assert (await theirs.read()).status == 200
        await it.idle()


async def test_abort_all_before_strangers_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdplane.router.config.is_loopback", lambda host: False)
    everything = {"rid": "", "abort_all": True}
    async with fleet(prefill=ok) as it, it.client() as one:
        one.post(b'{"rid": "a"}')
        decode = await it.decode.next()
        refused = await it.post(everything, "/abort_request")
        assert (refused.status, refused.error["code"]) == (403, "abort_all_not_allowed")
        assert "--api-key" in refused.error["message"]
        decode.reply()
        assert (await one.read()).status == 200
        assert (await it.post({"rid": "nobody"}, "/abort_request")).json == {"aborted": 0}
        await it.idle()
    async with fleet(prefill=ok, api_key="k") as it:
        key = "authorization: Bearer k\r\n"
        assert (await it.post(everything, "/abort_request", key)).json == {"aborted": 0}


@pytest.mark.parametrize(
    ("host", "api_key", "open_to_all"),
    [("127.0.0.1", "", False), ("0.0.0.0", "", True), ("10.0.0.1", "", True), ("0.0.0.0", "k", False)],
)
def test_a_router_beyond_loopback_without_a_key_is_open_to_all(host: str, api_key: str, open_to_all: bool) -> None:
    assert RouterConfig(host=host, api_key=api_key).open_to_all is open_to_all


async def test_an_aborted_stream_ends_with_an_error_event() -> None:
    async with fleet(prefill=ok) as it, it.client() as client:
        client.post(b'{"stream": true}', headers="x-request-id: s\r\n")
        decode = await it.decode.next()
        decode.start()
        decode.chunk(b"data: 1\n\n")
        await client.head()
        await client.chunk()
        await it.post({"rid": "s"}, "/abort_request")
        assert b'"aborted"' in await client.chunks()
        await it.idle()


async def test_a_stopping_router_ends_what_still_runs_with_an_error() -> None:
    async with fleet(prefill=ok) as it, it.client() as client:
        client.post(b"{}")
        decode = await it.decode.next()
        await it.server.stop(grace_s=0.0)
        answer = await client.read()
        assert (answer.status, answer.error["code"]) == (503, "router_stopping")
        await ended(it.decode, decode, "router_stopping")


async def test_a_stopping_router_lets_answers_end_within_the_grace() -> None:
    async with fleet(prefill=ok) as it, it.client() as client:
        client.post(b"{}")
        decode = await it.decode.next()
        stopping = asyncio.ensure_future(it.server.stop(grace_s=30.0))
        await until(lambda: it.router.stopping)
        decode.reply(200, {"late": True})
        assert (await client.read()).json == {"late": True}
        await stopping


@pytest.mark.parametrize("seed", range(3))
async def test_counters_return_to_zero_whatever_happens(seed: int) -> None:
    dice = random.Random(seed)

    def anything(asked: Asked) -> None:
        deed = dice.randrange(8)
        if deed < 4:
            asked.reply(200, {"fine": True})
        elif deed == 4:
            asked.fail(dice.choice([400, 429, 500, 503, 504]))
        elif deed == 5:
            asked.reset()
        elif deed == 6:
            asked.start()
            asked.chunk(b"data: x\n\n")
            asked.reset()
        # else: never answers

    async def one() -> None:
        async with it.client() as client:
            client.post(json.dumps({"n": dice.randint(1, 3)}).encode(), headers="x-request-timeout: 0.5\r\n")
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
            if dice.random() < 0.4:
                client.leave()
            else:
                await client.reader.read(1)

    async with fleet(2, 2, prefill=anything, decode=anything, drain_s=0.1) as it:
        await it.sized(3)
        await asyncio.gather(*(one() for _ in range(60)))
        await it.idle()
        it.prefills[0].behaviour = it.prefills[1].behaviour = ok
        it.decodes[0].behaviour = it.decodes[1].behaviour = ok
        for worker in it.router.pairing.workers:
            worker.born_again()  # no ban of before stands in the way
            worker.requests = 0
        assert [(await it.post({})).status for _ in range(20)] == [200] * 20
        shares = [worker.requests for worker in it.router.pairing.decodes]
        assert min(shares) >= 8, shares
        await it.idle()


async def test_a_slow_reader_pauses_decode_and_memory_stays_bounded() -> None:
    sent = 0
    stop = asyncio.Event()

    async def flood(asked: Asked) -> None:
        nonlocal sent
        block = b"x" * 65536
        asked.start()
        for _ in range(400):
            asked.chunk(block)
            sent += len(block)
            await asked._writer.drain()
        asked.finish()
        stop.set()

    async with fleet(prefill=ok) as it, it.client() as client:
        client.reader._limit = 1024  # type: ignore[attr-defined]  # the test's own reader must not take it all
        client.post(b"{}")
        task = asyncio.ensure_future(flood(await it.decode.next()))
        await client.head()
        leg = next(iter(it.router.active.values()))._decode_leg
        await until(lambda: not leg.transport.is_reading())  # type: ignore[union-attr]
        front = next(front for front in it.router.fronts if front.current is not None)
        assert front.transport is not None
        assert front.transport.get_write_buffer_size() < 1024 * 1024
        assert sent < 400 * 65536
        client.reader._limit = 1 << 20  # type: ignore[attr-defined]
        assert len(await client.chunks()) == 400 * 65536
        await task
        await it.idle()
