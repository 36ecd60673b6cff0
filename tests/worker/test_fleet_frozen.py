"""A live peer that is stopped in the middle of a hand-off and goes on later: right text or an explicit error, never
half a prompt, and every page comes back on both sides."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .fleets import COMPLETIONS, HOST, QUICK, Member, Talk, client, free_port, member, texts, until
from .own_process import Process, own_process

TRANSPORTS = ["shm", "shm_push", "tcp"]
LIMITS = {"drain_limit_s": 0.3, **QUICK}
CHUNKS = "a prompt of several chunks and pages " * 3


def leg(port: int, room: int) -> dict[str, Any]:
    """Of a prompt that no other room has: nothing of it is cached."""
    asked = {"prompt": f"{room}: {CHUNKS}", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    return {**asked, "bootstrap_host": HOST, "bootstrap_port": port, "bootstrap_room": room}


async def right(body: dict[str, Any]) -> list[str]:
    """What an aggregated worker says."""
    async with member("aggregated") as whole:
        return texts(await whole.post(COMPLETIONS, body))


async def posted(url: str, body: dict[str, Any]) -> Any:
    async with client(url) as http:
        return await http.post(COMPLETIONS, json=body)


async def serves(prefill: str, decode: str, body: dict[str, Any]) -> None:
    first, second = await asyncio.gather(posted(prefill, body), posted(decode, body))
    assert (first.status_code, second.status_code) == (200, 200), (first.text, second.text)
    assert texts(second) == await right(body)


def blames(answer: Any, frozen: str) -> None:
    """What is told by the one that went on all the time."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["side"]) == (503, "peer_gone", frozen), answer.text


def failed(answer: Any) -> None:
    """What is told by the one that was frozen: what it heard first, from its peer, its own clock or the transport."""
    assert answer.status_code in (502, 503), answer.text
    assert answer.json()["error"]["retryable"], answer.text


async def both_idle(process: Process, one: Member) -> None:
    await process.until(idle=1, jobs=0, in_engine=0)
    await until(lambda: one.idle)
    assert [shell.audit() for shell in one.shells] == [[]]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prefill_that_freezes_while_pages_move_fails_its_rooms_and_serves_again(transport: str) -> None:
    ports = {"port": free_port(), "bootstrap_port": free_port()}
    settings = {"transport": (transport,), **LIMITS}
    async with own_process("prefill", ports, **settings) as prefill, member("decode", **settings) as decode:
        at = ports["bootstrap_port"]
        await serves(prefill.url, decode.url, leg(at, 1))
        await prefill.allow(3)
        first, second = (Talk(url, leg(at, 2)) for url in (prefill.url, decode.url))
        await prefill.spent()
        prefill.freeze()
        blames(await second.answer(), "prefill")
        prefill.thaw()
        failed(await first.answer())
        await prefill.allow(None)
        await both_idle(prefill, decode)
        await serves(prefill.url, decode.url, leg(at, 3))
        await both_idle(prefill, decode)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_decode_that_freezes_while_pages_move_fails_its_rooms_and_serves_again(transport: str) -> None:
    ports = {"port": free_port()}
    settings = {"transport": (transport,), **LIMITS}
    async with own_process("decode", ports, **settings) as decode, member("prefill", **settings) as prefill:
        at = prefill.ports["bootstrap"]
        await serves(prefill.url, decode.url, leg(at, 1))
        prefill.engine.allow = 3
        first, second = (Talk(url, leg(at, 2)) for url in (prefill.url, decode.url))
        await until(lambda: prefill.engine.allow == 0)
        decode.freeze()
        blames(await first.answer(), "decode")
        decode.thaw()
        failed(await second.answer())
        prefill.let_go()
        await both_idle(decode, prefill)
        await serves(prefill.url, decode.url, leg(at, 3))
        await both_idle(decode, prefill)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_decode_that_freezes_while_it_answers_goes_on_with_the_right_text(transport: str) -> None:
    ports = {"port": free_port()}
    settings = {"transport": (transport,), **LIMITS}
    async with own_process("decode", ports, **settings) as decode, member("prefill", **settings) as prefill:
        at = prefill.ports["bootstrap"]
        await decode.allow(4)
        first, second = (Talk(url, leg(at, 1)) for url in (prefill.url, decode.url))
        assert (await first.answer()).status_code == 200
        await decode.until(running=1)
        decode.freeze()
        await until(lambda: prefill.group.figures()["control_sessions"] == 0)
        decode.thaw()
        await decode.allow(None)
        assert texts(await second.answer()) == await right(leg(at, 1))
        await both_idle(decode, prefill)
        await serves(prefill.url, decode.url, leg(at, 2))
        await both_idle(decode, prefill)
