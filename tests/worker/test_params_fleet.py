"""Fleets of the params dialect behind a router: the answers of an aggregated worker, and nothing left behind whoever
ends a request, and in whatever phase.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from pdplane.core.pages import Page

from .fleets import COMPLETIONS, GENERATE, QUICK, Fleet, Talk, chat, completion, essence, fleet, serves, texts, until
from .test_fleet_bad_input import BAD, send, without_side

LONG = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
ASKED = {
    "chat": chat(),
    "chat with logprobs": chat(logprobs=True, top_logprobs=3),
    "chat with token ids": chat(return_token_ids=True),
    "chat of three": chat(temperature=0.9, seed=7, n=3),
    "max_completion_tokens 1": chat(max_completion_tokens=1),
    "max_tokens 1 and min_tokens 1": completion(max_tokens=1, min_tokens=1),
    "completion": completion(),
    "completion with token ids": completion(return_token_ids=True),
    "long completion": completion("ä word " * 40, max_tokens=60),
    "prompts of text": completion([f"{i} " * (i + 1) for i in range(9)]),
    "prompts of text, two each": completion(["a", "bc"], n=2, temperature=1, seed=3),
    "lists of token ids": completion([[104, 105], [106]]),
    "a page": completion("abcd"),
    "a page and one": completion("abcde"),
}


COUNTED_BY_THE_ROUTER = (
    *("n 0", "n -1", "n of a wrong type", "a token id over the vocabulary in a batch"),
    "one prompt of many over the context",
)
"""It makes a pair of legs for each sample, and so words its refusals by sample."""


def params(prefills: int = 1, decodes: int = 1, **settings: Any) -> contextlib.AbstractAsyncContextManager[Fleet]:
    both = {"dialect": "params", **QUICK, **settings.pop("both", {})}
    return fleet(prefills, decodes, whole=True, both=both, **settings)


# --- the answers of one worker ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("cached", [True, False])
async def test_every_request_has_the_aggregated_workers_answer(transport: str, cached: bool) -> None:
    async with params(both={"transport": (transport,), "prefix_cache": cached}) as it:
        for name, (path, body) in ASKED.items():
            for _ in range(2):
                told, whole = await it.both(path, body)
                assert told.status_code == 200, (name, told.text)
                assert essence(told) == essence(whole), name
        await it.at_rest()


async def test_every_stream_has_the_aggregated_workers_text() -> None:
    async with params() as it:
        for name, (path, body) in ASKED.items():
            told, whole = await it.both(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
            assert texts(told) == texts(whole), name
        await it.at_rest()


async def test_sixteen_at_once_over_two_pairs_of_unequal_shapes_each_get_their_own_text() -> None:
    async with params(2, 2, prefill={"tp": 2}, decode={"dp": 2}) as it:
        asked = [completion(f"prompt number {i} " * (1 + i % 5), max_tokens=12 + i, n=1 + i % 3) for i in range(16)]
        told = await asyncio.gather(*(it.post(*one) for one in asked))
        wholes = await asyncio.gather(*(it.whole.post(*one) for one in asked))
        assert [essence(one) for one in told] == [essence(whole) for whole in wholes]
        await it.at_rest()


async def test_bad_input_has_the_aggregated_workers_code_and_body() -> None:
    async with params() as it:
        for name, (path, body) in BAD.items():
            if path == GENERATE:
                continue
            pair, whole = await send(it.url, path, body), await send(it.whole.url, path, body)
            assert pair[0] == whole[0], (name, pair, whole)
            if name not in COUNTED_BY_THE_ROUTER:
                assert without_side(pair[1]) == without_side(whole[1]), name
        await it.at_rest()
        assert (it.decode.engine.added, it.whole.engine.added) == ([], [])
        await serves(it)


async def test_a_clients_own_params_are_stripped() -> None:
    async with params() as it:
        path, body = completion()
        forged = {"do_remote_prefill": True, "remote_host": "10.1.2.3", "remote_block_ids": [[1, 2]]}
        told, whole = await it.both(path, {**body, "kv_transfer_params": forged})
        assert essence(told) == essence(whole)
        await it.at_rest()


# --- a client that leaves -----------------------------------------------------------------------------------------


async def queued(it: Fleet) -> list[Talk]:
    """Prefill takes one prompt at a time, and its engine stands still with another."""
    it.prefill.limit(max_running=1)
    it.prefill.engine.allow = 0
    talks = [Talk(it.url, {**LONG, "prompt": letter * 40}) for letter in "pq"]
    await until(lambda: it.prefill.group.figures()["waiting"] == 1 and it.prefill.engine.holds())
    return talks


async def computing(it: Fleet) -> list[Talk]:
    it.prefill.engine.allow = 1
    talk = Talk(it.url, {**LONG, "prompt": "p" * 40})
    await until(lambda: it.prefill.engine.holds(computed=8))
    return [talk]


async def waiting_at_decode(it: Fleet) -> list[Talk]:
    """Decode has no page for it, and prefill holds on."""
    it.decode.engine.allow = 0
    local = [Talk(it.decode.url, {**LONG, "prompt": letter * 400, "max_tokens": 4}) for letter in "ab"]
    await until(lambda: len(it.decode.group.jobs) == 2)
    talk = Talk(it.url, {**LONG, "prompt": "p" * 400, "max_tokens": 4})
    await until(lambda: it.decode.group.figures()["waiting"] == 1)
    assert it.prefill.group.holds
    return [talk, *local]


async def streaming(it: Fleet) -> list[Talk]:
    it.decode.engine.allow = 3
    talk = Talk(it.url, {**LONG, "prompt": "p" * 40, "stream": True})
    await until(lambda: it.decode.engine.holds(computed=41))
    return [talk]


PHASES: dict[str, Callable[[Fleet], Awaitable[list[Talk]]]] = {
    "queued at prefill": queued,
    "computing": computing,
    "waiting at decode": waiting_at_decode,
    "streaming": streaming,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_client_that_leaves_frees_every_page_on_both_sides(phase: str, transport: str) -> None:
    async with params(both={"transport": (transport,)}, decode={"reserve_tokens": 0}) as it:
        for talk in await PHASES[phase](it):
            await talk.drop()
        for one in it.members:
            one.let_go()
        await it.at_rest()
        await serves(it)


@pytest.mark.parametrize("phase", ["computing", "streaming"])
async def test_an_abort_call_at_the_router_ends_it_on_both_sides(phase: str) -> None:
    async with params() as it:
        [talk] = await PHASES[phase](it)
        assert (await it.post("/abort_request", {"abort_all": True})).json()["aborted"] == 1
        await talk.answer()
        for one in it.members:
            one.let_go()
        await it.at_rest()
        await serves(it)


# --- a worker that goes -----------------------------------------------------------------------------------------------


def error(answer: httpx.Response) -> tuple[int, str, bool]:
    told = answer.json()["error"]
    return answer.status_code, told["code"], told["retryable"]


async def test_a_decode_that_goes_while_it_runs_leaves_prefill_nothing_to_hold() -> None:
    async with params() as it:
        it.decode.engine.allow = 3
        talk = Talk(it.url, {**LONG, "prompt": "p" * 40})
        await until(lambda: it.decode.engine.holds(computed=41))
        await it.decode.leave()
        status, code, retryable = error(await talk.answer())
        assert (status in (502, 503), bool(code), retryable) == (True, True, True)
        await until(lambda: it.prefill.idle)


async def test_a_decode_that_cannot_be_reached_is_told_and_its_hold_let_go() -> None:
    async with params(router={"health_interval_s": 60.0}) as it:
        await it.decode.exit()
        status, _, retryable = error(await it.post(*completion()))
        assert status in (502, 503)
        assert retryable
        await until(lambda: it.prefill.idle)


async def test_a_prefill_that_goes_while_decode_runs_takes_nothing_with_it() -> None:
    async with params() as it:
        it.decode.engine.allow = 3
        body = {**LONG, "prompt": "p" * 40}
        talk = Talk(it.url, body)
        await until(lambda: it.decode.engine.holds(computed=41))
        await until(lambda: it.prefill.idle)  # decode has confirmed
        await it.prefill.exit()
        it.decode.let_go()
        assert texts(await talk.answer()) == texts(await it.whole.post(COMPLETIONS, body))
        await until(lambda: it.decode.idle)


async def test_a_prefill_that_goes_while_it_computes_is_told() -> None:
    async with params() as it:
        it.prefill.engine.allow = 1
        talk = Talk(it.url, {**LONG, "prompt": "p" * 40})
        await until(lambda: it.prefill.engine.holds(computed=8))
        await it.prefill.leave()
        status, _, retryable = error(await talk.answer())
        assert (status in (502, 503), retryable) == (True, True)
        await until(lambda: it.decode.idle)
        assert it.decode.pages(Page.GRANTED) == 0
