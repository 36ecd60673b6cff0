"""What our workers' own causes lead to: another attempt only where they say that it is safe, on a pair without the one
that they name, and a ban only for what is a worker's own fault."""

from __future__ import annotations

import pytest

from pdplane.core.errors import Cause, unavailable
from pdplane.core.ids import Room
from pdplane.core.rooms.reception import row_gone
from pdplane.wire.errors import error_body

from .router_fakes import Behaviour, fleet, ok, until

HOLD_EXPIRED = Cause("hold_expired", "decode did not grant room 7", 503, retryable=True, side="decode")
NOT_READY = unavailable("prefill_not_ready", "wait for all ranks of the prefill", side="prefill")
PEER_GONE = unavailable("peer_gone", "prefill p is gone", side="prefill")
INCOMPATIBLE = Cause("incompatible", "page_size differs: prefill has 8, decode has 4", 503)


def says(cause: Cause) -> Behaviour:
    return lambda asked: asked.reply(cause.status, error_body(cause))


@pytest.mark.parametrize("cause", [row_gone(Room(7)), NOT_READY, PEER_GONE], ids=lambda cause: cause.code)
async def test_what_decode_says_of_its_prefill_is_tried_again_with_another_prefill(cause: Cause) -> None:
    async with fleet(2, 1, prefill=None, decode=None) as it, it.client() as client:
        client.post(b"{}")
        first = await it.decode.next()
        await until(lambda: any(fake.seen for fake in it.prefills))
        [named] = [fake for fake in it.prefills if fake.seen]
        [other] = [fake for fake in it.prefills if fake is not named]
        says(cause)(first)
        second, leg = await it.decode.next(), await other.next()
        assert second.room == leg.room != first.room
        assert (await named.aborted())["room"] == first.room
        leg.reply()
        second.reply()
        assert (await client.read()).status == 200
        assert it.router.metrics.retries == {cause.code: 1}
        assert [worker.failures for worker in it.router.pairing.workers] == [0, 0, 0]
        assert [worker.url for worker in it.router.pairing.workers if worker.avoid] == [named.url]
        await it.idle()


async def test_a_hold_that_expired_is_tried_again_with_another_decode() -> None:
    async with fleet(1, 2, prefill=None, decode=None) as it, it.client() as client:
        client.post(b"{}")
        first = await it.prefill.next()
        await until(lambda: any(fake.seen for fake in it.decodes))
        [slow] = [fake for fake in it.decodes if fake.seen]
        [other] = [fake for fake in it.decodes if fake is not slow]
        says(HOLD_EXPIRED)(first)
        second, leg = await it.prefill.next(), await other.next()
        assert second.room == leg.room != first.room
        assert (await slow.aborted())["room"] == first.room
        second.reply()
        leg.reply()
        assert (await client.read()).status == 200
        assert it.router.metrics.retries == {"hold_expired": 1}
        assert [worker.failures for worker in it.router.pairing.workers] == [0, 0, 0]
        await it.idle()


@pytest.mark.parametrize("cause", [row_gone(Room(7)), NOT_READY, HOLD_EXPIRED, PEER_GONE], ids=lambda cause: cause.code)
async def test_where_nobody_else_is_left_the_client_gets_the_cause_as_it_was_sent(cause: Cause) -> None:
    async with fleet(prefill=ok, decode=says(cause)) as it:
        answer = await it.post({})
        assert (answer.status, answer.body) == (cause.status, error_body(cause))
        assert it.router.metrics.attempts == 1
        await it.idle()


async def test_a_pair_that_is_incompatible_is_not_tried_again_and_both_are_looked_at() -> None:
    async with fleet(2, 2, prefill=None, decode=says(INCOMPATIBLE), health_interval_s=60.0) as it:
        for fake in it.prefills + it.decodes:
            fake.info = {"instance": "another"}
        answer = await it.post({})
        assert (answer.status, answer.body) == (503, error_body(INCOMPATIBLE))
        assert it.router.metrics.attempts == 1
        await until(lambda: sum(worker.instance == "another" for worker in it.router.pairing.workers) == 2)
        assert not any(worker.avoid or worker.failures for worker in it.router.pairing.workers)
        await it.idle()
