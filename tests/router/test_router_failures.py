"""What a client gets when a leg fails, and what the other leg is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdplane.router.upstream import STALE_WITHIN_S, Leg

from .router_fakes import Asked, FakeWorker, Fleet, asked_of, fleet, ok, refuse, until


def reset(asked: Asked) -> None:
    asked.reset()


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
async def test_prefills_4xx_passes_verbatim_without_a_retry_and_ends_decodes_leg(status: int) -> None:
    body = {"error": {"message": "no", "code": "x", "odd": [1]}}
    async with fleet(2, 2, prefill=lambda a: a.reply(status, body)) as it:
        answer = await it.post({})
        assert (answer.status, answer.json) == (status, body)
        decode = await asked_of(it.decodes)
        await asyncio.wait_for(decode.left.wait(), 10)
        told = await aborted_at(it, "decodes")
        assert (told["rid"], told["room"], told["cause"]["code"]) == (decode.rid, decode.room, "peer_leg_closed")
        assert it.router.metrics.attempts == 1
        await it.idle()


async def test_a_plain_text_4xx_keeps_its_type_and_text() -> None:
    def plain(asked: Asked) -> None:
        asked.send(b"HTTP/1.1 404 Not Found\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n")
        asked.send(b"3\r\nnot\r\n5\r\n here\r\n0\r\n\r\n")
        asked.end()

    async with fleet(prefill=plain) as it:
        answer = await it.post({})
        assert (answer.status, answer.body, answer.headers["content-type"]) == (404, b"not here", "text/plain")


async def test_an_empty_error_answer_gets_a_json_body() -> None:
    async with fleet(prefill=lambda a: a.reply(404, b"")) as it:
        answer = await it.post({})
        assert answer.status == 404
        assert answer.error["message"]


@pytest.mark.parametrize("failure", [refuse(500), refuse(502), refuse(503), refuse(429), reset])
async def test_a_failing_prefill_is_retried_on_the_other_with_another_room_and_rid(failure: Any) -> None:
    async with fleet(2, 1, prefill=ok, decode=None) as it:
        it.prefills[0].behaviour = failure
        for _ in range(4):
            it.prefills[0].seen.clear()
            async with it.client() as client:
                client.post(b"{}")
                first = second = await it.decode.next()
                if it.prefills[0].seen or not it.prefills[1].seen:
                    await asyncio.wait_for(first.left.wait(), 10)
                    assert (await it.decode.aborted())["rid"] == first.rid
                    second = await it.decode.next()
                    assert second.room != first.room
                    assert second.rid == first.rid[:-1] + "1"
                    assert second.body["bootstrap_host"] == first.body["bootstrap_host"]
                second.reply()
                assert (await client.read()).status == 200
        await it.idle()


async def test_a_failing_decode_is_retried_on_the_other_and_prefills_first_room_is_closed() -> None:
    async with fleet(1, 2, prefill=None, decode=ok) as it:
        it.decodes[0].behaviour = refuse(503)
        for _ in range(10):
            answer = asyncio.ensure_future(it.post({}))
            room = None
            while not answer.done():
                first = await it.prefill.next()
                assert first.room != room
                room = first.room
                await asyncio.wait({asyncio.ensure_future(first.left.wait()), answer}, return_when="FIRST_COMPLETED")
                if first.left.is_set():
                    assert (await it.prefill.aborted())["room"] == room == it.decodes[0].seen[-1].room
                else:
                    first.reply()
            assert (await answer).status == 200
        assert it.decodes[0].seen
        await it.idle()


async def test_all_busy_is_a_429_with_its_retry_after_and_opens_no_breaker() -> None:
    async with fleet(2, 1, prefill=refuse(429, "retry-after: 7\r\n")) as it:
        for _ in range(10):
            answer = await it.post({})
            assert (answer.status, answer.headers["retry-after"]) == (429, "7")
        assert all(worker.failures == 0 and worker.ready for worker in it.router.pairing.workers)
        assert it.router.metrics.attempts == 20
        for worker in it.prefills:
            worker.behaviour = ok
        it.decode.behaviour = ok
        assert (await it.post({})).status == 200
        await it.idle()


async def test_a_429_without_retry_after_gets_one() -> None:
    async with fleet(prefill=refuse(429)) as it:
        assert (await it.post({})).headers["retry-after"] == "1"


@pytest.mark.parametrize("status", [408, 504, 501])
async def test_other_codes_pass_unchanged_and_untried(status: int) -> None:
    async with fleet(2, 2, prefill=ok, decode=refuse(status)) as it:
        assert (await it.post({})).status == status
        assert it.router.metrics.attempts == 1
        await it.idle()


async def test_a_worker_that_says_not_retryable_is_not_tried_again() -> None:
    async with fleet(2, 2, prefill=refuse(500, retryable=False)) as it:
        assert (await it.post({})).status == 500
        assert it.router.metrics.attempts == 1


async def test_a_decode_that_names_prefill_as_the_culprit_costs_the_prefill_its_turn() -> None:
    async with fleet(2, 1, prefill=None) as it, it.client() as client:
        client.post(b"{}")
        first = await it.decode.next()
        culprit = await asked_of(it.prefills)
        first.fail(502, side="prefill", retryable=True)
        second = await it.decode.next()
        other = await asked_of(it.prefills)
        assert culprit.headers["host"] != other.headers["host"]
        other.reply()
        second.reply()
        assert (await client.read()).status == 200
        await it.idle()


async def test_a_busy_decode_reported_by_prefill_is_the_one_that_is_spared() -> None:
    async with fleet(1, 2, prefill=None, decode=None) as it, it.client() as client:
        client.post(b"{}")
        first = await it.prefill.next()
        full = await asked_of(it.decodes)
        first.fail(429, side="decode", retryable=True)
        second = await asked_of(it.decodes)
        assert second.headers["host"] != full.headers["host"]
        avoided = [worker for worker in it.router.pairing.workers if worker.avoid]
        assert [worker.address.netloc for worker in avoided] == [full.headers["host"]]
        (await it.prefill.next()).reply()
        second.reply()
        assert (await client.read()).status == 200
        await it.idle()


async def test_both_decodes_down_is_their_503_with_a_json_body_after_no_more_attempts_than_configured() -> None:
    async with fleet(1, 3, prefill=None, decode=refuse(503)) as it:
        answer = await it.post({})
        assert (answer.status, answer.error["message"]) == (503, "worker says 503")
        assert it.router.metrics.attempts == 2
        await it.idle()


async def test_a_single_pair_that_fails_gives_its_own_answer_after_one_attempt() -> None:
    async with fleet(prefill=ok, decode=refuse(500)) as it:
        assert (await it.post({})).status == 500
        assert len(it.decode.seen) == 1
        await it.idle()


async def test_a_refused_connection_is_a_502_that_names_the_worker() -> None:
    async with fleet(prefill=None, health_interval_s=60.0) as it:
        await it.decode.stop()
        answer = await it.post({})
        assert answer.status == 502
        assert it.decode.url in answer.error["message"]
        assert "connection refused" in answer.error["message"]
        await it.idle()


async def test_a_decode_that_dies_before_its_first_byte_is_tried_again_elsewhere() -> None:
    async with fleet(1, 2, prefill=ok, decode=None) as it, it.client() as client:
        client.post(b"{}")
        first = await asked_of(it.decodes)
        first.start()
        await asyncio.sleep(0)
        first.reset()
        second = await asked_of(it.decodes)
        assert second.room != first.room
        second.reply(200, {"b": 2})
        assert (await client.read()).json == {"b": 2}
        await it.idle()


async def test_a_stream_that_breaks_ends_with_an_error_event_and_a_clean_end() -> None:
    async with fleet(1, 2, prefill=ok) as it, it.client() as client:
        client.post(b'{"stream": true}')
        decode = await asked_of(it.decodes)
        decode.start()
        decode.chunk(b'data: {"half')
        await client.head()
        assert await client.chunk() == b'data: {"half'
        decode.reset()
        event = await client.chunks()
        assert event.startswith(b'\n\ndata: {"error":')
        assert b"upstream_reset" in event
        assert await client.reader.read() == b""
        assert it.router.metrics.attempts == 1  # never a retry after a byte was sent
        await it.idle()


async def test_a_stream_that_breaks_inside_a_chunk_is_cut() -> None:
    async with fleet(prefill=ok) as it, it.client() as client:
        client.post(b'{"stream": true}')
        decode = await it.decode.next()
        decode.start()
        decode.send(b"ff\r\ndata: half\r\n")
        await client.head()
        await client.reader.readexactly(10)
        decode.reset()
        assert b"error" not in await client.reader.read()
        await it.idle()


async def test_a_plain_answer_that_breaks_is_cut() -> None:
    async with fleet(prefill=ok) as it, it.client() as client:
        client.post(b"{}")
        decode = await it.decode.next()
        decode.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        await client.head()
        decode.reset()
        with pytest.raises(asyncio.IncompleteReadError):
            await client.reader.readexactly(10)
        await it.idle()


async def test_bytes_beyond_an_answer_reach_nobody() -> None:
    surplus = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"

    def smuggle(asked: Asked) -> None:
        asked.send(surplus)
        asked.end()

    async with fleet(prefill=ok, decode=smuggle) as it:
        answer = await it.post({})
        assert (answer.status, answer.error["code"]) == (502, "upstream_garbled")
        await it.idle()


async def test_what_is_not_http_is_a_failed_attempt() -> None:
    def garble(asked: Asked) -> None:
        asked.send(b"\x00\x01 nonsense\r\n\r\n")

    async with fleet(prefill=ok, decode=garble) as it:
        assert (await it.post({})).error["code"] == "upstream_garbled"
        await it.idle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_interim_answer_that_nobody_asked_for_is_a_failed_attempt(side: str) -> None:
    def interim(asked: Asked) -> None:
        asked.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        asked.end()

    behaviours: dict[str, Any] = {"prefill": None, "decode": None, side: interim}
    async with fleet(**behaviours) as it:
        answer = await it.post({})
        assert (answer.status, answer.error["code"], answer.error["side"]) == (502, "upstream_garbled", side)
        await it.idle()


async def test_a_stale_idle_connection_is_a_failed_attempt_with_another_room_on_the_same_worker() -> None:
    async with fleet(prefill=None) as it, it.client() as client:
        client.post(b"{}")
        (await it.decode.next()).reply()
        (await it.prefill.next()).reply()
        await client.read()
        await it.idle()
        client.post(b"{}")
        stale = await it.decode.next()
        stale.reset()  # as a worker does that closed the idle connection in the same moment
        await it.prefill.next()
        again = await it.decode.next()
        assert again.room != stale.room
        (await it.prefill.next()).reply()
        again.reply()
        assert (await client.read()).status == 200
        assert it.router.metrics.retries == {"stale_connection": 1}
        assert all(worker.failures == 0 for worker in it.router.pairing.workers)
        await it.idle()


async def test_a_worker_that_dies_over_a_request_on_a_reused_connection_is_to_blame() -> None:
    async with fleet(prefill=None) as it, it.client() as client:
        client.post(b"{}")
        (await it.decode.next()).reply()
        (await it.prefill.next()).reply()
        await client.read()
        await it.idle()
        client.post(b"{}")
        working = await it.decode.next()
        (exchange,) = it.router.active.values()
        leg = exchange._decode_leg
        assert isinstance(leg, Leg)
        leg.sent_at -= 2 * STALE_WITHIN_S
        working.reset()
        answer = await client.read()
        assert (answer.status, answer.error["code"]) == (502, "upstream_reset")  # no other decode to try
        assert sum(worker.failures for worker in it.router.pairing.decodes) == 1
        await it.idle()


async def test_the_deadline_is_a_504_that_ends_both_legs() -> None:
    async with fleet() as it:
        answer = await it.post({}, headers="x-request-timeout: 0.05\r\n")
        assert (answer.status, answer.error["code"]) == (504, "deadline")
        for worker in (it.prefill, it.decode):
            asked = await worker.next()
            assert float(asked.headers["x-request-timeout"]) <= 0.05
            await asyncio.wait_for(asked.left.wait(), 10)
            assert (await worker.aborted())["rid"] == asked.rid
        await it.idle()


async def test_the_deadline_within_a_stream_is_an_error_event() -> None:
    async with fleet(prefill=ok) as it, it.client() as client:
        client.post(b'{"stream": true}', headers="x-request-timeout: 0.1\r\n")
        decode = await it.decode.next()
        decode.start()
        decode.chunk(b"data: 1\n\n")
        answer = await client.read()
        assert b'"deadline"' in answer.body
        assert (await it.decode.aborted())["rid"] == decode.rid
        await it.idle()


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan"])
async def test_a_timeout_that_is_none_is_refused(value: str) -> None:
    async with fleet() as it:
        answer = await it.post({}, headers=f"x-request-timeout: {value}\r\n")
        assert (answer.status, answer.error["param"]) == (400, "x-request-timeout")
        assert value in answer.error["message"]


async def test_a_worker_that_has_gone_silent_ends_its_requests() -> None:
    async with fleet(1, 1, prefill=ok, silent_s=0.01) as it:
        waiting = asyncio.ensure_future(it.post({}))
        await it.decode.next()
        it.router.pairing.decodes[0].silent = True
        it.router.sweep()
        answer = await waiting
        assert (answer.status, answer.error["code"]) == (502, "worker_silent")
        await it.idle()


async def test_an_aggregated_worker_that_has_gone_silent_ends_its_requests() -> None:
    alone = FakeWorker("aggregated")
    await alone.start()
    async with fleet(0, 0, worker=(alone.url,)) as it:
        waiting = asyncio.ensure_future(it.post({}))
        await alone.next()
        it.router.pairing.aggregated[0].silent = True
        it.router.sweep()
        assert (await waiting).error["code"] == "worker_silent"
        await it.idle()
    await alone.stop()


async def test_a_silent_prefill_is_let_go_once_while_decode_streams_on() -> None:
    async with fleet() as it, it.client() as client:
        client.post(b"{}")
        decode, prefill = await it.decode.next(), await it.prefill.next()
        decode.start()
        decode.chunk(b"data: x\n\n")
        await client.head()
        worker = it.router.pairing.prefills[0]
        for _ in range(3):
            worker.silent = True
            it.router.sweep()
        assert (worker.load, worker.failures) == (0, 1)
        await asyncio.wait_for(prefill.left.wait(), 10)
        decode.finish()
        assert await client.chunks() == b"data: x\n\n"
        await it.idle()


async def test_failures_in_a_row_make_a_worker_avoided_for_a_while_and_never_shut_out() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok, ban_after=2, ban_s=60.0) as it:
        it.decodes[0].behaviour = refuse(500)
        for _ in range(8):
            assert (await it.post({})).status == 200
        assert len(it.decodes[0].seen) == 2
        ill = it.router.pairing.decodes[0]
        assert "2 failures in a row" in ill.avoid
        await it.decodes[1].stop()
        await until(lambda: not it.router.pairing.decodes[1].ready)
        it.decodes[0].behaviour = ok
        assert (await it.post({})).status == 200  # the last one left serves, avoided or not
        assert ill.avoid == ""  # and by that it has passed its test
        await it.idle()


async def aborted_at(it: Fleet, side: str) -> dict[str, Any]:
    workers = getattr(it, side)
    await until(lambda: any(not worker.aborts.empty() for worker in workers))
    return next(worker.aborts.get_nowait() for worker in workers if not worker.aborts.empty())
