"""Whoever ends a request, and in whatever phase: only that request ends, and every page comes back on both sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdplane.core.pages import Page

from .fleets import CHAT, COMPLETIONS, Fleet, Talk, completion, events, fleet, pairing, texts, until

LONG = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


# --- a client that leaves -----------------------------------------------------------------------------------------


async def queued_at_prefill(it: Fleet) -> None:
    """Prefill takes one prompt at a time, and its engine stands still with another."""
    await until(lambda: it.prefill.group.figures()["waiting"] == 1 and it.prefill.engine.holds())


async def computing(it: Fleet) -> None:
    await until(lambda: it.prefill.engine.holds(computed=8) and it.decode.pages(Page.GRANTED) > 0)


async def decoding(it: Fleet) -> None:
    await until(lambda: it.decode.engine.holds(computed=40))


PHASES: dict[str, tuple[Callable[[Fleet], Any], dict[str, Any], Callable[[Fleet], None]]] = {
    "computing": (computing, {}, lambda it: setattr(it.prefill.engine, "allow", 1)),
    "decoding": (decoding, {}, lambda it: setattr(it.decode.engine, "allow", 3)),
    "queued at prefill": (
        queued_at_prefill,
        {"prefill": {"max_running": 1}},
        lambda it: setattr(it.prefill.engine, "allow", 0),
    ),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_frees_every_page_on_both_sides(phase: str, streamed: bool) -> None:
    reached, settings, hold = PHASES[phase]
    async with fleet(**settings) as it:
        hold(it)
        clients = [Talk(it.url, {**LONG, "prompt": "p" * 40, "stream": streamed})]
        if phase == "queued at prefill":
            await until(lambda: it.prefill.engine.holds())
            clients.append(Talk(it.url, {**LONG, "prompt": "q" * 40, "stream": streamed}))
        await reached(it)
        for one in clients:
            await one.drop()
        await it.at_rest()
        it.prefill.engine.allow = it.decode.engine.allow = None
        answer = await it.post(*completion())
        assert answer.status_code == 200


async def test_a_client_that_leaves_while_decode_has_no_page_takes_nothing_with_it() -> None:
    async with fleet(decode={"max_running": 1}) as it:
        it.decode.engine.allow = 0
        size = it.decode.shell.parts.pages * it.decode.shell.model.page_size
        prompts = ["p" * 400, "q" * 400, "r" * 400]
        assert size < 3 * 400
        clients = [Talk(it.url, {**LONG, "max_tokens": 4, "prompt": prompt}) for prompt in prompts]
        await until(lambda: it.decode.group.figures()["waiting"] == 1)
        waiting = next(
            job.generation.prompt[0] for job in it.decode.shell.jobs.values() if not job_pages(it, job.generation.rid)
        )
        left = "pqr".index(chr(waiting))
        await clients.pop(left).drop()
        await until(lambda: it.decode.group.figures()["waiting"] == 0)
        it.decode.engine.allow = None
        for one in clients:
            assert (await one.answer()).status_code == 200
        await it.at_rest()


def job_pages(it: Fleet, rid: Any) -> int:
    node = it.decode.shell.node
    return sum(node.ledger.holders().get(node.owner_of(rid), {}).values())  # type: ignore[union-attr]


async def test_one_leg_that_is_closed_ends_the_other_without_a_router() -> None:
    for side in ("prefill", "decode"):
        async with fleet() as it:
            it.prefill.engine.allow = 1
            body = {**LONG, "prompt": "p" * 40, **pairing(it, 77)}
            prefill, decode = Talk(it.prefill.url, body), Talk(it.decode.url, body)
            await computing(it)
            dropped, other = (prefill, decode) if side == "prefill" else (decode, prefill)
            await dropped.drop()
            answer = await other.answer()
            assert answer.status_code == 503, (side, answer.text)
            await it.at_rest()


# --- abort calls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("a", "ab"), ("ab", "a")])
async def test_an_abort_call_ends_exactly_the_request_that_it_names(order: tuple[str, str]) -> None:
    async with fleet(whole=True) as it:
        it.decode.engine.allow = 3
        bodies = {name: {**LONG, "prompt": f"prompt {name}", "rid": name, "stream": True} for name in order}
        talks = {name: Talk(it.url, body) for name, body in bodies.items()}
        await until(lambda: len(it.decode.engine.added) == 2 and it.decode.engine.allow == 0)
        for rid, status, count in (("", 400, None), ("b", 200, 0), ("abc", 200, 0), ("a", 200, 1)):
            answer = await it.post("/abort_request", {"rid": rid})
            assert (answer.status_code, answer.json().get("aborted")) == (status, count), rid
        ended = await talks["a"].answer()
        assert "aborted" in ended.text
        it.decode.engine.allow = None
        left = await talks["ab"].answer()
        alone = await it.whole.post(COMPLETIONS, {**bodies["ab"], "rid": None})
        assert texts(left) == texts(alone)
        await it.at_rest()


async def test_an_abort_call_at_the_engine_takes_one_sample_and_says_abort() -> None:
    async with fleet(whole=True) as it:
        it.decode.engine.allow = 3
        path, body = CHAT, {**LONG, "messages": [{"role": "user", "content": "x"}], "seed": 1, "temperature": 1, "n": 3}
        talk = Talk(it.url, body, path)
        await until(lambda: len(it.decode.engine.added) == 3 and it.decode.engine.allow == 0)
        second = sorted(it.decode.shell.jobs)[1]
        prefix = second.removesuffix(".0")
        for rid, count in ((prefix, 0), (second + "0", 0), (second, 1)):
            answer = await it.decode.post("/abort_request", {"rid": rid})
            assert answer.json() == {"aborted": count}, rid
        it.decode.engine.allow = None
        pair = (await talk.answer()).json()["choices"]
        whole = (await it.whole.post(path, body)).json()["choices"]
        assert [choice["finish_reason"] for choice in pair] == ["length", "abort", "length"]
        assert [pair[i]["message"] for i in (0, 2)] == [whole[i]["message"] for i in (0, 2)]
        assert whole[1]["message"]["content"].startswith(pair[1]["message"]["content"])
        await it.at_rest()


async def test_an_abort_call_with_another_room_takes_nothing() -> None:
    async with fleet() as it:
        it.decode.engine.allow = 1
        body = {**LONG, "prompt": "p", **pairing(it, 9, rid="mine")}
        legs = [Talk(one.url, body) for one in (it.prefill, it.decode)]
        await until(lambda: it.decode.engine.holds())
        assert (await it.decode.post("/abort_request", {"rid": "mine", "room": 10})).json() == {"aborted": 0}
        assert (await it.decode.post("/abort_request", {"rid": "mine", "room": 9})).json() == {"aborted": 1}
        for leg in legs:
            assert (await leg.answer()).status_code == 200
        await it.at_rest()


async def test_abort_all_ends_what_runs_on_that_worker() -> None:
    async with fleet() as it:
        it.decode.engine.allow = 3
        talks = [Talk(it.url, {**LONG, "prompt": f"p{i}"}) for i in range(4)]
        await until(lambda: len(it.decode.engine.added) == 4 and it.decode.engine.allow == 0)
        assert (await it.decode.post("/abort_request", {"abort_all": True})).json() == {"aborted": 4}
        for talk in talks:
            assert (await talk.answer()).json()["choices"][0]["finish_reason"] == "abort"
        await it.at_rest()


# --- deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stuck", ["prefill", "decode"])
async def test_a_deadline_that_passes_is_a_504_and_frees_every_page(stuck: str) -> None:
    async with fleet() as it:
        getattr(it, stuck).engine.allow = 1
        answer = await it.post(COMPLETIONS, {**LONG, "prompt": "p" * 40}, headers={"x-request-timeout": "0.3"})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline"
        await it.at_rest()


async def test_a_stream_whose_deadline_passes_says_so_in_its_last_event() -> None:
    async with fleet() as it:
        it.decode.engine.allow = 3
        answer = await it.post(
            COMPLETIONS, {**LONG, "prompt": "p", "stream": True}, headers={"x-request-timeout": "0.5"}
        )
        last = json.loads([line for line in answer.text.split("\n\n") if line][-1].removeprefix("data: "))
        assert last["error"]["code"] == "deadline"
        await it.at_rest()


async def test_many_clients_that_leave_at_once_leave_nothing_behind() -> None:
    async with fleet(2, 2) as it:
        talks = [
            Talk(it.url, {**LONG, "prompt": f"prompt {i} " * (1 + i % 9), "stream": bool(i % 2)}) for i in range(40)
        ]
        for i, talk in enumerate(talks):
            await until(lambda i=i: sum(len(one.engine.added) for one in it.members) >= i)
            if i % 3:
                await talk.drop()
        for i, talk in enumerate(talks):
            if not i % 3:
                assert (await talk.answer()).status_code == 200
        await it.at_rest()


async def test_dropped_after_every_byte_of_the_answer_a_stream_still_counts_as_whole() -> None:
    async with fleet() as it:
        answer = await it.post(COMPLETIONS, {**LONG, "max_tokens": 3, "prompt": "p", "stream": True})
        record = await it.get(f"/requests/{events(answer)[0]['id']}")
        assert record["verdict"] == "ok"
        await it.at_rest()
