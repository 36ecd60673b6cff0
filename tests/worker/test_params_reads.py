"""Decode's reads in the params dialect: nothing of an answer leaves before it is confirmed, what cannot be read fails
or is computed here, and an end in any phase leaves both pools as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdplane.core.effects import Effect, MovePages
from pdplane.core.errors import Cause
from pdplane.core.events import Event, MoveDone
from pdplane.core.frames import Confirmed, Frame
from pdplane.core.ids import ConnId
from pdplane.core.layout import LayoutGroup
from pdplane.core.pages import Page
from pdplane.worker.params_decode import ParamsDecodeShell
from pdplane.worker.params_prefill import ParamsPrefillShell

from .fake_engine import spec
from .fleets import COMPLETIONS, Member, Talk, chat, completion, essence, events, texts, until
from .pairs import Pair, pair

BODY = {**completion()[1], "ignore_eos": True}
EXPIRED = Cause("expired", "the test says so", 409, retryable=True, side="prefill")


def prefill(it: Pair) -> ParamsPrefillShell:
    assert isinstance(it.prefill.shell, ParamsPrefillShell)
    return it.prefill.shell


def decode(it: Pair) -> ParamsDecodeShell:
    assert isinstance(it.decode.shell, ParamsDecodeShell)
    return it.decode.shell


class Confirmations:
    """Prefill's answers to CONFIRM are kept until `go`; `change` may make others of them."""

    def __init__(self, it: Pair, change: Callable[[Confirmed], Confirmed] = lambda frame: frame) -> None:
        self._control, self._change = prefill(it).control, change
        self._send, self.kept = self._control.send, list[tuple[ConnId, Confirmed]]()
        self._control.send = self._keep  # type: ignore[method-assign]

    def _keep(self, conn: ConnId, frame: Frame) -> None:
        if isinstance(frame, Confirmed):
            self.kept.append((conn, frame))
        else:
            self._send(conn, frame)

    def go(self) -> None:
        self._control.send = self._send  # type: ignore[method-assign]
        for conn, frame in self.kept:
            self._send(conn, self._change(frame))


def refusing(it: Pair) -> Confirmations:
    def refused(frame: Confirmed) -> Confirmed:
        named = {"hold": frame.hold, "grant": frame.grant, "src": frame.src, "dst": frame.dst, "rank": frame.rank}
        return Confirmed(**named, refusal=EXPIRED)  # type: ignore[arg-type]

    return Confirmations(it, refused)


class Moves:
    """Prefill's moves are kept back, or fail."""

    def __init__(self, it: Pair, error: str = "") -> None:
        self._movers, self._error = prefill(it).movers, error
        self._do, self.kept = self._movers.do, list[Effect]()
        self._movers.do = self._keep  # type: ignore[method-assign]

    def _keep(self, effect: Effect) -> list[Event] | None:
        if not isinstance(effect, MovePages):
            return self._do(effect)
        self.kept.append(effect)
        return [MoveDone(effect.move, self._error)] if self._error else []

    def go(self) -> None:
        self._movers.do = self._do  # type: ignore[method-assign]
        for effect in self.kept:
            self._do(effect)


def states(one: Member, rid: str) -> list[str]:
    record = one.group.record(rid)
    assert record is not None
    return [entry["state"] for entry in record["legs"][0]["entries"]]


# --- what is shown of it --------------------------------------------------------------------------------------------


async def test_a_read_is_seen_in_vllms_states_and_counts_as_prefill_counted() -> None:
    async with pair(decode={"prefix_cache": False}) as it:
        await it.both(BODY)
        answer = await it.both({**BODY, "rid": "r"})
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 12
        seen = states(it.decode, "r")
        assert [state for state in seen if state.startswith("WAITING")] == ["WAITING", "WAITING_FOR_REMOTE_KVS"]
        [leg] = (await it.decode.get("/requests/r")).json()["legs"]
        [grant] = leg["grants"]
        assert grant["pages"] == 4
        assert [link["transport"] for link in grant["links"]] == ["shm"]
        [read] = (await it.prefill.get("/requests/r")).json()["legs"]
        assert read["grants"][0]["instance"] == it.decode.shell.instance
        assert read["grants"][0]["hold"] == read["hold"]
        await it.at_rest()


async def test_pages_that_decode_has_are_not_read_again() -> None:
    async with pair() as it:
        await it.both(BODY)
        await it.both({**BODY, "rid": "r"})
        [leg] = (await it.decode.get("/requests/r")).json()["legs"]
        assert [grant["pages"] for grant in leg["grants"]] == [1]
        await it.at_rest()


SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp": 2}, {}),
    ({}, {"tp": 4}),
    ({"tp": 4}, {"tp": 2}),
    ({"dp": 2}, {"dp": 3}),
    ({"dp": 2, "tp": 2}, {"dp": 2}),
]


@pytest.mark.parametrize(("left", "right"), SHAPES, ids=str)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_pairs_of_unequal_shapes_give_the_same_text(
    left: dict[str, Any], right: dict[str, Any], transport: str
) -> None:
    model = spec(heads=4)
    async with pair(prefill=left, decode=right, transport=(transport,), model=model) as it:
        for path, body in (chat(), completion("ä word " * 20), completion("abcd")):
            told, whole = await asyncio.gather(it.both(body, path), it.whole.post(path, body))
            assert essence(told) == essence(whole)
        await it.at_rest()


async def test_pairs_of_a_layout_of_several_groups_give_the_same_text() -> None:
    groups = (LayoutGroup("kv", 512, (0, 2), "digest", parts=2, heads=2), LayoutGroup("c", 64, (1,), "digest"))
    async with pair(prefill={"tp": 2}, model=spec(groups=groups)) as it:
        told, whole = await it.both(BODY), await it.whole.post(COMPLETIONS, BODY)
        assert essence(told) == essence(whole)
        await it.at_rest()


async def test_a_request_without_params_is_computed_at_decode() -> None:
    async with pair() as it:
        path, body = completion("once upon a time", n=3, temperature=1, seed=5)
        assert essence(await it.decode.post(path, body)) == essence(await it.whole.post(path, body))
        again = await it.decode.post(path, body)
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 12
        await it.at_rest()


async def test_many_at_once_each_get_their_own_text() -> None:
    async with pair() as it:
        bodies = [completion(f"number {i} " * (1 + i % 4), max_tokens=8 + i)[1] for i in range(16)]
        pairs = await asyncio.gather(*(it.both(body) for body in bodies))
        wholes = await asyncio.gather(*(it.whole.post(COMPLETIONS, body) for body in bodies))
        assert [texts(one) for one in pairs] == [texts(one) for one in wholes]
        await it.at_rest()


# --- nothing leaves before it is confirmed ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_runs_ahead_of_the_confirmation_and_nothing_leaves(stream: bool) -> None:
    async with pair() as it:
        confirmations = Confirmations(it)
        asked = {**BODY, "stream": stream}
        talk = Talk(it.decode.url, {**asked, "kv_transfer_params": await it.params(asked)})
        await until(lambda: decode(it).running_engine.running == 0 and bool(it.decode.engine.added))
        [job] = decode(it).jobs.values()
        assert job.kept
        assert not talk.answered
        assert job.completion_tokens == 0
        confirmations.go()
        assert texts(await talk.answer()) == texts(await it.whole.post(COMPLETIONS, asked))
        await it.at_rest()


async def test_what_is_confirmed_in_the_middle_goes_out_and_the_rest_as_it_comes() -> None:
    async with pair() as it:
        it.decode.engine.allow = 5
        confirmations = Confirmations(it)
        asked = {**BODY, "stream": True}
        talk = Talk(it.decode.url, {**asked, "kv_transfer_params": await it.params(asked)})
        await until(lambda: it.decode.engine.allow == 0)
        confirmations.go()
        await until(lambda: all(job.kept is None for job in decode(it).jobs.values()))
        [job] = decode(it).jobs.values()
        assert job.completion_tokens > 0
        it.decode.let_go()
        assert len(events(await talk.answer())) == len(events(await it.whole.post(COMPLETIONS, asked)))
        await it.at_rest()


@pytest.mark.parametrize("steps", [0, 3, None])
async def test_what_is_refused_late_fails_and_nothing_of_it_was_said(steps: int | None) -> None:
    async with pair() as it:
        it.decode.engine.allow = steps
        confirmations = refusing(it)
        asked = {**BODY, "stream": True}
        talk = Talk(it.decode.url, {**asked, "kv_transfer_params": await it.params(asked)})
        await until(lambda: bool(confirmations.kept) and not it.decode.engine.allow and bool(it.decode.engine.added))
        confirmations.go()
        answer = await talk.answer()
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "expired")
        it.decode.let_go()
        await it.at_rest()


@pytest.mark.parametrize("steps", [0, 3, None])
async def test_what_is_refused_late_is_computed_here_where_that_is_the_policy(steps: int | None) -> None:
    async with pair(kv_load_failure_policy="recompute") as it:
        it.decode.engine.allow = steps
        confirmations = refusing(it)
        asked = {**BODY, "stream": True}
        talk = Talk(it.decode.url, {**asked, "kv_transfer_params": await it.params(asked)})
        await until(lambda: bool(confirmations.kept) and not it.decode.engine.allow and bool(it.decode.engine.added))
        confirmations.go()
        await until(lambda: all(job.kept is None for job in decode(it).jobs.values()))
        it.decode.let_go()
        assert texts(await talk.answer()) == texts(await it.whole.post(COMPLETIONS, asked))
        assert len(it.decode.engine.added) == 2
        await it.at_rest()


# --- what cannot be read ----------------------------------------------------------------------------------------------


async def test_a_read_that_fails_is_an_error_with_its_cause() -> None:
    async with pair() as it:
        moves = Moves(it, error="the wire is cut")
        answer = await it.both(BODY)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["retryable"]) == (502, "transfer_failed", True)
        assert "the wire is cut" in error["message"]
        moves.go()
        await it.at_rest()


async def test_a_read_that_fails_is_computed_here_where_that_is_the_policy() -> None:
    async with pair(kv_load_failure_policy="recompute") as it:
        Moves(it, error="the wire is cut")
        answer = await it.both({**BODY, "rid": "r"})
        assert texts(answer) == texts(await it.whole.post(COMPLETIONS, BODY))
        assert "recompute" in states(it.decode, "r")
        await it.at_rest()


async def test_prefill_that_dies_during_the_read_fails_it_and_decode_serves_on() -> None:
    async with pair() as it:
        Moves(it)
        talk = Talk(it.decode.url, {**BODY, "kv_transfer_params": await it.params(BODY)})
        await until(lambda: it.decode.group.figures()["parked"] == 1)
        await it.prefill.exit()
        answer = await talk.answer()
        assert answer.status_code in (502, 503)
        assert answer.json()["error"]["retryable"] is True
        await until(lambda: it.decode.idle)
        assert texts(await it.decode.post(COMPLETIONS, BODY)) == texts(await it.whole.post(COMPLETIONS, BODY))


# --- an end in any phase ----------------------------------------------------------------------------------------------


async def reading(it: Pair) -> Talk:
    Moves(it)
    talk = Talk(it.decode.url, {**BODY, "kv_transfer_params": await it.params(BODY)})
    await until(lambda: it.decode.group.figures()["parked"] == 1 and it.decode.pages(Page.GRANTED) > 0)
    return talk


async def unconfirmed(it: Pair) -> Talk:
    kept = Confirmations(it)
    talk = Talk(it.decode.url, {**BODY, "kv_transfer_params": await it.params(BODY)})
    await until(lambda: bool(kept.kept))
    return talk


async def running(it: Pair) -> Talk:
    it.decode.engine.allow = 3
    talk = Talk(it.decode.url, {**BODY, "kv_transfer_params": await it.params(BODY)})
    await until(lambda: it.decode.engine.allow == 0)
    return talk


PHASES = {"reading": reading, "unconfirmed": unconfirmed, "running": running}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_client_that_leaves_frees_both_sides(phase: str, transport: str) -> None:
    async with pair(transport=(transport,)) as it:
        talk = await PHASES[phase](it)
        await talk.drop()
        it.decode.let_go()
        await it.at_rest()


@pytest.mark.parametrize("phase", PHASES)
async def test_an_abort_by_rid_ends_it_in_any_phase(phase: str) -> None:
    async with pair() as it:
        talk = await PHASES[phase](it)
        [rid] = it.decode.group.jobs
        assert (await it.decode.post("/abort_request", {"rid": rid})).json() == {"aborted": 1}
        answer = await talk.answer()
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
        it.decode.let_go()
        await it.at_rest()


async def test_a_request_that_waits_for_pages_keeps_its_lease_and_runs_when_there_are_some() -> None:
    async with pair(prefill={"lease_s": 2.0}, decode={"pool_mb": 1, "reserve_tokens": 0}) as it:
        room = it.decode.capacity * 4
        it.decode.engine.allow = 0
        first = Talk(it.decode.url, {**BODY, "prompt": "x" * 400, "max_tokens": 100})
        second = Talk(it.decode.url, {**BODY, "prompt": "y" * 400, "max_tokens": 100})
        assert room < 1100
        await until(lambda: len(it.decode.group.jobs) == 2)
        asked = {**BODY, "prompt": "z" * 400}
        third = Talk(it.decode.url, {**asked, "kv_transfer_params": await it.params(asked)})
        await until(lambda: it.decode.group.figures()["waiting"] >= 1)
        it.decode.let_go()
        assert texts(await third.answer()) == texts(await it.whole.post(COMPLETIONS, asked))
        for talk in (first, second):
            assert (await talk.answer()).status_code == 200
        await it.at_rest()
