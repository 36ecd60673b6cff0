"""Params sent straight to decode that no prefill of ours has answered so: each is refused with its cause, decode serves
on, and nobody else's hold is harmed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .fleets import COMPLETIONS, completion, free_port, member, texts, until
from .pairs import HOLD, Pair, pair

BODY = completion()[1]
Params = dict[str, Any]
Spoil = Callable[[Params, Params], object]
"""(the right ones, those of another prompt's hold) -> what decode gets in place of the right ones."""


def blocks(params: Params) -> list[int]:
    [found] = params["remote_block_ids"]
    return list(found)


def field(**named: Any) -> Spoil:
    return lambda params, _: {**params, **named}


def moved(change: Callable[[list[int]], list[int]]) -> Spoil:
    return lambda params, _: {**params, "remote_block_ids": [change(blocks(params))]}


def taken(*names: str) -> Spoil:
    return lambda params, other: {**params, **{name: other[name] for name in names}}


INVALID, UNREACHABLE = (400, "invalid_params"), (503, "prefill_unreachable")
REFUSED: dict[str, tuple[Spoil, tuple[int, str]]] = {
    "no object": (lambda *_: "params", INVALID),
    "a flag of a wrong type": (field(do_remote_prefill="yes"), INVALID),
    "both flags": (field(do_remote_decode=True), INVALID),
    "a port of a wrong type": (field(remote_port="80"), INVALID),
    "a truth for a number": (field(pd_grant=True), INVALID),
    "a port out of range": (field(remote_port=70_000, pd_ports=[70_000]), INVALID),
    "fewer ports than ranks": (field(tp_size=2), INVALID),
    "two ports for one rank": (lambda params, _: {**params, "pd_ports": [params["remote_port"], 5]}, INVALID),
    "a shape of nothing": (field(tp_size=0), INVALID),
    "a rank that no group has": (field(pd_dp=3), INVALID),
    "a push": (field(transfer_mode="push"), INVALID),
    "two cache groups": (lambda params, _: {**params, "remote_block_ids": [blocks(params)] * 2}, INVALID),
    "no blocks": (field(remote_block_ids=[[]]), INVALID),
    "a name that prefill does not hold under this number": (field(remote_request_id="zzz"), INVALID),
    "a block less": (moved(lambda of: of[:-1]), INVALID),
    "a block out of range": (moved(lambda of: [*of[:-1], 10**6]), INVALID),
    "a negative block": (moved(lambda of: [*of[:-1], -1]), INVALID),
    "a block twice": (moved(lambda of: [*of[:-1], of[0]]), INVALID),
    "blocks in another order": (moved(lambda of: of[::-1]), INVALID),
    "100,000 blocks": (moved(lambda of: [*range(100_000)]), INVALID),
    "blocks of another size": (
        lambda params, _: {**params, "pd_page_size": 8, "remote_block_ids": [blocks(params)[:2]]},
        INVALID,
    ),
    "a token more": (field(pd_num_tokens=17, remote_num_tokens=17), INVALID),
    "counts that differ": (field(remote_num_tokens=15), INVALID),
    "a digest that is none": (field(pd_prompt_digest="x" * 32), INVALID),
    "another digest": (field(pd_prompt_digest="0" * 32), (400, "prompt_mismatch")),
    "the params of another prompt": (lambda _, other: other, (400, "prompt_mismatch")),
    "another prompt's hold": (taken("pd_grant"), (400, "prompt_mismatch")),
    "another prompt's hold, and a digest of nothing": (
        lambda params, other: {**params, "pd_grant": other["pd_grant"], "pd_prompt_digest": "0" * 32},
        (400, "prompt_mismatch"),
    ),
    "a hold that never was": (field(pd_grant=10**9), (404, "unknown_hold")),
    "a foreign engine": (field(remote_engine_id="x", pd_instance="x"), (409, "wrong_instance")),
    "two engines": (field(remote_engine_id="x"), INVALID),
    "a port where nobody is": (field(remote_port=1, pd_ports=[1]), UNREACHABLE),
    "a host that is none": (field(remote_host="no such host"), UNREACHABLE),
    "ranks that prefill does not have": (field(pd_dp=1, pd_dp_size=2), (503, "prefill_not_ready")),
}


async def serves(it: Pair) -> None:
    told, whole = await it.both(BODY), await it.whole.post(COMPLETIONS, BODY)
    assert told.status_code == 200, told.text
    assert texts(told) == texts(whole)


@pytest.mark.parametrize("name", REFUSED)
async def test_spoilt_params_are_refused_and_the_next_request_is_right(name: str) -> None:
    spoil, expected = REFUSED[name]
    async with pair() as it:
        others = {**BODY, "prompt": "a bridge too far"}
        params, other = await it.params(BODY), await it.params(others)
        answer = await it.read(BODY, spoil(dict(params), dict(other)))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == expected, error
        assert error["message"]
        await serves(it)
        if "params of another" not in name:  # these were brought here, and nobody else has them
            assert texts(await it.read(others, other)) == texts(await it.whole.post(COMPLETIONS, others))
        await it.prefill.post("/abort_request", {"abort_all": True})
        await it.at_rest()


async def test_what_is_refused_for_another_reason_lets_go_of_no_hold_that_it_only_knows_by_number() -> None:
    async with pair() as it:
        others = {**BODY, "prompt": "a bridge too far"}
        params, other = await it.params(BODY), await it.params(others)
        answer = await it.read({**BODY, "temperature": -1}, {**params, "pd_grant": other["pd_grant"]})
        assert answer.status_code == 400
        assert texts(await it.read(others, other)) == texts(await it.whole.post(COMPLETIONS, others))
        await it.prefill.post("/abort_request", {"abort_all": True})
        await it.at_rest()


async def test_each_missing_field_is_named() -> None:
    async with pair() as it:
        params = await it.params(BODY)
        optional = {"dcp_size", "pp_size", "remote_blocks_expiry_time", "transfer_mode", "pd_dp_size"}
        optional |= {"remote_prefill_cached_tokens", "do_remote_prefill"}
        for name in params.keys() - optional:
            answer = await it.read(BODY, {key: value for key, value in params.items() if key != name})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == INVALID, (name, error)
            assert name in error["message"]
        assert texts(await it.read(BODY, params)) == texts(await it.whole.post(COMPLETIONS, BODY))
        await it.at_rest()


@pytest.mark.parametrize("streamed", [False, True])
async def test_params_of_a_prefills_last_life_are_refused(streamed: bool) -> None:
    port = free_port()
    async with pair(prefill={"control_port": port}) as it:
        params = await it.params(BODY)
        await it.prefill.exit()
        await until(lambda: it.decode.idle)
        async with member("prefill", dialect="params", control_port=port) as again:
            answer = await it.read({**BODY, "stream": streamed}, params)
            assert answer.status_code == 409, answer.text
            assert answer.json()["error"]["code"] == "wrong_instance"
            leg = {**BODY, "max_tokens": 1, "kv_transfer_params": HOLD}
            fresh = (await again.post(COMPLETIONS, leg)).json()["kv_transfer_params"]
            assert texts(await it.read(BODY, fresh)) == texts(await it.whole.post(COMPLETIONS, BODY))
            await until(lambda: again.idle and it.decode.idle)


async def test_another_prefills_holds_have_the_same_numbers_and_are_not_taken_for_these() -> None:
    async with pair() as it, member("prefill", dialect="params") as other:
        leg = {**BODY, "max_tokens": 1, "kv_transfer_params": HOLD}
        theirs = (await other.post(COMPLETIONS, leg)).json()["kv_transfer_params"]
        ours = await it.params(BODY)
        assert theirs["pd_grant"] == ours["pd_grant"]
        crossed = {**ours, "remote_port": theirs["remote_port"], "pd_ports": theirs["pd_ports"]}
        answer = await it.read(BODY, crossed)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "wrong_instance")
        for params in (ours, theirs):
            assert texts(await it.read(BODY, params)) == texts(await it.whole.post(COMPLETIONS, BODY))
        await until(lambda: other.idle)
        await it.at_rest()
