"""What a prefill holds in the params dialect: how long, for whom, and who lets go of it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from pdplane.core.errors import Cause
from pdplane.core.pages import Page
from pdplane.worker import server
from pdplane.worker.http.receiving import TIMEOUT_HEADER
from pdplane.worker.params_decode import ParamsDecodeShell
from pdplane.worker.params_prefill import ParamsPrefillShell
from pdplane.worker.server import Asked

from .fleets import COMPLETIONS, QUICK, Member, Talk, completion, member, texts, until
from .pairs import HOLD, Pair, pair

BODY = completion()[1]
ASK = {**BODY, "kv_transfer_params": HOLD}
CAUSE = Cause("released", "the test says so")


def prefill(**settings: Any) -> contextlib.AbstractAsyncContextManager[Member]:
    return member("prefill", dialect="params", **QUICK, **settings)


def shell(one: Member) -> ParamsPrefillShell:
    assert isinstance(one.shell, ParamsPrefillShell)
    return one.shell


async def held(one: Member, **fields: Any) -> str:
    """The name of a hold."""
    answer = await one.post(COMPLETIONS, {**ASK, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["kv_transfer_params"]["remote_request_id"])


async def test_a_hold_outlives_its_answer_and_is_seen() -> None:
    async with prefill(prefix_cache=False) as one:
        rid = await held(one)
        assert not one.group.jobs
        assert one.group.figures()["holds"] == 1
        assert one.pages(Page.HELD) == 4
        [hold] = (await one.get("/server_info")).json()["holds"]
        assert (hold["rid"], hold["pages"], hold["consumer"]) == (rid, 4, None)
        [leg] = (await one.get(f"/requests/{rid}")).json()["legs"]
        assert leg["hold"] == hold["hold"]
        assert [one["hold"] for one in leg["holds"]] == [hold["hold"]]
        assert leg["held_pages"] == {"held": 4}
        assert "Held" in [entry["state"] for entry in leg["entries"]]
        assert not one.idle


async def test_a_hold_ends_with_its_lease() -> None:
    async with prefill(lease_s=0.05) as one:
        await held(one)
        await until(lambda: one.idle)
        assert 'pdplane_hold_ended_total{what="lease_end",dp="0"} 1' in (await one.get("/metrics")).text


async def test_a_release_call_ends_it_at_once() -> None:
    async with prefill() as one:
        rid = await held(one)
        answer = await one.post("/v1/kv/release", {"request_ids": [rid, "nobody"]})
        assert answer.json() == {"released": [rid], "unknown": ["nobody"]}
        assert one.idle
        again = await one.post("/v1/kv/release", {"request_ids": [rid]})
        assert again.json() == {"released": [], "unknown": [rid]}


async def test_a_release_call_with_many_names_looks_each_of_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of all that is held for each of 20,000 names would stop the control thread for as long."""
    async with prefill() as one:
        rids = [await held(one) for _ in range(3)]
        told: list[int] = []
        list_holds = shell(one).node.holds_told

        def counted() -> list[dict[str, object]]:
            told.append(1)
            return list_holds()

        monkeypatch.setattr(shell(one).node, "holds_told", counted)
        names = [f"nobody-{number}" for number in range(20_000)]
        answer = (await one.post("/v1/kv/release", {"request_ids": [*names, *rids]})).json()
        assert (answer["released"], answer["unknown"]) == (rids, names)
        assert not told
        assert one.idle


@pytest.mark.parametrize("named", [True, False])
async def test_an_abort_call_ends_it_too(named: bool) -> None:
    async with prefill() as one:
        rid = await held(one)
        answer = await one.post("/abort_request", {"rid": rid} if named else {"abort_all": True})
        assert answer.json() == {"aborted": 1}
        assert one.idle


async def test_a_name_that_is_held_is_in_use() -> None:
    async with prefill(dp=2) as one:
        rid = await held(one, rid="mine")
        refused = await one.post(COMPLETIONS, {**ASK, "rid": rid})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "duplicate_rid")
        assert [hold["rid"] for hold in one.group.holds] == [rid]


async def test_a_client_that_leaves_while_prefill_computes_leaves_nothing_behind() -> None:
    async with prefill() as one:
        one.engine.allow = 0
        talk = Talk(one.url, ASK)
        await until(lambda: bool(one.group.figures()["computing"]))
        await talk.drop()
        await until(lambda: one.idle)


async def test_an_answer_that_nobody_was_there_to_read_is_held_for_nobody() -> None:
    async with prefill() as one:
        it = shell(one)
        rid = await held(one)
        it._unheard(it.holds[0]["rid"], CAUSE)
        assert one.idle
        assert (await one.post("/v1/kv/release", {"request_ids": [rid]})).json()["unknown"] == [rid]


async def test_one_sample_in_each_group_goes_to_the_least_loaded() -> None:
    async with prefill(dp=2) as one:
        one.engines[0].allow = 0
        first = Talk(one.url, ASK)
        await until(lambda: bool(one.shells[0].jobs))
        answer = await one.post(COMPLETIONS, ASK)
        told = answer.json()["kv_transfer_params"]
        assert (told["pd_dp"], told["pd_dp_size"]) == (1, 2)
        assert told["pd_instance"] == one.shells[1].instance
        one.let_go()
        assert (await first.answer()).json()["kv_transfer_params"]["pd_dp"] == 0
        assert one.group.figures()["holds"] == 2


# --- a drain waits for holds ----------------------------------------------------------------------------------------


async def drained(one: Member, said: list[str], *, shutdown_s: float = 60.0, asked: Asked | None = None) -> None:
    config = one.group.config
    object.__setattr__(config, "shutdown_s", shutdown_s)
    await server._drain(config, one.group, asked or Asked(), said.append)


async def test_a_drain_waits_until_what_is_held_was_read() -> None:
    async with pair() as it:
        params = await it.params(BODY)
        said: list[str] = []
        draining = asyncio.create_task(drained(it.prefill, said))
        await until(lambda: bool(said))
        assert "0 requests and 1 holds may finish" in said[0]
        refused = await it.hold(BODY)
        assert refused.status_code == 503
        assert not draining.done()
        answer = await it.read(BODY, params)
        assert texts(answer) == texts(await it.whole.post(COMPLETIONS, BODY))
        await draining
        assert said[-1] == "prefill: nothing is left"


async def test_a_drain_waits_no_longer_than_the_lease() -> None:
    async with prefill(lease_s=0.05) as one:
        await held(one)
        said: list[str] = []
        await drained(one, said)
        assert said[-1] == "prefill: nothing is left"
        assert not any("cut" in line.split(";")[0] for line in said)


async def test_a_drain_that_is_cut_names_what_was_held_and_tells_its_reader() -> None:
    async with pair() as it:
        params = await it.params(BODY)
        rid = params["remote_request_id"]
        said: list[str] = []
        await drained(it.prefill, said, shutdown_s=0.0)
        assert any(f"1 holds cut: hold {params['pd_grant']} of {rid}, 4 pages" in line for line in said)
        refused = await it.read(BODY, params)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "worker_stopping"


async def test_what_is_left_of_a_hold_is_named() -> None:
    async with prefill(prefix_cache=False) as one:
        rid = await held(one)
        assert server._left(one.group) == f"left: 4 pages held (hold 1 of {rid}, 4 pages)"


# --- one reader each ------------------------------------------------------------------------------------------------


async def refused(it: Pair, params: dict[str, Any], body: dict[str, Any] = BODY) -> tuple[int, str, bool]:
    answer = await it.read(body, params)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["retryable"]


async def serves(it: Pair) -> None:
    answer = await it.both(BODY)
    assert texts(answer) == texts(await it.whole.post(COMPLETIONS, BODY))


async def test_what_was_read_once_is_spent() -> None:
    async with pair() as it:
        params = await it.params(BODY)
        assert (await it.read(BODY, params)).status_code == 200
        assert await refused(it, params) == (409, "spent", False)
        await serves(it)
        await it.at_rest()


async def test_what_is_being_read_is_not_read_by_another() -> None:
    async with pair() as it:
        it.decode.engine.allow = 0
        params = await it.params(BODY)
        first = asyncio.create_task(it.read(BODY, params))
        await until(lambda: it.decode.engine.holds())
        status, code, _ = await refused(it, params)
        assert (status, code) == (409, "spent")
        it.decode.let_go()
        assert texts(await first) == texts(await it.whole.post(COMPLETIONS, BODY))
        await it.at_rest()


async def test_what_is_held_no_more_has_expired() -> None:
    async with pair(prefill={"lease_s": 0.05}) as it:
        params = await it.params(BODY)
        await until(lambda: it.prefill.idle)
        assert (await refused(it, params))[:2] == (409, "expired")
        await it.at_rest()


async def test_what_was_let_go_says_so() -> None:
    async with pair() as it:
        params = await it.params(BODY)
        await it.prefill.post("/v1/kv/release", {"request_ids": [params["remote_request_id"]]})
        assert await refused(it, params) == (409, "released", True)
        await serves(it)
        await it.at_rest()


async def test_a_hold_that_never_was_is_unknown() -> None:
    async with pair() as it:
        params = await it.params(BODY)
        assert (await refused(it, {**params, "pd_grant": 4711}))[:2] == (404, "unknown_hold")
        await serves(it)


async def test_another_prefills_hold_is_not_there() -> None:
    async with pair() as it:
        params = await it.params(BODY)
        other = {**params, "pd_instance": "another", "remote_engine_id": "another"}
        assert (await refused(it, other))[:2] == (409, "wrong_instance")
        await serves(it)


async def test_another_prompt_is_refused_and_lets_go() -> None:
    async with pair() as it:
        params = await it.params(BODY)
        assert await refused(it, params, {**BODY, "prompt": "once upon a tIme"}) == (400, "prompt_mismatch", False)
        await it.at_rest()


async def test_a_prefill_that_is_gone_is_unreachable() -> None:
    async with pair() as it:
        params = await it.params(BODY)
        await it.prefill.leave()
        status, _, retryable = await refused(it, params)
        assert (status, retryable) == (503, True)
        answer = await it.decode.post(COMPLETIONS, BODY)
        assert texts(answer) == texts(await it.whole.post(COMPLETIONS, BODY))


async def test_hosts_that_decode_may_not_ask_are_refused_and_not_dialled_for_any_reason() -> None:
    async with pair(decode={"prefill_allow": ("10.0.0.1",)}) as it:
        dialled: list[object] = []
        [shell] = it.decode.shells
        assert isinstance(shell, ParamsDecodeShell)
        shell.control.dial = lambda *where: dialled.append(where)  # type: ignore[method-assign]
        params = await it.params(BODY)
        assert await refused(it, params) == (400, "prefill_not_allowed", False)
        assert await refused(it, params, {**BODY, "temperature": 9}) == (400, "invalid_value", False)
        assert dialled == []


async def test_a_hold_that_is_brought_again_is_refused_where_it_waits_and_its_reader_keeps_it() -> None:
    async with pair(decode={"dp": 2, "reserve_tokens": 0}) as it:
        for engine in it.decode.engines:
            engine.allow = 0
        others = [Talk(it.decode.url, {**BODY, "prompt": letter * 400}) for letter in "abcde"]
        await until(lambda: [len(shell.jobs) for shell in it.decode.shells] == [3, 2])
        body = {**BODY, "prompt": "p" * 400}
        params = await it.params(body)
        first = asyncio.create_task(it.read({**body, "rid": "mine"}, params))
        await until(lambda: it.decode.shells[1].node.waiting == 1)  # for pages
        for more, status in (({"rid": "other"}, 409), ({"rid": "mine"}, 409), ({"temperature": 9}, 400)):
            assert (await refused(it, params, {**body, **more}))[0] == status
            [hold] = it.prefill.group.holds
            assert hold["hold"] == params["pd_grant"]
        it.decode.let_go()
        assert texts(await first) == texts(await it.whole.post(COMPLETIONS, body))
        for other in others:
            assert (await other.answer()).status_code == 200
        await it.at_rest()


async def test_a_draining_decode_lets_go_of_what_it_was_brought() -> None:
    async with pair() as it:
        params = await it.params(BODY)
        it.decode.group.drain("the test says so")
        assert (await refused(it, params))[0] == 503
        await it.at_rest()


@pytest.mark.parametrize("fields", [{"n": 2}, {"temperature": 9}, {"rid": "taken"}], ids=str)
async def test_decode_lets_go_at_once_of_what_it_refuses_to_read(fields: dict[str, Any]) -> None:
    async with pair() as it:
        it.decode.engine.allow = 0
        other = Talk(it.decode.url, {**BODY, "rid": "taken"})
        await until(lambda: bool(it.decode.group.jobs))
        params = await it.params(BODY)
        answer = await it.read({**BODY, **fields}, params)
        assert answer.status_code in (400, 409)
        await until(lambda: it.prefill.idle)
        it.decode.let_go()
        assert (await other.answer()).status_code == 200
        await it.at_rest()


async def test_a_decode_whose_queue_is_full_lets_go_of_what_it_cannot_take() -> None:
    async with pair(decode={"max_queue": 1, "reserve_tokens": 0}) as it:
        it.decode.engine.allow = 0
        others = [Talk(it.decode.url, {**BODY, "prompt": letter * 400}) for letter in "abc"]
        await until(lambda: it.decode.group.figures()["waiting"] == 1)
        answer = await it.both(BODY)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["retryable"]) == (429, "overloaded", True)
        await until(lambda: it.prefill.idle)
        it.decode.let_go()
        for other in others:
            assert (await other.answer()).status_code == 200
        await it.at_rest()


async def test_a_deadline_that_is_over_at_decode_lets_go_too() -> None:
    async with pair() as it:
        it.decode.engine.allow = 0
        params = await it.params(BODY)
        body = {**BODY, "kv_transfer_params": params}
        answer = await it.decode.post(COMPLETIONS, body, headers={TIMEOUT_HEADER: "0.05"})
        assert answer.status_code == 504, answer.text
        it.decode.let_go()
        await it.at_rest()
