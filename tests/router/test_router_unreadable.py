"""Bytes that the router reads for the first time when a leg is about to leave, or when a worker has answered: a body
that cannot be read whole is a 400 before a pair is chosen, and no answer leaves anybody waiting."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pdplane.core.errors import Refused
from pdplane.router.body import read_body
from pdplane.router.in_turn import InTurn

from .params_fakes import nothing_held, params_fleet, vllm_fleet
from .router_fakes import CHAT, Fleet, ok

COMPLETIONS = "/v1/completions"
DEEPEST = sys.getrecursionlimit()


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


SKIPPED = {
    "a name that is no UTF-8": b'{"prompt":"a","\xff":1}',
    "a name with half a surrogate": b'{"prompt":"a","\\ud800":1}',
    "a name that is no UTF-8, beside one that is stripped": b'{"prompt":"a","rid":"r","\xff":1}',
    "a name that is no UTF-8, with several samples": b'{"prompt":"a","n":2,"\xff":1}',
}


async def served(it: Fleet) -> None:
    """The next request, and nothing in flight after it."""
    assert (await it.post({"prompt": "a"}, COMPLETIONS)).status == 200
    await it.idle()


@pytest.mark.parametrize("name", SKIPPED)
async def test_what_the_first_look_skips_is_a_400_and_not_a_fault_when_a_leg_leaves(name: str) -> None:
    async with params_fleet(decode=ok) as it:
        answer = await it.post(SKIPPED[name], COMPLETIONS)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json")
        assert not it.prefill.seen
        await served(it)


@pytest.mark.parametrize("seed", [b"1e999", b"9" * 5000, b'"\xff"'])
async def test_a_seed_that_cannot_be_counted_on_from_is_the_workers_to_refuse(seed: bytes) -> None:
    async with params_fleet(decode=ok) as it:
        answer = await it.post(b'{"prompt":"a","n":2,"seed":%b}' % seed, COMPLETIONS)
        assert answer.status == 200
        assert [leg.raw.count(b'"seed":' + seed) for leg in it.prefill.seen] == [1, 1]
        await it.idle()


@pytest.mark.parametrize("n", [b"1e999", b'"\xff"'])
def test_choices_that_cannot_be_read_are_left_to_the_worker(n: bytes) -> None:
    body = read_body(b'{"text":"a","sampling_params":{"n":%b}}' % n)
    assert (body.samples, body.odd_n) == (1, True)


async def test_no_depth_passes_the_first_look_and_fails_when_a_leg_leaves() -> None:
    """Whoever reads later stands deeper in the stack."""
    async with params_fleet(decode=ok) as it:
        for depth in range(DEEPEST - 180, DEEPEST):
            answer = await it.post(b'{"prompt":"a","zz":%b}' % nested(depth), COMPLETIONS)
            assert answer.status in (200, 400), depth
        await served(it)


def test_what_is_too_deep_for_any_stack_is_refused() -> None:
    with pytest.raises(Refused, match="recursion"):
        read_body(b'{"prompt":%b}' % nested(100_000))


@pytest.mark.parametrize("body", [nested(100_000), b'{"kv_transfer_params":' + nested(100_000) + b"}", b"\xff", b""])
async def test_an_answer_of_prefill_that_cannot_be_read_is_its_fault_and_said(body: bytes) -> None:
    async with params_fleet(prefill=lambda asked: asked.reply(200, body), decode=ok, retries=0) as it:
        answer = await it.post({"prompt": "a"}, COMPLETIONS)
        assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_garbled")
        await it.idle()


async def test_an_error_of_a_worker_that_cannot_be_read_is_passed_on_as_its_status() -> None:
    async with params_fleet(prefill=lambda asked: asked.reply(400, nested(100_000)), decode=ok) as it:
        assert (await it.post({"prompt": "a"}, COMPLETIONS)).status == 400
        await it.idle()


async def test_an_abort_call_that_is_too_deep_is_a_400() -> None:
    async with params_fleet(decode=ok) as it:
        assert (await it.post(b'{"rid":' + nested(100_000) + b"}", "/abort_request")).status == 400


async def test_messages_that_cannot_be_read_reach_vllm_as_they_came() -> None:
    async with vllm_fleet(prefill=nothing_held(None), decode=ok, mode="fallback") as it:
        raw = b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}'
        assert (await it.post(raw, CHAT)).status == 200
        assert b"\xff" in it.prefill.seen[0].raw
        await it.idle()


async def test_a_fault_of_ours_while_a_leg_is_made_is_a_500_and_leaves_nothing_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fault(turn: InTurn) -> Any:
        raise ZeroDivisionError

    async with params_fleet(decode=ok) as it:
        with monkeypatch.context() as patched:
            patched.setattr(InTurn, "prefill_leg", fault)
            answer = await it.post({"prompt": "a"}, COMPLETIONS)
        assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")
        await served(it)
