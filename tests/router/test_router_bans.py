"""Bans: what begins one, what counts, how long it lasts, and what lifts it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdplane.core.errors import Cause
from pdplane.router.ban import Ban
from pdplane.router.config import RouterConfig

from .router_fakes import Fleet, fleet, ok, refuse, until

RULES = RouterConfig(ban_after=3, ban_s=5.0, ban_max_s=30.0)


def fail(ban: Ban, now: float, times: int = 1) -> None:
    for _ in range(times):
        ban.failed(now, "it broke", now, RULES)


def test_failures_short_of_the_limit_are_no_ban() -> None:
    ban = Ban()
    fail(ban, 10.0, 2)
    assert ban.avoid == ""
    ban.succeeded(11.0)
    fail(ban, 12.0, 2)
    assert ban.avoid == ""
    fail(ban, 13.0)
    assert ban.avoid == "3 failures in a row, the last: it broke"


def test_what_was_sent_before_a_ban_says_nothing_of_it() -> None:
    ban = Ban()
    fail(ban, 10.0, 3)
    for _ in range(20):  # they died together with those that began it
        ban.failed(9.0, "it broke", 10.1, RULES)
    ban.succeeded(9.0)  # an answer that was long under way
    assert ban.until == 15.0
    assert ban.avoid


def test_a_ban_expires_and_one_request_at_a_time_tests_the_worker() -> None:
    ban = Ban()
    fail(ban, 10.0, 3)
    ban.expire(14.9)
    assert ban.avoid
    ban.expire(15.0)
    assert ban.avoid == ""
    ban.testing = True
    assert ban.avoid
    ban.succeeded(15.1)
    assert (ban.avoid, ban.failures, ban.describe(16.0)) == ("", 0, None)


def test_bans_in_a_row_double_up_to_the_limit_and_an_answer_makes_them_short_again() -> None:
    ban, now, lengths = Ban(), 10.0, []
    fail(ban, now, 2)
    for _ in range(5):
        fail(ban, now)
        lengths.append(ban.until - now)
        now = ban.until
        ban.expire(now)
    assert lengths == [5.0, 10.0, 20.0, 30.0, 30.0]
    ban.succeeded(now)
    fail(ban, now, 3)
    assert ban.until - now == 5.0


def test_a_ban_tells_its_time_left() -> None:
    ban = Ban()
    fail(ban, 10.0, 3)
    told = ban.describe(12.5)
    assert told == {
        "why": "3 failures in a row, the last: it broke",
        "state": "banned",
        "left_s": 2.5,
        "length_s": 5.0,
        "bans_in_a_row": 1,
    }
    ban.expire(15.0)
    assert (ban.describe(16.0) or {})["left_s"] == 0.0


def test_a_limit_below_the_first_length_does_not_shorten_it() -> None:
    ban = Ban()
    for _ in range(3):
        ban.failed(10.0, "x", 10.0, RouterConfig(ban_after=3, ban_s=60.0, ban_max_s=1.0))
    assert ban.until == 70.0


# --- before workers -------------------------------------------------------------------------------------------------


async def banned(it: Fleet) -> Any:
    """The first of two decodes fails until it is banned."""
    it.decodes[0].behaviour = refuse(500)
    ill = it.router.pairing.decodes[0]
    while not ill.ban.why:
        assert (await it.post({})).status == 200
    it.decodes[0].seen.clear()
    return ill


async def test_workers_show_a_ban_with_its_time_left_and_others_serve_meanwhile() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok, ban_after=2, ban_s=60.0) as it:
        await banned(it)
        for _ in range(4):
            assert (await it.post({})).status == 200
        assert not it.decodes[0].seen
        shown = {entry["url"]: entry for entry in (await it.get("/workers")).json["workers"]}
        ban = shown[it.decodes[0].url]["ban"]
        assert 0 < ban["left_s"] <= ban["length_s"] == 60.0
        assert "worker says 500" in ban["why"]
        assert shown[it.decodes[1].url]["ban"] is None
        await it.idle()


async def test_after_its_time_one_request_tests_the_worker_while_others_go_elsewhere() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok, ban_after=2, ban_s=60.0) as it:
        ill = await banned(it)
        it.decodes[0].behaviour = None
        ill.ban.until = 0.0
        it.router.sweep()
        assert ill.avoid == ""
        asking = []
        while ill.load == 0:
            asking.append(asyncio.ensure_future(it.post({})))
            await asyncio.wait(asking, timeout=0.05)
        test = await it.decodes[0].next()
        assert ill.avoid
        for _ in range(4):
            assert (await it.post({})).status == 200
        assert it.decodes[0].asked.empty()
        test.reply()
        assert {(await one).status for one in asking} == {200}
        await it.idle()
        assert (ill.ban.why, ill.avoid) == ("", "")


async def test_a_test_that_fails_begins_a_ban_twice_as_long() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok, ban_after=2, ban_s=60.0) as it:
        ill = await banned(it)
        ill.ban.until = 0.0
        it.router.sweep()
        while not it.decodes[0].seen:
            assert (await it.post({})).status == 200
        assert (ill.ban.describe(ill.ban.since) or {})["left_s"] == 120.0
        await it.idle()


async def test_a_test_that_a_client_ends_leaves_the_next_one_to_decide() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok, ban_after=2, ban_s=60.0) as it:
        ill = await banned(it)
        it.decodes[0].behaviour = None
        ill.ban.until = 0.0
        it.router.sweep()
        async with it.client() as client:
            while ill.load == 0:
                client.post(b"{}")
                await asyncio.sleep(0.01)
                if ill.load == 0:
                    await client.read()
            await it.decodes[0].next()
            assert ill.avoid
            client.leave()
        await it.idle()
        assert ill.avoid == ""
        assert ill.ban.why


async def test_another_process_on_the_same_address_starts_without_a_ban() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok, ban_after=2, ban_s=60.0) as it:
        ill = await banned(it)
        it.decodes[0].info = {"instance": "new"}
        await until(lambda: ill.instance == "new")
        assert (ill.ban.why, ill.avoid) == ("", "")


@pytest.mark.parametrize("status", [429, 503])
async def test_busyness_is_never_a_ban(status: int) -> None:
    async with fleet(1, 2, prefill=ok, decode=ok, ban_after=1) as it:
        it.decodes[0].behaviour = refuse(status)
        for _ in range(10):
            assert (await it.post({})).status == 200
        assert it.decodes[0].seen
        full = it.router.pairing.decodes[0]
        assert (full.failures, full.ban.why, full.avoid) == (0, "", "busy")
        await it.idle()


async def test_a_ban_and_busyness_have_clocks_of_their_own() -> None:
    async with fleet(1, 2, prefill=ok, decode=ok, ban_after=1, ban_s=60.0) as it:
        one = it.router.pairing.decodes[0]
        one.busy(1.0)
        it.router.blame(one, Cause("x", "it broke", 500), 2.0)
        one.pass_time(3.0)
        assert one.avoid.startswith("1 failures in a row")
        one.ban.lift()
        one.pass_time(4.0)
        assert one.avoid == ""
