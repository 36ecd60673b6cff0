"""A live peer that is stopped in the middle of a hand-off by params and goes on later: right text or an explicit error,
never what another prompt has written meanwhile, and every page comes back on both sides."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .fleets import COMPLETIONS, QUICK, Member, Talk, client, completion, free_port, member, texts, until
from .own_process import Process, own_process
from .pairs import HOLD

TRANSPORTS = ["shm", "tcp"]
LIMITS: dict[str, Any] = {"dialect": "params", "drain_limit_s": 0.3, "reserve_tokens": 0, **QUICK}


def asked(number: int, length: int = 40) -> dict[str, Any]:
    """Of a prompt that no other number has."""
    return {**completion(f"{number} ".ljust(length, "x"))[1], "max_tokens": 12, "ignore_eos": True}


async def posted(url: str, body: dict[str, Any]) -> Any:
    async with client(url) as http:
        return await http.post(COMPLETIONS, json=body)


async def held(prefill: str, body: dict[str, Any]) -> dict[str, Any]:
    """The second leg's body, of a prompt that prefill holds."""
    answer = await posted(prefill, {**body, "max_tokens": 1, "kv_transfer_params": HOLD})
    assert answer.status_code == 200, answer.text
    return {**body, "kv_transfer_params": answer.json()["kv_transfer_params"]}


async def right(body: dict[str, Any]) -> list[str]:
    """What an aggregated worker says."""
    async with member("aggregated") as whole:
        return texts(await whole.post(COMPLETIONS, body))


async def serves(prefill: str, decode: str, body: dict[str, Any]) -> None:
    answer = await posted(decode, await held(prefill, body))
    assert answer.status_code == 200, answer.text
    assert texts(answer) == await right(body)


async def both_idle(process: Process, one: Member) -> None:
    await process.until(idle=1, jobs=0, in_engine=0)
    await until(lambda: one.idle)
    assert [shell.audit() for shell in one.shells] == [[]]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prefill_that_freezes_before_it_is_read_fails_its_reader_and_serves_again(transport: str) -> None:
    ports, settings = {"port": free_port(), "control_port": free_port()}, LIMITS | {"transport": (transport,)}
    async with (
        own_process("prefill", ports, lease_s=2.0, **settings) as prefill,
        member("decode", **settings) as decode,
    ):
        await serves(prefill.url, decode.url, asked(1))
        body = await held(prefill.url, asked(2))
        prefill.freeze()
        answer = await posted(decode.url, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "peer_gone"), answer.text
        await until(lambda: decode.idle)
        prefill.thaw()
        await both_idle(prefill, decode)
        await serves(prefill.url, decode.url, asked(3))
        await both_idle(prefill, decode)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prefill_that_freezes_while_decode_runs_takes_nothing_with_it(transport: str) -> None:
    ports, settings = {"port": free_port(), "control_port": free_port()}, LIMITS | {"transport": (transport,)}
    async with own_process("prefill", ports, **settings) as prefill, member("decode", **settings) as decode:
        decode.engine.allow = 4
        talk = Talk(decode.url, await held(prefill.url, asked(1)))
        await until(lambda: decode.engine.allow == 0)
        await prefill.until(idle=1)  # decode has confirmed
        prefill.freeze()
        decode.let_go()
        assert texts(await talk.answer()) == await right(asked(1))
        prefill.thaw()
        await both_idle(prefill, decode)
        await serves(prefill.url, decode.url, asked(2))
        await both_idle(prefill, decode)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_decode_that_sleeps_through_the_lease_reads_nothing_of_who_came_after(
    transport: str, policy: str
) -> None:
    """It waits for pages while prefill's lease ends, and other prompts fill the whole of prefill's pool."""
    ports, settings = {"port": free_port()}, LIMITS | {"transport": (transport,)}
    async with (
        own_process("decode", ports, kv_load_failure_policy=policy, **settings) as decode,
        member("prefill", lease_s=2.0, prefix_cache=False, **settings) as prefill,
    ):
        await decode.allow(0)
        others = [Talk(decode.url, asked(number, 400)) for number in (1, 2)]
        await decode.until(jobs=2)
        body = asked(3, 400)
        talk = Talk(decode.url, await held(prefill.url, body))
        await decode.until(jobs=3, waiting=1)
        decode.freeze()
        await until(lambda: prefill.idle)
        for number in range(4, 9):
            await held(prefill.url, asked(number, 400))
        decode.thaw()
        await decode.allow(None)
        answer = await talk.answer()
        if policy == "fail":
            error = answer.json()["error"]
            assert (answer.status_code, error["retryable"]) in ((409, True), (503, True)), answer.text
        else:
            assert texts(answer) == await right(body)
        for other in others:
            assert (await other.answer()).status_code == 200
        await both_idle(decode, prefill)
        await serves(prefill.url, decode.url, asked(10))
        await both_idle(decode, prefill)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_decode_that_freezes_while_it_answers_goes_on_with_the_right_text(transport: str) -> None:
    ports, settings = {"port": free_port()}, LIMITS | {"transport": (transport,)}
    async with own_process("decode", ports, **settings) as decode, member("prefill", **settings) as prefill:
        await decode.allow(4)
        talk = Talk(decode.url, await held(prefill.url, asked(1)))
        await decode.until(running=1)
        await until(lambda: prefill.idle)
        decode.freeze()
        await until(lambda: prefill.group.figures()["control_sessions"] == 0)
        decode.thaw()
        await decode.allow(None)
        assert texts(await talk.answer()) == await right(asked(1))
        await both_idle(decode, prefill)
        await serves(prefill.url, decode.url, asked(2))
        await both_idle(decode, prefill)


async def test_many_decodes_that_freeze_leave_prefill_nothing_to_hold() -> None:
    """Bound or not: what a frozen reader had is free after silence and grace, or at its lease's end."""
    ports, settings = {"port": free_port()}, LIMITS | {"transport": ("shm",)}
    async with (
        own_process("decode", ports, **settings) as decode,
        member("prefill", lease_s=2.0, **settings) as prefill,
    ):
        await decode.allow(0)
        talks = [Talk(decode.url, await held(prefill.url, asked(number, 200))) for number in range(8)]
        await decode.until(jobs=8)
        decode.freeze()
        await until(lambda: prefill.idle)
        decode.thaw()
        await decode.allow(None)
        answers = await asyncio.gather(*(talk.answer() for talk in talks))
        for number, answer in enumerate(answers):
            if answer.status_code == 200:
                assert texts(answer) == await right(asked(number, 200))
            else:
                assert answer.json()["error"]["retryable"] is True, answer.text
        await both_idle(decode, prefill)
